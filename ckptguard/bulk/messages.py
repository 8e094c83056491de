"""What a coordinator and its workers tell each other: plain data, without secrets."""

from __future__ import annotations

from typing import Any

import msgspec

from ckptguard.scan.result import Scan
from ckptguard.values.ids import CheckpointId
from ckptguard.values.record_formats import MANIFEST, RECORDS, VERDICT
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Finding, Outcome
from ckptguard.version import __version__

Table = dict[str, Any]

# Workers that differ in any of these write records that another one may not understand.
SOFTWARE = {
    "ckptguard": __version__,
    "records": str(RECORDS.reads),
    "manifests": str(MANIFEST.writes),
    "verdicts": str(VERDICT.writes),
}
# Settings that may hold secrets, or that only a coordinator uses.
_STAY = ("storage", "webhook", "notify", "on_incident")
# What replicating a checkpoint did, as an outcome. Anything else has left it where it was.
OF_REPLICA = {"sent": Outcome.GOOD, "there": Outcome.GOOD, "damaged": Outcome.BAD}


class Portable(msgspec.Struct, frozen=True):
    """Settings without secrets: those that are no defaults, and the names of the storage options that a worker must
    have."""

    table: Table
    storage: tuple[str, ...] = ()


def portable(settings: Settings) -> Portable:
    """Return settings as they travel."""
    default = Settings()
    changed = (name for name in settings.__struct_fields__ if getattr(settings, name) != getattr(default, name))
    table = {name: msgspec.to_builtins(getattr(settings, name)) for name in changed if name not in _STAY}
    return Portable(table, settings.storage.names)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint that has something to be done. `place` is where: "place" or "kept" for a scrub, the replica's URL
    for a replica. Those of one `chain` of a run are done one after another. `files` with their sizes are given for
    large ones. `last`: when it was read, 0 is never."""

    path: str
    chain: str = ""
    id: CheckpointId | None = None
    place: str = ""
    layout: str = ""
    bytes: int = 0
    last: float = 0.0
    files: tuple[tuple[str, int], ...] = ()


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do: one of `worker.VERBS`, of one run or of one checkpoint in it.

    - `about`: what verb a plan is for. `max_age`: a scrub skips what was read within these seconds.
    - `files`: the part of a large checkpoint to scan. `scans`: what the scans of its parts found.
    - `large`: from how many bytes on a checkpoint is split.
    - `rate`: bytes a second that this task may read.
    """

    verb: str
    url: str
    name: str
    settings: Portable
    about: str = ""
    max_age: float = 0.0
    large: int = 0
    rate: float | None = None
    planned: Planned | None = None
    files: tuple[str, ...] = ()
    scans: tuple[Scan, ...] = ()


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one checkpoint now. `done`: a word about replicas. `message` says why there is no verdict."""

    run: str
    path: str
    outcome: Outcome
    id: CheckpointId | None = None
    place: str = ""
    bytes: int = 0
    seconds: float | None = None
    done: str = ""
    findings: tuple[Finding, ...] = ()
    message: str = ""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a report. `protected` is "yes", "partly" or "no". Times are in seconds since 1970."""

    url: str
    name: str
    protected: str
    explanation: str
    known_good: CheckpointId | None
    known_good_path: str | None
    known_good_at: float | None
    outcomes: dict[str, int]
    bytes: dict[str, int]
    bad: tuple[str, ...]
    oldest_read_at: float | None
    replicas_behind: int | None


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says. `trouble` says why something could not be done; the rest counts all the same.

    - `items`: what was done. Of a plan: what needs nothing, and is not good. `settled` counts all of these by outcome.
    - `events`: what people must be told.
    - `differs`: the worker has other software, and has done nothing.
    """

    host: str = ""
    items: tuple[Item, ...] = ()
    planned: tuple[Planned, ...] = ()
    settled: dict[str, int] = {}
    protection: int = 0
    scan: Scan | None = None
    row: RunRow | None = None
    events: tuple[Table, ...] = ()
    trouble: str = ""
    differs: dict[str, str] = {}


def item_of(task: Task, planned: Planned, outcome: Outcome, *, done: str = "", message: str = "") -> Item:
    """Return the line of a result about what was planned."""
    return Item(
        run=task.url,
        path=planned.path,
        id=planned.id,
        place=planned.place,
        outcome=outcome,
        bytes=planned.bytes,
        done=done,
        message=message,
    )

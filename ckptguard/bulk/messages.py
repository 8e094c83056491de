"""What a coordinator and its workers tell each other: plain data, without secrets."""

from __future__ import annotations

from typing import Any

import msgspec

from ckptguard.decisions.bulk_order import BulkJob
from ckptguard.errors import CkptguardError
from ckptguard.scan.result import Scan
from ckptguard.storage import Entry
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


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the coordinator sees in a place."""

    place: str
    entry: Entry


class Task(BulkJob, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker is to do: one of `worker.VERBS`, with one run or one checkpoint in it.

    - `settings`: those that are no defaults. `storage`: the names of the storage options that a worker must have.
    - `rate`: bytes a second that this task may read.
    - `shown`: what a worker on another machine must see, too.

    Of a checkpoint: `place` is "place" or "kept" for a scrub, and the replica's URL for a replica. A large one has
    `parts`, groups of its files. `files` is one of them, to be scanned, and `scans` what was found in all of them.
    """

    verb: str
    url: str
    settings: Table = msgspec.field(default_factory=dict)
    storage: tuple[str, ...] = ()
    rate: float | None = None
    shown: tuple[Witness, ...] = ()
    path: str = ""
    id: CheckpointId | None = None
    place: str = ""
    layout: str = ""
    parts: tuple[tuple[str, ...], ...] = ()
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


class TaskAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says. `trouble` says why something could not be done; the rest counts all the same.

    - `items`: what was done. `events`: what people must be told. `scan`: what a part of a checkpoint holds.
    - `differs`: the worker has other software; `blind`: it sees other storage. It has done nothing.
    - `host`, and `address` in Dask, say which worker it is.
    """

    host: str = ""
    address: str = ""
    items: tuple[Item, ...] = ()
    scan: Scan | None = None
    events: tuple[Table, ...] = ()
    trouble: str = ""
    differs: dict[str, str] = {}
    blind: str = ""


def portable(settings: Settings) -> Table:
    """Return settings as they travel: without secrets, and without defaults."""
    default = Settings()
    changed = (name for name in settings.__struct_fields__ if getattr(settings, name) != getattr(default, name))
    return {name: msgspec.to_builtins(getattr(settings, name)) for name in changed if name not in _STAY}


def item_of(task: Task, outcome: Outcome, **known: Any) -> Item:
    """Return what is known of a task's checkpoint. `known` replaces what the task says of it."""
    said: Table = {"run": task.url, "path": task.path, "id": task.id, "place": task.place, "bytes": task.bytes}
    return Item(outcome=outcome, **{**said, **known})


def trouble_of(error: Exception) -> str:
    """Return what an error says to people: also one that is a mistake of ours ends no job."""
    if isinstance(error, CkptguardError):
        return error.message + (f" ({error.hint})" if error.hint else "")
    return f"{type(error).__name__}: {error}"

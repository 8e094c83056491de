"""The rows of the catalogue. Text from files is escaped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from ckptguard.values.run_rows import Generation, IncidentRow
from ckptguard.values.run_summary import RunSummary


class CurveRow(msgspec.Struct, frozen=True, kw_only=True):
    """The curve of a run. `identity` is that of what it was made from, `source` says where it comes from.

    `packed` is a `Curve`, as JSON that is packed; empty if there is none.
    """

    identity: str = ""
    source: str | None = None
    packed: bytes = b""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. `key` is the same whenever the same event is noted again.

    - `kind`: verdict, incident, rollback, quarantine, prune, gone, replica or action. Only a stream has `change`: what
      is noted of the run changed otherwise. `cause`: the outcome, the cause or the verb.
    - `about`: the generation's name, the incident's, the action's, or the replica.
    """

    key: int
    kind: str
    at: float | None
    about: str
    step: int | None = None
    cause: str = ""
    text: str = ""


def event_key(*parts: str) -> int:
    """Return the key of an event."""
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest()) >> 1


class NumberedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a run, with its number. Later events have higher numbers, also in a catalogue that was rebuilt."""

    number: int
    run: str
    event: Event


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """What a catalogue holds of one run: rows by their names, its curve, and its events, the newest last."""

    generations: Mapping[str, Generation] = {}
    incidents: Mapping[str, IncidentRow] = {}
    curve: CurveRow = CurveRow()
    events: tuple[NumberedEvent, ...] = ()


class RunSeen(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one run at one moment. Its rows replace the earlier ones; its events are added.

    `digest` is that of what these rows were made from; empty if some records were not read yet. `curve`: None if it is
    the one that is known already. `paths`: where checkpoints are, whatever is known of them.
    """

    id: str
    digest: bytes
    summary: RunSummary
    generations: tuple[Generation, ...] = ()
    incidents: tuple[IncidentRow, ...] = ()
    events: tuple[Event, ...] = ()
    curve: CurveRow | None = None
    paths: frozenset[str] = frozenset()

"""The rows of the catalogue. Their fields are its columns. Text from files is escaped."""

from __future__ import annotations

import hashlib

import msgspec

from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard.values.run_facts import RunFacts


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One content of one checkpoint that the records name. None: there is none, or its records were not read yet.

    - `name`: its series and its id, as in the names of the records.
    - `outcome`, `verdict`: those of the verdict that counts. "pending": there is none.
    - `good`: its sealed bytes are good, wherever a whole copy of them is.
    - `kept`: how its kept copy was made: link, reflink or copy. `aside`: quarantine or trash.
    - `reason`: the heaviest finding of that verdict, in one line.
    - `updates`: how many the checkpoint itself says it has behind it.
    - `pinned`: why a user pinned it, so that nothing removes it. Empty: nobody did.
    - `scrubbed_at`: when the place of it that waits longest was last read.
    """

    name: str
    path: str | None = None
    outcome: str = "pending"
    verdict: str = ""
    good: bool = False
    bytes: int | None = None
    saved_at: float | None = None
    updates: int | None = None
    judged_at: float | None = None
    reason: str = ""
    world_size: int | None = None
    in_place: bool = False
    kept: str = ""
    aside: str = ""
    pinned: str = ""
    replicated: int = 0
    scrubbed_at: float | None = None

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        folder, _, name = self.name.partition("/")
        id = id_from_record(folder, name)
        assert id is not None
        return id


class IncidentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. `cause` is None if its record cannot be read. `went_back` names the rollback that ended it.

    - `at`: when it was opened. `onset`: the first suspect update. `open`: it is not closed.
    - `went_back`: the id of the checkpoint, and the incident's own name if it was the only one that it ended.
    """

    name: str
    revision: int
    cause: str | None = None
    step: int | None = None
    at: float | None = None
    onset: int | None = None
    open: bool = False
    reason: str = ""
    went_back: str | None = None
    went_back_to: int | None = None


class CurveRow(msgspec.Struct, frozen=True, kw_only=True):
    """The curve of a run. `identity` is that of what it was made from, `source` says where it comes from.

    `packed` is a `Curve`, as JSON that is packed; empty if there is none.
    """

    identity: str = ""
    source: str | None = None
    packed: bytes = b""


LONGEST_TEXT = 500  # characters of a text from a record


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. `key` is the same whenever the same event is noted again.

    - `kind`: verdict, incident, rollback, quarantine, prune, gone, replica or action. `cause`: the outcome, the cause
      or the verb.
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


class RunSeen(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one run at one moment. Its rows replace the earlier ones; its events are added.

    `digest` is that of what these rows were made from; empty if some records were not read yet. `curve`: None if it is
    the one that is known already.
    """

    id: str
    digest: bytes
    facts: RunFacts
    generations: tuple[Generation, ...] = ()
    incidents: tuple[IncidentRow, ...] = ()
    events: tuple[Event, ...] = ()
    curve: CurveRow | None = None

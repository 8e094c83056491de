"""What is known of a run: its saves, its incidents and its places. Text from files is escaped."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ckptguard.values.ids import CheckpointId, id_from_record

LONGEST_TEXT = 500  # characters of a text from a record


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
    - `md5`: where its MD5 is on record: "sealed" with it or taken "later". Empty: nowhere.
    - `thinned`: it lacks what only a resume needs.
    - `content`: equal for equal bytes, under whatever name. Empty: not known.
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
    pinned_until: float | None = None
    replicated: int = 0
    scrubbed_at: float | None = None
    md5: str = ""
    content: str = ""
    thinned: bool = False

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
    - `went_back_at`: when. Release 0.1 did not record it: then it is the time of the incident.
    - `decided_at`: when it was closed, by a rollback or otherwise. None: it is open, nobody recorded when, or another
      incident about the same trouble says it.
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
    went_back_at: float | None = None
    decided_at: float | None = None


class WaitingSave(msgspec.Struct, frozen=True):
    """A save in place that has no verdict. `since` is when it was first seen so, in seconds since 1970. `unfinished`: a
    part of it is missing."""

    series: str
    bytes: int
    written_at: float | None
    since: float | None = None
    unfinished: bool = False

    @property
    def waits_since(self) -> float | None:
        """When it was written, or first seen if nobody knows."""
        return self.written_at or self.since


class FilesInPlace(msgspec.Struct, frozen=True):
    """The files in place of a save that has its verdict. `unread`: nobody can look at them now."""

    bytes: int
    written_at: float | None = None
    unread: bool = False


class RunPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a run and its replicas now. `places` are the judged saves in place.

    `replicated` says how many replicas hold a generation. `watched`: somebody gives the saves that wait their verdicts.
    """

    url: str
    places: Mapping[CheckpointId, FilesInPlace] = {}
    waiting: tuple[WaitingSave, ...] = ()
    watched: bool = True
    replicas: int = 0
    behind: int | None = 0  # None: of some replica nobody knows what it holds
    replicated: Mapping[CheckpointId, int] = {}
    scrub_interval: float | None = None
    keep: str = ""
    takes_md5: bool = True  # its good saves get their MD5 on record
    not_understood: int = 0  # files that may be state, and that nothing verifies
    unread: int = 0  # places that nobody can look at

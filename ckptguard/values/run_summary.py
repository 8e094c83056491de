"""The summary of one run: what `status`, `fleet`, the page, the metrics and the alerts say of it."""

from __future__ import annotations

import msgspec

from ckptguard.values.silence import Silence


class LastIncident(msgspec.Struct, frozen=True):
    """The newest incident of a run."""

    name: str
    cause: str
    step: int | None
    at: float | None
    open: bool


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run as of one moment. Times are in seconds since 1970. None: there is none, or nobody knows."""

    url: str
    name: str  # the last part of the URL, or what the fleet's file calls it
    labels: dict[str, str] = {}  # whose it is: team, project, owner
    state: str = "guarded"  # "waiting" (no such folder yet) | "guarded" | "failing" | "ended"
    protected: bool = False  # there is a known-good checkpoint, with an independent copy of it or an older one
    explanation: str = ""  # why, in one sentence. Empty: nothing was seen yet
    training: bool = False  # a save arrived within the last three save intervals, and was not rolled back
    known_good_step: int | None = None
    known_good_at: float | None = None  # when the known-good checkpoint was saved
    safe_at: float | None = None  # the same of the newest good one with a full copy or a replica
    newest_at: float | None = None  # when the newest save was made, of those that no rollback moved aside
    newest_outcome: str | None = None
    trained_at: float | None = None  # when training saved last; None if it went back, and has saved nothing since
    saved_at: float | None = None  # the same, whether it went back or not
    saving_stopped: bool | None = None  # training goes on, and no save came for three save intervals
    save_interval: float | None = None  # seconds: the median between the last saves
    world_size: int | None = None  # GPUs that train it
    began_at: float | None = None  # when its first save on record was made
    checkpoints: dict[str, int] = {}  # how many are in place, by outcome
    bytes: dict[str, int] = {}  # of those, by outcome
    backlog: int = 0  # saves that wait for their verdict
    backlog_bytes: int = 0
    waiting_since: float | None = None  # when the oldest of them was written, or seen first if nobody knows
    unfinished_since: float | None = None  # when the newest save was last written, if a part of it is missing
    not_understood: int = 0  # files that may be state, and that nothing verifies
    unreadable: int = 0  # folders and names in the run that nobody can look at
    growth: float | None = None  # bytes a second, by its older saves on record; None: these are too few
    free: int | None = None  # bytes, where its checkpoints are
    full_in: float | None = None  # seconds until they are used up, as the runs there grow; None: this one does not
    without_md5: int = 0  # good saves whose MD5 is yet to be taken
    replicas: int = 0  # how many are configured
    replicas_behind: int = 0  # good checkpoints that some replica does not have for certain
    scrubbed_at: float | None = None  # when the place that waits longest was last read
    scrub_interval: float | None = None  # seconds after which a place is read again
    incidents: dict[str, int] = {}  # by cause
    rollbacks: dict[str, int] = {}  # by cause
    steps_saved: int = 0  # updates that rollbacks did not have to repeat from the start
    last_incident: LastIncident | None = None
    silence: Silence | None = None  # what keeps messages and alerts back, or a record of it that cannot be read

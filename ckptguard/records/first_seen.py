"""Sightings: for how long has this machine known of something, by its own clock? What another machine's clock says, and
what a file's time says, may be wrong by years."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection

import msgspec

from ckptguard.errors import CouldNotTellError, ObjectExistsError
from ckptguard.records.clock import utc_text
from ckptguard.records.elapsed import Moment, seconds_of, surely_passed, this_moment
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.values.record_text import decode_record

FOLDER = "seen"


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """When a machine saw `what` (a key) first: by its wall clock, and in seconds from its start."""

    format: int = 1
    what: str
    host: str
    boot_id: str
    uptime: float
    since: str

    @property
    def key(self) -> str:
        """The record's key: each start of each machine has its own."""
        name = hashlib.sha256("\0".join((self.what, self.host, self.boot_id)).encode()).hexdigest()
        return f"{FOLDER}/{name[:32]}.json"


def seen_for(run: Run, what: str, *, note: bool = False) -> float | None:
    """For how many seconds this machine has known of it for sure; None if it has not noted it, which it does now with
    `note`."""
    now = this_moment()
    here = Sighting(what=what, host=now.host, boot_id=now.boot_id, uptime=now.uptime, since=utc_text(now.wall))
    before = _read(run, here.key)
    if before is not None:
        wall = seconds_of(before.since)
        then = Moment(wall=now.wall if wall is None else wall, host=now.host, boot_id=now.boot_id, uptime=before.uptime)
        return surely_passed(then, now)
    if note:
        with contextlib.suppress(ObjectExistsError):
            create_record(run, here.key, msgspec.json.encode(here) + b"\n")
        return 0.0
    return None


def forget_sightings(run: Run, keep: Collection[str]) -> None:
    """Remove what was noted of anything else, by whatever machine. What cannot be read goes too: it is noted anew."""
    for name in list_records(run, FOLDER):
        key = f"{FOLDER}/{name}"
        found = _read(run, key)
        if found is None or found.key != key or found.what not in keep:
            run.records.remove(key)


def _read(run: Run, key: str) -> Sighting | None:
    try:
        return decode_record(read_record(run, key) or b"", Sighting, "what was seen here")
    except CouldNotTellError:
        return None

"""The starts of a training that a gate let through, and the checkpoint that each of them was to resume from.

A record is written before the training starts. Records of starts that count no longer are removed.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar

import msgspec

from ckptguard.decisions.restarts import StartPoint
from ckptguard.errors import CouldNotTellError
from ckptguard.records.leases import Lease, new_lease, surely_gone, take
from ckptguard.records.run import Run, list_records, read_sound
from ckptguard.records.who_and_when import this_process

FOLDER = "starts"


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of a job by a scheduler. `job` is its id, which no other job has, also none of the same array. `requeue`
    is how often the scheduler had put it back into its queue. `prolog`: the gate ran before the job itself did."""

    job: str
    requeue: int = 0
    prolog: bool = False


class Start(Lease, frozen=True, kw_only=True):
    """One start. Its owner is the process that became the training. `number` orders the starts of a run. `job` is None
    outside of a scheduler's job, and in records of older versions."""

    silence: ClassVar[float | None] = 60.0  # so long a gate elsewhere counts as a part of the same start

    number: int
    point: StartPoint
    job: JobStart | None = None

    @property
    def key(self) -> str:
        """The record's key: two gates that decide at once cannot both write it."""
        return f"{FOLDER}/{self.number:09d}.json"


def list_starts(run: Run) -> list[Start]:
    """Return every start on record, oldest first. Damaged records do not count. Raises CouldNotTellError."""
    keys = [f"{FOLDER}/{name}" for name in list_records(run, FOLDER)]
    found = [start for key in keys if (start := read_sound(run, key, Start, "a start")) and start.key == key]
    return sorted(found, key=lambda start: start.number)


def last_number(run: Run) -> int:
    """Return the number of the last start on record, damaged or not; 0 if there is none."""
    stems = (name.removesuffix(".json") for name in list_records(run, FOLDER))
    return max((int(stem) for stem in stems if stem.isascii() and stem.isdigit()), default=0)


def still_goes_on(run: Run, start: Start) -> bool:
    """True if a gate that runs now belongs to this start, such as that of another rank."""
    return start.owner != this_process() and not surely_gone(run, start)


def same_job(start: Start, job: JobStart | None) -> bool:
    """True if a start was one of the same job, whatever its requeue count, or if neither has a job."""
    return (start.job.job if start.job else None) == (job.job if job else None)


def record_start(run: Run, point: StartPoint, *, after: int, job: JobStart | None = None) -> bool:
    """Record that a training starts now. False if another start was recorded since number `after`."""
    return take(run, new_lease(Start, number=after + 1, point=point, job=job))


def forget_starts(run: Run, starts: list[Start]) -> None:
    """Remove starts that count no longer. One that cannot be removed does no harm."""
    for start in starts:
        with contextlib.suppress(CouldNotTellError):
            run.records.remove(start.key)

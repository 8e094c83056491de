"""In which order bulk work is done: the least protected first, then what waits longest, then the largest."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from ckptguard.values.ids import short_digest

SLOWEST = 50e6  # bytes a second that one worker reads from common storage: what an estimate assumes without a rate
EACH_FILE = 0.05  # seconds besides its bytes: a local disk takes 0.015, an object store several requests


class BulkJob(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of bulk work. Jobs of one `chain` are done one after another, in the given order.

    `protection`: how well its run is protected now, 0 is not at all. `last`: when its bytes were last read, in seconds
    since 1970; 0 is never. `file_count`: of how many files its `bytes` are.
    """

    number: int = 0
    chain: str = ""
    protection: int = 0
    last: float = 0.0
    bytes: int = 0
    file_count: int = 0


AnyJob = TypeVar("AnyJob", bound=BulkJob)


class BulkQueue(Generic[AnyJob]):
    """The jobs that nobody has begun. `take` the best one, and say `free` when it is done."""

    def __init__(self, jobs: Iterable[AnyJob]) -> None:
        self._chains: dict[str, deque[AnyJob]] = {}
        self._left: dict[str, int] = {}
        for job in jobs:
            self._chains.setdefault(job.chain, deque()).append(job)
            self._left[job.chain] = self._left.get(job.chain, 0) + job.bytes
        self._ready: list[tuple[int, float, int, int, AnyJob]] = []
        for chain in self._chains:
            self._offer(chain)

    def take(self) -> AnyJob | None:
        """Return the job to begin now; None if each chain that is not done has one under way."""
        return heapq.heappop(self._ready)[-1] if self._ready else None

    def free(self, job: AnyJob) -> None:
        """A job is done: its chain may go on."""
        self._left[job.chain] -= job.bytes
        self._offer(job.chain)

    def __len__(self) -> int:
        """Return how many jobs nobody has begun."""
        return len(self._ready) + sum(map(len, self._chains.values()))

    def _offer(self, chain: str) -> None:
        if not self._chains[chain]:
            return
        job = self._chains[chain].popleft()
        # A chain counts as a whole: its end cannot come before all of it was read.
        heapq.heappush(self._ready, (job.protection, job.last, -self._left[chain], job.number, job))


def parts_of(files: Iterable[tuple[str, int]], small: int) -> list[tuple[str, ...]]:
    """Split the files of a large checkpoint, given with their sizes, into parts for one task each, the largest first.
    Files of less than `small` bytes are one part together."""
    ordered = sorted(files, key=lambda file: -file[1])
    parts: list[tuple[str, ...]] = [(name,) for name, size in ordered if size >= small]
    together = tuple(name for name, size in ordered if size < small)
    return [*parts, together] if together else parts


def seconds_for(bytes: int, files: int, *, workers: int, rate: float | None) -> float:
    """Estimate how long it takes to read these bytes of these files: at the rate, else at what workers commonly
    reach."""
    fastest = SLOWEST * workers
    return bytes / (fastest if rate is None else min(rate, fastest)) + files * EACH_FILE / workers


def shard_of(run: str, shards: int) -> int:
    """Return which shard, from 1, has a run.

    Its URL alone decides. So shards that list the fleet at other times, with more runs in it, agree. A run is not
    divided: the saves of a series are compared with each other in their order.
    """
    return int(short_digest(run), 16) % shards + 1

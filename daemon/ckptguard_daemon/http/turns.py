"""Work that asks a storage, in a few threads: a slow run or a busy caller holds up nobody else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from starlette.requests import Request

from ckptguard.errors import BusyError
from ckptguard_daemon.http.routes import caller_of

_Answer = TypeVar("_Answer")
_Share = tuple[str, str]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much may be done at a time: in all, for one caller, and about one run.

    `waiting`: how many more questions of one caller may wait.
    """

    most: int
    of_caller: int
    of_run: int
    waiting: int


class Turns:
    """Has work done in threads. Who waits only because its caller or its run has its share lets others pass."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._queues: dict[asyncio.AbstractEventLoop, _Queue] = {}  # one for each server

    async def do(self, request: Request, work: Callable[[], _Answer]) -> _Answer:
        """Return what `work` returns. Raises BusyError if too many of this caller wait."""
        queue = self._queues.setdefault(asyncio.get_running_loop(), _Queue(self._bounds))
        caller, run = caller_of(request).name, request.path_params["run"]
        await queue.enter(caller, run)
        try:
            return await anyio.to_thread.run_sync(work, limiter=queue.threads)
        finally:
            queue.leave(caller, run)


class _Queue:
    """The turns of one event loop."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.threads = CapacityLimiter(bounds.most)
        self._callers, self._runs = Counter[str](), Counter[str]()
        self._waiting: dict[asyncio.Future[None], _Share] = {}  # the oldest first

    async def enter(self, caller: str, run: str) -> None:
        """Wait for a turn."""
        if self._take((caller, run)):
            return
        if sum(other == caller for other, _ in self._waiting.values()) >= self._bounds.waiting:
            raise BusyError("too many of your questions wait for slow storages", hint="try again in a few seconds")
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = (caller, run)
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # it had its turn already
                self.leave(caller, run)
            raise

    def leave(self, caller: str, run: str) -> None:
        """Give the turn to the first that may have it."""
        self._callers[caller] -= 1
        self._runs[run] -= 1
        self._callers, self._runs = +self._callers, +self._runs
        for turn, share in list(self._waiting.items()):
            if self._take(share):
                del self._waiting[turn]
                turn.set_result(None)

    def _take(self, share: _Share) -> bool:
        (caller, run), bounds = share, self._bounds
        free = self._callers.total() < bounds.most and self._callers[caller] < bounds.of_caller
        if not free or self._runs[run] >= bounds.of_run:
            return False
        self._callers[caller] += 1
        self._runs[run] += 1
        return True

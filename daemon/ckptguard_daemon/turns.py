"""Work that asks a storage, in a few threads: a run that hangs keeps only some of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from ckptguard.errors import BusyError

_Answer = TypeVar("_Answer")
_MOST_WAITING = 256  # about one run


class Turns:
    """Has work done in `most` threads at a time, and in `of_run` of them for one run."""

    def __init__(self, *, most: int, of_run: int) -> None:
        self._most, self._of_run = most, of_run
        self._limits: dict[tuple[asyncio.AbstractEventLoop, str], CapacityLimiter] = {}  # each server has a loop

    async def do(self, run_id: str, work: Callable[[], _Answer]) -> _Answer:
        """Return what `work` returns. Raises BusyError if too much about the run waits."""
        loop = asyncio.get_running_loop()
        threads = self._limits.setdefault((loop, ""), CapacityLimiter(self._most))
        turns = self._limits.setdefault((loop, run_id), CapacityLimiter(self._of_run))
        if turns.statistics().tasks_waiting >= _MOST_WAITING:
            raise BusyError("too many questions about this run wait for its storage", hint="try again in a few seconds")
        async with turns:
            return await anyio.to_thread.run_sync(work, limiter=threads)

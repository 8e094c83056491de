"""What requests ask of storage, in threads: short work in a few that all share, and long work as jobs, each in a thread
of its own, whose caller may come back for the answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from ckptguard.documents.build import Document
from ckptguard.errors import BusyError, CkptguardError, NotFoundError
from ckptguard.storage.failures import machine_trouble
from ckptguard_daemon.liveness import WorkStop
from ckptguard_daemon.log import log

LONGEST_JOB = 6 * 3600.0  # seconds; then its work is stopped
MOST_RUNNING = 6
_MOST_REMEMBERED = 32
_BUSY_HINT = "try again when it has ended"
_MOST_WAITING = 256  # about one run

_Answer = TypeVar("_Answer")


class StorageThreads:
    """Has work done in `most` threads at a time, and in `of_run` of them for one run: one that hangs keeps only
    those."""

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


class ActionJob:
    """One piece of work for a run. `exclusive`: it changes the run, so no other one of it does so beside."""

    def __init__(self, id: str, run_id: str, what: str, stop: threading.Event, *, exclusive: bool) -> None:
        self.id, self.run_id, self.what, self.exclusive = id, run_id, what, exclusive
        self.until = time.time() + LONGEST_JOB
        self.stop = WorkStop(stop, time.monotonic() + LONGEST_JOB)
        self.thread: threading.Thread  # which does it, once it has begun
        self.answer: Future[Document] = Future()
        self.answer.set_running_or_notify_cancel()  # who asked may go, but cannot cancel it

    async def wait(self, seconds: float) -> Document | None:
        """Return the answer, or None if there is none after `seconds`. Raises what the work raised."""
        waiting = asyncio.wrap_future(self.answer)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody looks any more
        done, _ = await asyncio.wait([waiting], timeout=seconds)
        return waiting.result() if done else None


Work = Callable[[ActionJob], Document]


class Jobs:
    """The jobs of all runs. Any thread may call it."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._jobs: dict[str, ActionJob] = {}  # the oldest first

    def begin(self, id: str, run_id: str, what: str, work: Work, *, exclusive: bool) -> ActionJob:
        """Begin a job. Raises BusyError if too many run, or if another one changes this run."""
        with self._lock:
            running = [job for job in self._jobs.values() if not job.answer.done()]
            if self._stop.is_set():
                raise BusyError("the daemon is ending")
            other = next((job for job in running if job.run_id == run_id and exclusive and job.exclusive), None)
            if other is not None:
                raise BusyError(f"another action on this run is under way: {other.what}", hint=_BUSY_HINT)
            if len(running) >= MOST_RUNNING:
                raise BusyError(f"{len(running)} actions are under way already", hint=_BUSY_HINT)
            job = self._jobs[id] = ActionJob(id, run_id, what, self._stop, exclusive=exclusive)
            job.thread = threading.Thread(target=_run, args=(job, work), name="job", daemon=True)
            ended = [known for known, one in self._jobs.items() if one.answer.done()]
            for known in ended[: max(0, len(self._jobs) - _MOST_REMEMBERED)]:
                del self._jobs[known]
        try:
            job.thread.start()
        except RuntimeError as error:  # no more threads
            with self._lock:
                del self._jobs[id]
            raise BusyError(f"there is no thread for it: {error}", hint=_BUSY_HINT) from error
        return job

    def get(self, id: str, run_id: str) -> ActionJob:
        """Return a job of a run. Raises NotFoundError."""
        job = self._jobs.get(id)
        if job is None or job.run_id != run_id:
            raise NotFoundError(f"there is no job {id[:40]}", hint="GET /v1/runs/{run}/actions lists what was done")
        return job

    def wait_for_end(self, seconds: float) -> bool:
        """Return whether all jobs end within this time. Call it after `stop` was set."""
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = [job.thread for job in self._jobs.values() if job.thread.is_alive()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _run(job: ActionJob, work: Work) -> None:
    try:
        job.answer.set_result(work(job))
    except CkptguardError as error:
        job.answer.set_exception(error)
    except BaseException as error:
        reported: CkptguardError | None = machine_trouble(error)
        if reported is None:
            log("job_failed", level="error", trace=True, what=job.what)
            reported = CkptguardError(f"unexpected {type(error).__name__}")
        job.answer.set_exception(reported)

"""Have an engine do tasks: some at once, each until it has an answer, whatever becomes of the workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from ckptguard.bulk.engine import Engine, compare
from ckptguard.bulk.messages import Answer, Table, Task
from ckptguard.decisions.bulk_order import Waiting
from ckptguard.scan.result import Scan
from ckptguard.values.ids import escape
from ckptguard.values.record_text import decodable

_EACH = 4  # tasks in flight for each worker, so that none waits for the coordinator
_TICK = 1.0  # seconds between looks at the engine


def dispatch(engine: Engine, tasks: Iterable[Task], rate: float | None = None) -> Iterator[tuple[Task, Answer]]:
    """Yield each task with its answer, as they come. `rate`: bytes a second for all of them together.

    A task whose worker dies is tried again, alone. If its worker dies again, the answer says so. Raises WorkerError if
    the engine is lost: what has no answer then is still to be done.
    """
    this = _Dispatch(engine, Waiting(tasks), rate)
    try:
        while this.begin():
            for attempt, answer in this.answered():
                if this.ends(attempt, answer):
                    yield attempt.job, answer
                    this.waiting.free(attempt.job)
    finally:
        for future in this.flying:
            future.cancel()


@dataclass(eq=False)
class _Attempt:
    """What is or will be in flight for a job: its task, or the scan of a part."""

    job: Task
    task: Task
    was_lost: bool = False  # with its worker


class _Dispatch:
    """The state of one dispatch."""

    def __init__(self, engine: Engine, waiting: Waiting[Task], rate: float | None) -> None:
        self._engine, self.waiting = engine, waiting
        self.flying: dict[Future[Table], _Attempt] = {}
        self._ended: SimpleQueue[Future[Table]] = SimpleQueue()
        self._next: deque[_Attempt] = deque()
        self._alone: deque[_Attempt] = deque()  # those that were lost
        self._scans: dict[int, list[Scan]] = {}  # of jobs in parts
        self._looked = 0.0
        # With a rate no task waits at a worker, where its share would be lost.
        self._most = None if rate is None else engine.workers
        self._share = None if rate is None else rate / engine.workers

    def begin(self) -> bool:
        """Submit what may be in flight now. False if nothing is: all is done."""
        while len(self.flying) < (self._most or self._engine.workers * _EACH):
            attempt = self._choose()
            if attempt is None:
                break
            future = self._engine.submit(msgspec.structs.replace(attempt.task, rate=self._share))
            self.flying[future] = attempt
            future.add_done_callback(self._ended.put)
        return bool(self.flying)

    def answered(self) -> Iterator[tuple[_Attempt, Answer]]:
        """Yield what has ended, and its answer. Nothing, if nothing ends within a second, or what ended is to be tried
        again. Raises WorkerError if the engine is lost."""
        if time.monotonic() - self._looked >= _TICK:
            self._looked = time.monotonic()
            self._engine.look()
        try:
            future = self._ended.get(timeout=_TICK)
        except Empty:
            return
        attempt = self.flying.pop(future)
        try:
            answer = msgspec.convert(future.result(), decodable(Answer))
            if not answer.host:
                raise ValueError("its answer is not from us")
        except Exception as error:  # no task raises: it is its worker, or the engine
            yield from self._lost(attempt, error)
            return
        if answer.differs:
            compare({"host": answer.host, "software": answer.differs})
        yield attempt, answer

    def ends(self, attempt: _Attempt, answer: Answer) -> bool:
        """True if this answer is that of the job, not only that of a part of it."""
        job, number = attempt.job, attempt.job.number
        if attempt.task.verb != "scan":
            return True
        if number not in self._scans:
            return False  # another part has failed, and with it the job
        if answer.scan is None:
            del self._scans[number]
            self._next = deque(other for other in self._next if other.job is not job)
            return True
        self._scans[number].append(answer.scan)
        if len(self._scans[number]) == len(job.parts):
            whole = msgspec.structs.replace(job, scans=tuple(self._scans.pop(number)))
            self._next.appendleft(_Attempt(job, whole))
        return False

    def _choose(self) -> _Attempt | None:
        if not self._next and (job := self.waiting.take()) is not None:
            if job.parts:
                self._scans[job.number] = []
            parts = [msgspec.structs.replace(job, verb="scan", files=files) for files in job.parts]
            self._next += [_Attempt(job, task) for task in parts or [job]]
        if self._next:
            return self._next.popleft()
        # Whatever else is in flight could die with a task that kills its worker, and would then look like it.
        return self._alone.popleft() if self._alone and not self.flying else None

    def _lost(self, attempt: _Attempt, error: Exception) -> Iterator[tuple[_Attempt, Answer]]:
        self._engine.look()
        if not attempt.was_lost:
            attempt.was_lost = True
            self._alone.append(attempt)
            return
        self._engine.check()
        reason = ": ".join(filter(None, (type(error).__name__, escape(str(error)[:300]))))
        yield attempt, Answer(trouble=f"its worker died twice while it was read ({reason})")

"""Have an engine do jobs: bounded in flight, each once, whatever becomes of its workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass, field

import msgspec

from ckptguard.bulk.engine import Engine, compare
from ckptguard.bulk.messages import Answer, Table, Task
from ckptguard.decisions.bulk_order import Job, Waiting
from ckptguard.values.ids import escape
from ckptguard.values.record_text import decodable

_EACH = 4  # tasks in flight for each worker, so that none waits for the coordinator
_TICK = 1.0  # seconds between looks at the engine
_DIED = "its worker died twice while it was read"

Steps = Callable[[Job], Sequence[Task]]
Joined = Callable[[Job, Sequence[Answer]], Task]
Done = Callable[[Job, Answer], None]


@dataclass
class _Call:
    """One task that is or will be in flight. `losses` counts the workers that were lost with it."""

    job: Job
    task: Task
    losses: int = 0
    part: int | None = None


@dataclass
class _Parts:
    """What the parts of a job said so far."""

    answers: list[Answer | None]


@dataclass
class Drive:
    """How jobs are done.

    - `steps` returns the tasks of a job: one, or several parts. `joined` returns the task that follows the parts.
    - `done` takes the answer of each job. `tick` is called about every second.
    - `rate`: bytes a second for all tasks together. Each of those under way has an equal share.
    """

    engine: Engine
    steps: Steps
    done: Done
    joined: Joined | None = None
    tick: Callable[[], None] = lambda: None
    rate: float | None = None
    _flying: dict[Future[Table], tuple[_Call, Executor]] = field(default_factory=dict)
    _calls: deque[_Call] = field(default_factory=deque)
    _suspects: deque[_Call] = field(default_factory=deque)
    _parts: dict[int, _Parts] = field(default_factory=dict)
    _looked: float = 0.0
    _lanes: int = 0  # with a rate: how many tasks share it

    def run(self, waiting: Waiting) -> None:
        """Do all jobs. Raises WorkerError if the engine is lost: what has no answer then is still to be done."""
        self._lanes = self.engine.workers
        try:
            while True:
                self._fill(waiting)
                if not self._flying:
                    return
                for future in wait(self._flying, timeout=_TICK, return_when=FIRST_COMPLETED).done:
                    self._take(future, waiting)
                now = time.monotonic()
                if now - self._looked >= _TICK:
                    self._looked = now
                    self.engine.look()
                    self.tick()
        finally:
            for future in self._flying:
                future.cancel()

    def _fill(self, waiting: Waiting) -> None:
        # With a rate no task waits at a worker, where its share would be lost.
        most = self.engine.workers * _EACH if self.rate is None else self._lanes
        while len(self._flying) < most and (call := self._next(waiting)) is not None:
            task = call.task
            if self.rate is not None:
                task = msgspec.structs.replace(task, rate=self.rate / self._lanes)
            executor, future = self.engine.submit(msgspec.to_builtins(task))
            self._flying[future] = call, executor

    def _next(self, waiting: Waiting) -> _Call | None:
        if not self._calls and (job := waiting.take()) is not None:
            tasks = self.steps(job)
            if len(tasks) > 1:
                self._parts[job.number] = _Parts([None] * len(tasks))
            self._calls += [_Call(job, task, part=n if len(tasks) > 1 else None) for n, task in enumerate(tasks)]
        if self._calls:
            return self._calls.popleft()
        # Whatever else is in flight could die with a task that kills its worker, and would then look like it.
        return self._suspects.popleft() if self._suspects and not self._flying else None

    def _take(self, future: Future[Table], waiting: Waiting) -> None:
        call, executor = self._flying.pop(future)
        try:
            answer = msgspec.convert(future.result(), decodable(Answer))
            if not answer.host:
                raise ValueError("its answer is not from us")
        except Exception as error:  # no task raises: it is its worker, or the engine
            if isinstance(error, BrokenExecutor):
                self.engine.renew(executor)
            elif isinstance(error, CancelledError):
                self.engine.look()
            self._lost(call, error, waiting)
            return
        if answer.differs:
            compare({"host": answer.host, "software": answer.differs})
        self._answered(call, answer, waiting)

    def _lost(self, call: _Call, error: Exception, waiting: Waiting) -> None:
        call.losses += 1
        if call.losses == 1:
            self._suspects.append(call)
            return
        reason = escape(str(error)[:300])
        self._answered(
            call, Answer(trouble=f"{_DIED} ({type(error).__name__}{f': {reason}' if reason else ''})"), waiting
        )

    def _answered(self, call: _Call, answer: Answer, waiting: Waiting) -> None:
        job = call.job
        if call.part is not None:
            parts = self._parts.get(job.number)
            if parts is None:
                return  # another part has failed, and with it the job
            parts.answers[call.part] = answer
            if not answer.trouble:
                found = [one for one in parts.answers if one is not None]
                if len(found) == len(parts.answers) and self.joined is not None:
                    del self._parts[job.number]
                    self._calls.appendleft(_Call(job, self.joined(job, found)))
                return
            del self._parts[job.number]
            self._calls = deque(other for other in self._calls if other.job is not job)
        self.done(job, answer)
        waiting.free(job)

"""Have an engine do tasks: some at once, each until it has an answer, whatever becomes of the workers."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import msgspec

from ckptguard.bulk.engine import Engine, other_software
from ckptguard.bulk.messages import Table, Task, TaskAnswer
from ckptguard.bulk.sight import Sight, places_of
from ckptguard.decisions.bulk_order import BulkQueue
from ckptguard.errors import CkptguardError, WorkerError
from ckptguard.scan.result import Scan
from ckptguard.values.ids import escape
from ckptguard.values.record_text import decodable
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

_EACH = 4  # tasks in flight for each worker, so that none waits for the coordinator
_TICK = 1.0  # seconds between looks at the engine
_TRIES = 4  # of a task that workers cannot do, each by another one
_MOST_BUSY = 8  # workers that are kept busy at once, so that others may have a turn
_ROUNDS = 8  # times that all workers are offered a task that nobody may do, where they cannot be chosen


def dispatch(
    engine: Engine, tasks: Sequence[Task], settings: Mapping[str, Settings], rate: float | None = None
) -> Iterator[tuple[Task, TaskAnswer]]:
    """Yield each task with its answer, as they come. `settings` are those of each run, by its URL. `rate`: bytes a
    second for all of them together.

    A task whose worker dies is tried again, alone. If its worker dies again, the answer says so. One that a worker
    cannot do, or may not because it does not see what we see, is tried by another. Raises WorkerError if the engine is
    lost: what has no answer then is still to be done.
    """
    sight = None if engine.is_here or not settings else Sight(settings)
    unseen = {} if sight is None else sight.look(tasks)
    for task in tasks:
        if places_of(task) in unseen:
            yield task, TaskAnswer(trouble=unseen[places_of(task)])
    this = _Dispatch(engine, [task for task in tasks if places_of(task) not in unseen], settings, sight, rate)
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
    """What is or will be in flight for a job: its task, or the scan of a part. `number` counts what was submitted."""

    job: Task
    task: Task
    was_lost: bool = False  # with its worker
    number: int = 0
    refused: int = 0  # how often by workers that may not do it
    failures: list[TaskAnswer] = field(default_factory=list)  # of workers that could not do it


class _Dispatch:
    """The state of one dispatch."""

    def __init__(
        self,
        engine: Engine,
        tasks: Sequence[Task],
        settings: Mapping[str, Settings],
        sight: Sight | None,
        rate: float | None,
    ) -> None:
        self._engine, self.waiting, self._settings, self._sight = engine, BulkQueue(tasks), settings, sight
        self.flying: dict[Future[Table], _Attempt] = {}
        self._ended: SimpleQueue[Future[Table]] = SimpleQueue()
        self._next: deque[_Attempt] = deque()
        self._alone: deque[_Attempt] = deque()  # those that were lost
        self._aside: defaultdict[str, set[str]] = defaultdict(set)  # workers by run; "" is for all runs
        self._scans: dict[int, list[Scan]] = {}  # of jobs in parts
        self._looked = 0.0
        self._submitted = 0
        # With a rate no task waits at a worker, where its share would be lost.
        self._most = None if rate is None else engine.workers
        self._share = None if rate is None else rate / engine.workers

    def begin(self) -> bool:
        """Submit what may be in flight now. False if nothing is: all is done."""
        while len(self.flying) < (self._most or self._engine.workers * _EACH):
            attempt = self._choose()
            if attempt is None:
                break
            shown = () if self._sight is None else self._sight.of(attempt.job)
            attempt.task = msgspec.structs.replace(attempt.task, rate=self._share, shown=shown)
            self._keep_busy(attempt)
            self._submitted = attempt.number = self._submitted + 1
            own = self._settings.get(attempt.job.url) if self._engine.is_here else None
            options = None if own is None else own.storage.revealed()
            future = self._engine.submit(attempt.task, self._avoided(attempt), options)
            self.flying[future] = attempt
            future.add_done_callback(self._ended.put)
        return bool(self.flying)

    def answered(self) -> Iterator[tuple[_Attempt, TaskAnswer]]:
        """Yield what has ended with an answer that counts. Nothing, if nothing ends within a second, or what ended is
        to be tried again. Raises WorkerError if the engine is lost."""
        if time.monotonic() - self._looked >= _TICK:
            self._looked = time.monotonic()
            self._engine.look()
        try:
            future = self._ended.get(timeout=_TICK)
        except Empty:
            return
        attempt = self.flying.pop(future)
        try:
            said = msgspec.convert(future.result(), decodable(TaskAnswer))
            if not said.host:
                raise ValueError("its answer is not from us")
        except Exception as error:  # no task raises: it is its worker, or the engine
            answer = self._lost(attempt, error)
        else:
            answer = said if self._engine.is_here else self._last_word(attempt, said)
        if answer is not None:
            yield attempt, answer

    def ends(self, attempt: _Attempt, answer: TaskAnswer) -> bool:
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

    def _lost(self, attempt: _Attempt, error: Exception) -> TaskAnswer | None:
        """Return the answer to a task whose worker died twice. After the first time it is tried again, alone."""
        self._engine.look()
        if not attempt.was_lost:
            attempt.was_lost = True
            self._alone.append(attempt)
            return None
        self._engine.check()
        reason = ": ".join(filter(None, (type(error).__name__, escape(str(error)[:300]))))
        return TaskAnswer(trouble=f"its worker died twice while it was read ({reason})")

    def _last_word(self, attempt: _Attempt, answer: TaskAnswer) -> TaskAnswer | None:
        """Return an answer that counts, or None if another worker is asked.

        Raises WorkerError if no worker has our software.
        """
        refusal = other_software(answer.differs) or answer.blind
        try:
            is_outdated = bool(answer.blind) and self._sight is not None and self._sight.changed(attempt.task)
            if refusal and not is_outdated:
                return self._refused(attempt, answer, f"the worker {escape(answer.host)} {refusal}")
            if not is_outdated and not self._has_failed(attempt, answer):
                return answer
        except WorkerError:
            raise
        except CkptguardError as error:  # the coordinator itself cannot look
            return TaskAnswer(trouble=error.message)
        if is_outdated:
            answer = TaskAnswer(trouble="it changes all the time")
        elif not (answer.items or answer.trouble):
            answer = msgspec.structs.replace(answer, trouble="its workers do not find it")
        attempt.failures.append(answer)
        may_go_on = len(attempt.failures) < _TRIES and self._engine.has_other(self._avoided(attempt))
        if not may_go_on:
            return answer
        self._next.appendleft(attempt)
        return None

    def _refused(self, attempt: _Attempt, answer: TaskAnswer, worker: str) -> TaskAnswer | None:
        """Put a worker aside that may not do a task, and have another one asked."""
        attempt.refused += 1
        self._aside["" if answer.differs else attempt.job.url].add(_name_of(answer))
        self._engine.aside[_name_of(answer)] = worker
        if self._somebody_may(attempt):
            self._next.appendleft(attempt)
            return None
        if answer.differs:
            raise WorkerError(worker, hint="install the same version there")
        return (*attempt.failures, TaskAnswer(trouble=f"no worker sees it: {worker}"))[0]

    def _has_failed(self, attempt: _Attempt, answer: TaskAnswer) -> bool:
        """True if another worker may have a better answer: this one could not read, or did not find its checkpoint."""
        if not attempt.job.path or attempt.task.verb == "scan":
            return bool(answer.trouble) and not answer.items
        if answer.items:
            return any(one.outcome is Outcome.PENDING and (one.findings or one.done) for one in answer.items)
        is_there = attempt.job.verb == "verify" and self._sight is not None and self._sight.has(attempt.job)
        return bool(answer.trouble) or is_there

    def _avoided(self, attempt: _Attempt) -> set[str]:
        return self._aside[""] | self._aside[attempt.job.url] | set(filter(None, map(_name_of, attempt.failures)))

    def _keep_busy(self, attempt: _Attempt) -> None:
        """Give workers that refused a task something else, which they refuse slowly, before the task is given to an
        engine again. Ray gives it to the worker that was the last to answer, others to one after another: so this is
        done for none of them, for one, and so on, in turn."""
        if attempt.refused and self._engine.addresses is None:
            for _ in range((attempt.refused - 1) % (min(len(self._avoided(attempt)), _MOST_BUSY) + 1)):
                self._engine.submit(msgspec.structs.replace(attempt.task, verb="look"))

    def _somebody_may(self, attempt: _Attempt) -> bool:
        """True if there may be a worker that does a task which another one must not do."""
        if self._engine.addresses is not None:
            return self._engine.has_other(self._avoided(attempt))
        # Tasks that were submitted long before and have no answer are with workers that are at work.
        oldest = next((other.number for other in self.flying.values()), attempt.number)
        at_work = oldest < attempt.number - self._engine.workers * _EACH
        return at_work or attempt.refused < self._engine.workers * _ROUNDS


def _name_of(answer: TaskAnswer) -> str:
    return answer.address or answer.host

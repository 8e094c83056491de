"""What becomes of tasks whose workers die, whatever engine it is: one that answers as a test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Future
from queue import SimpleQueue

import pytest

from ckptguard.bulk import dispatch as module
from ckptguard.bulk import worker
from ckptguard.bulk.dispatch import dispatch
from ckptguard.bulk.engine import Engine
from ckptguard.bulk.messages import SOFTWARE, Task
from ckptguard.errors import WorkerError


class Scripted:
    """Answers only when somebody waits, the oldest first. `fate` returns an exception for a task, or None."""

    def __init__(self, fate: Callable[[str], BaseException | None]) -> None:
        self.fate = fate
        self.begun: list[tuple[str, Future]] = []
        self.rates: list[float | None] = []
        self.most = 0
        self.alone: list[str] = []
        self.broken = False

    def submit(self, function, /, *arguments):
        if self.broken:
            raise BrokenExecutor
        future: Future = Future()
        if not arguments:  # identify
            future.set_result({"host": "here"})
            return future
        task = arguments[0]
        self.rates.append(task.get("rate"))
        self.begun.append((task["path"], future))
        self.most = max(self.most, len(self.begun))
        return future

    def answer(self) -> None:
        """Answer the oldest. A pool that breaks answers all."""
        path, future = self.begun.pop(0)
        if not self.begun:
            self.alone.append(path)
        error = self.fate(path)
        if isinstance(error, BrokenExecutor):
            self.broken = True
            for _, other in self.begun:
                other.set_exception(BrokenExecutor())
            self.begun.clear()
        if error is None:
            future.set_result({"host": "here"})
        else:
            future.set_exception(error)


@pytest.fixture
def done(monkeypatch):
    """Do tasks about these paths: returns (path, trouble) of each, and has all engines that were made."""

    def run(paths, fate, *, workers=2, rate=None, look=lambda: None, kind=Scripted):
        def make():
            run.made.append(kind(fate))
            return run.made[-1]

        class Asking(SimpleQueue):
            def get(self, timeout):
                if self.empty() and run.made[-1].begun:
                    run.made[-1].answer()
                return super().get(timeout=timeout)

        class Looked(Engine):
            def look(self):
                look()

        run.made, run.answers = [], []
        monkeypatch.setattr(module, "SimpleQueue", Asking)
        tasks = [Task(number=n, chain=path, verb="verify", url="r", path=path) for n, path in enumerate(paths)]
        for task, answer in dispatch(Looked(make, workers), tasks, {}, rate):
            run.answers.append((task.path, answer.trouble))
        return run.answers

    return run


PATHS = [f"c{n}" for n in range(30)]


def test_all_are_done_with_few_in_flight(done):
    """Four for each worker."""
    assert Counter(done(PATHS, lambda path: None)) == Counter((path, "") for path in PATHS)
    assert done.made[0].most == 8


def test_a_lost_worker_costs_nothing(done):
    """Its task is done again, and nothing says so."""
    dead = {"c3", "c7", "c8"}
    answers = done(PATHS, lambda path: OSError("it died") if path in dead and not dead.discard(path) else None)
    assert Counter(answers) == Counter((path, "") for path in PATHS)


@pytest.mark.parametrize("error", [BrokenExecutor("a process died"), RuntimeError("KilledWorker")])
def test_a_task_that_kills_its_worker_takes_only_itself(done, error):
    """All others are done once, also those that were in the same pool; it is tried again alone, and then given up."""
    answers = done(PATHS, lambda path: error if path == "c4" else None)
    assert sorted(path for path, _ in answers) == sorted(PATHS)
    assert [path for path, trouble in answers if trouble] == ["c4"]
    assert "died twice" in dict(answers)["c4"]
    assert sum(engine.alone.count("c4") for engine in done.made) == 1
    assert len(done.made) == (3 if isinstance(error, BrokenExecutor) else 1)


def test_a_lost_engine_ends_it(done):
    """What was cancelled with it has no answer."""
    answered = []

    def fate(path):
        answered.append(path)
        return CancelledError() if len(answered) > 10 else None

    def look():
        if len(answered) > 10:
            raise WorkerError("the engine is lost")

    with pytest.raises(WorkerError, match="the engine is lost"):
        done(PATHS, fate, look=look)
    assert len(done.answers) == 10
    assert not any(trouble for _, trouble in done.answers)


def test_an_engine_whose_workers_cannot_work_any_more_is_lost(done):
    """It is not blamed on each task that is left."""
    broken = []

    class Breaks(Scripted):
        def submit(self, function, /, *arguments):
            if broken and not arguments:
                raise BrokenExecutor("no memory")
            return super().submit(function, *arguments)

    def fate(path):
        broken.append(path)
        return BrokenExecutor("a process died")

    with pytest.raises(WorkerError, match="takes no work: BrokenExecutor: no memory"):
        done(PATHS, fate, kind=Breaks)
    assert done.answers == []


def test_a_cancelled_task_is_done_again_if_the_engine_is_there(done):
    """Somebody cancelled it, such as an allocation that ended."""
    cancelled = {"c5"}
    answers = done(PATHS, lambda path: CancelledError() if path in cancelled and not cancelled.discard(path) else None)
    assert Counter(answers) == Counter((path, "") for path in PATHS)


def test_shares_of_a_rate_never_exceed_it(done):
    """Those in flight together read at most the rate, and none waits at a worker with its share."""
    done(PATHS, lambda path: None, workers=3, rate=300.0)
    assert set(done.made[0].rates) == {100.0}
    assert done.made[0].most == 3


class Says(Scripted):
    """Answers at once, always the same."""

    def __init__(self, identity, answer=None):
        super().__init__(lambda path: None)
        self.identity, self.said = identity, answer

    def submit(self, function, /, *arguments):
        future: Future = Future()
        future.set_result(self.said if arguments else self.identity)
        return future


HERE = {"host": "here"}


def test_a_worker_of_another_version_does_nothing(monkeypatch):
    """It refuses the task. If no other worker is left, one sentence says which it was, and what differs."""
    monkeypatch.setattr(worker, "_PAUSE", 0.0)
    refused = worker.perform({"software": {**SOFTWARE, "ckptguard": "0.0"}, "verb": "verify"})
    assert refused["differs"] == SOFTWARE
    assert "items" not in refused
    engine = Engine(lambda: Says(HERE, {"host": "node7:4", "differs": {**SOFTWARE, "records": "1"}}), 1)
    with pytest.raises(WorkerError, match="node7:4 has other software: records 1, not 2") as raised:
        list(dispatch(engine, [Task(verb="verify", url="r")], {}))
    assert "same version" in raised.value.hint


def test_an_engine_that_refuses_a_task_is_lost():
    """Whatever it raises, you are told in one sentence."""

    class Refuses(Scripted):
        def submit(self, function, /, *arguments):
            if arguments:
                raise ValueError("not today")
            return super().submit(function)

    engine = Engine(lambda: Refuses(lambda path: None), 1)
    with pytest.raises(WorkerError, match="takes no work: ValueError: not today"):
        list(dispatch(engine, [Task(verb="verify", url="r")], {}))


@pytest.mark.parametrize("said", [{}, {"x": 1}, None, "good"])
def test_what_is_no_answer_of_ours_is_trouble(said):
    """An engine that returns something else has done nothing."""
    [(_, answer)] = dispatch(Engine(lambda: Says(HERE, said), 1), [Task(verb="verify", url="r")], {})
    assert "died twice" in answer.trouble

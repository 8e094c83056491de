"""What becomes of tasks whose workers die, whatever engine it is: an executor that answers as a test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future

import pytest

from ckptguard.bulk import drive as module
from ckptguard.bulk.drive import Drive
from ckptguard.bulk.engine import Engine
from ckptguard.bulk.messages import SOFTWARE, Answer, Planned, Portable, Task
from ckptguard.decisions.bulk_order import Job, Waiting
from ckptguard.errors import WorkerError


class Scripted(Executor):
    """Answers only when somebody waits, the oldest first. `fate` returns an exception for a task, or None."""

    def __init__(self, fate: Callable[[str], BaseException | None]) -> None:
        self.fate = fate
        self.begun: list[tuple[str, Future]] = []
        self.rates: list[float | None] = []
        self.most = 0
        self.alone: list[str] = []
        self.broken = False

    def submit(self, function, /, *arguments):
        future: Future = Future()
        if not arguments:  # identify
            future.set_result({"host": "here", "software": SOFTWARE})
            return future
        if self.broken:
            raise BrokenExecutor
        task = arguments[0]
        self.rates.append(task["rate"])
        self.begun.append((task["planned"]["path"], future))
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

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


@pytest.fixture
def drive(monkeypatch):
    """Drive jobs of these paths: returns the answers by path, and all executors that were made."""

    def run(paths, fate, *, workers=2, rate=None, lost=lambda: False):
        made: list[Scripted] = []
        answers: list[tuple[str, str]] = []

        def make():
            made.append(Scripted(fate))
            return made[-1]

        def count():
            if lost():
                raise WorkerError("the engine is lost")
            return workers

        def wait(futures, *, timeout, return_when):
            made[-1].answer() if made[-1].begun else None
            return type("Done", (), {"done": [future for future in list(futures) if future.done()]})

        monkeypatch.setattr(module, "wait", wait)
        tasks = [Task(verb="verify", url="r", name="r", settings=Portable({}), planned=Planned(path=p)) for p in paths]
        begun = Drive(
            Engine(make, count),
            lambda job: [tasks[job.number]],
            lambda job, answer: answers.append((paths[job.number], answer.trouble)),
            rate=rate,
        )
        try:
            begun.run(Waiting(Job(number=n, chain=path) for n, path in enumerate(paths)))
        finally:
            run.made, run.answers = made, answers
        return answers

    return run


PATHS = [f"c{n}" for n in range(30)]


def test_all_are_done_with_few_in_flight(drive):
    """Four for each worker."""
    assert Counter(drive(PATHS, lambda path: None)) == Counter((path, "") for path in PATHS)
    assert drive.made[0].most == 8


def test_a_lost_worker_costs_nothing(drive):
    """Its task is done again, and nothing says so."""
    dead = {"c3", "c7", "c8"}
    answers = drive(PATHS, lambda path: OSError("it died") if path in dead and not dead.discard(path) else None)
    assert Counter(answers) == Counter((path, "") for path in PATHS)


@pytest.mark.parametrize("error", [BrokenExecutor("a process died"), RuntimeError("KilledWorker")])
def test_a_task_that_kills_its_worker_takes_only_itself(drive, error):
    """All others are done once, also those that were in the same pool; it is tried again alone, and then given up."""
    answers = drive(PATHS, lambda path: error if path == "c4" else None)
    assert sorted(path for path, _ in answers) == sorted(PATHS)
    assert [path for path, trouble in answers if trouble] == ["c4"]
    assert "died twice" in dict(answers)["c4"]
    assert sum(executor.alone.count("c4") for executor in drive.made) == 1
    assert len(drive.made) == (3 if isinstance(error, BrokenExecutor) else 1)


def test_a_lost_engine_ends_it(drive):
    """What was cancelled with it has no answer."""
    answered = []

    def fate(path):
        answered.append(path)
        return CancelledError() if len(answered) > 10 else None

    with pytest.raises(WorkerError, match="the engine is lost"):
        drive(PATHS, fate, lost=lambda: len(answered) > 10)
    assert len(drive.answers) == 10
    assert not any(trouble for _, trouble in drive.answers)


def test_a_cancelled_task_is_done_again_if_the_engine_is_there(drive):
    """Somebody cancelled it, such as an allocation that ended."""
    cancelled = {"c5"}
    answers = drive(PATHS, lambda path: CancelledError() if path in cancelled and not cancelled.discard(path) else None)
    assert Counter(answers) == Counter((path, "") for path in PATHS)


def test_shares_of_a_rate_never_exceed_it(drive):
    """Those in flight together read at most the rate, and none waits at a worker with its share."""
    drive(PATHS, lambda path: None, workers=3, rate=300.0)
    assert set(drive.made[0].rates) == {100.0}
    assert drive.made[0].most == 3


def test_another_version_ends_it(monkeypatch):
    """One sentence says which worker, and what differs."""

    class Other(Scripted):
        def submit(self, function, /, *arguments):
            future: Future = Future()
            future.set_result({"host": "node7:4", "software": {**SOFTWARE, "records": "1"}})
            return future

    with pytest.raises(WorkerError, match="node7:4 has other software: records 1, not 2") as raised:
        Engine(lambda: Other(lambda path: None), lambda: 1)
    assert "same version" in raised.value.hint


def test_a_worker_of_another_version_that_joins_later_does_nothing(drive):
    """It refuses the task, and the job ends."""
    from ckptguard.bulk.worker import perform

    answer = perform({"software": {**SOFTWARE, "ckptguard": "0.0"}, "verb": "verify"})
    assert answer["differs"] == SOFTWARE
    assert "items" not in answer
    assert Answer().differs == {}


def test_an_engine_that_refuses_a_task_is_lost():
    """Whatever it raises, you are told in one sentence."""

    class Refuses(Scripted):
        def submit(self, function, /, *arguments):
            if arguments:
                raise ValueError("not today")
            return super().submit(function)

    engine = Engine(lambda: Refuses(lambda path: None), lambda: 1)
    with pytest.raises(WorkerError, match="takes no work: ValueError: not today"):
        engine.submit({})


@pytest.mark.parametrize("said", [{}, {"x": 1}, None, "good"])
def test_what_is_no_answer_of_ours_is_trouble(said):
    """An engine that returns something else has done nothing."""

    class Says(Scripted):
        def submit(self, function, /, *arguments):
            future = super().submit(function, *arguments)
            if arguments:
                future.set_result(said)
            return future

    answers = []
    engine = Engine(lambda: Says(lambda path: None), lambda: 1)
    task = Task(verb="verify", url="run", name="run", settings=Portable({}), planned=Planned(path="a"))
    drive = Drive(engine, lambda job: [task], lambda job, answer: answers.append(answer))
    drive.run(Waiting([Job(number=0, chain="run")]))
    assert ["died twice" in answer.trouble for answer in answers] == [True]

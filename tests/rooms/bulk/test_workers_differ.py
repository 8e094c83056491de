"""Workers that see other storage, or cannot do a task: what another one can do is done, and each has one answer."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from support import blind_workers
from support.fleets import QUICK, done_by, ledger_of, make_fleet, plan_of, step_of
from support.tiny_run import name_of

from ckptguard.bulk.dispatch import dispatch
from ckptguard.bulk.engine import Engine
from ckptguard.bulk.job import plan_bulk
from ckptguard.bulk.messages import Task
from ckptguard.bulk.sight import Sight, other_sight
from ckptguard.fleet import FleetRun
from ckptguard.values.storage_options import NO_OPTIONS

NAMES = tuple(f"w{n}" for n in range(4))


class Cluster(Engine):
    """Workers by name. `sees` are the (worker, run), `able` the (worker, task) that a worker sees and can do."""

    def __init__(self, seed, sees, able, *, chosen):
        self.random, self.sees, self.able, self.done = random.Random(seed), sees, able, []
        super().__init__(lambda: self, len(NAMES))
        self.addresses = set(NAMES) if chosen else None

    def look(self):
        """They are always there."""

    def check(self):
        """They always work."""

    def submit(self, task, avoid=(), options=None):
        """Have it done by any worker, or by any that need not be avoided."""
        future: Future = Future()
        name = self.random.choice([n for n in NAMES if self.addresses is None or n not in avoid] or NAMES)
        answer = {"host": name}
        if task.verb == "look":
            assert not self.addresses
        elif (name, task.url) not in self.sees:
            answer["blind"] = "does not see it"
        elif (name, task.path) not in self.able:
            answer["trouble"] = "no"
        else:
            self.done.append(task.path)
        future.set_result(answer)
        return future


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_what_one_worker_can_do_is_done_once(seed, chosen):
    """Whoever is blind for which run, and fails at which task. Engines that choose the worker ask each of them."""
    numbers = random.Random(seed)
    runs, paths = [f"r{n}" for n in range(5)], [f"c{n}" for n in range(40)]
    tasks = [Task(number=n, chain=p, verb="verify", url=numbers.choice(runs), path=p) for n, p in enumerate(paths)]
    sees = {(name, run) for name in NAMES for run in runs if numbers.random() < 0.6}
    able = {(name, path) for name in NAMES for path in paths if not chosen or numbers.random() < 0.6}
    engine = Cluster(seed, sees, able, chosen=chosen)
    answers = list(dispatch(engine, tasks, {}))
    can = {t.path for t in tasks if any((n, t.url) in sees and (n, t.path) in able for n in NAMES)}
    assert Counter(task.path for task, _ in answers) == Counter(paths)
    assert {task.path for task, answer in answers if not answer.trouble} == can
    assert Counter(engine.done) == Counter(can)
    assert set(engine.aside) <= {name for name in NAMES for run in runs if (name, run) not in sees}


@pytest.fixture
def blind(tmp_path, monkeypatch):
    """An engine of which every worker sees `tmp_path/fleet` as a test says, by its place."""

    class Elsewhere:
        def __init__(self, views):
            self.views, self.asked = views, 0

        def submit(self, fn, *arguments):
            future: Future = Future()
            view = self.views[self.asked % len(self.views)]
            self.asked += 1
            with monkeypatch.context() as patch:
                patch.setattr("ckptguard.bulk.worker._PAUSE", 0.0)
                patch.setattr("ckptguard.bulk.worker.identify", lambda: {"host": Path(view).name})
                if view != tmp_path / "fleet":
                    patch.setenv("BLIND_FROM", str(tmp_path / "fleet"))
                    patch.setenv("BLIND_TO", str(view))
                    patch.setattr(
                        "ckptguard.storage.local.local_storage.LocalStorage.__init__", blind_workers._open_other
                    )
                future.set_result(fn(*arguments))
            return future

    return lambda *views: Engine(lambda: Elsewhere(views), len(views))


@pytest.mark.parametrize("kind", ["missing", "empty", "copy", "older copy", "others"])
def test_a_blind_worker_costs_no_verdict(tmp_path, blind, kind):
    """Whatever it sees in place of the runs; it is named, and what it may have written counts nowhere."""
    root = make_fleet(tmp_path / "fleet", 3, 3, sick=[(1, 1)])
    other = tmp_path / "other"
    if kind == "empty":
        other.mkdir()
    elif kind == "others":
        make_fleet(other, 3, 3)
    elif kind != "missing":
        shutil.copytree(root, other)
    if kind == "older copy":
        shutil.rmtree(other / "run0" / name_of(step_of(2)))
    engine = blind(root, other)
    plan = plan_of(engine, root)
    done = done_by(engine, plan)
    assert (done.outcomes, done.left, done.gone, done.could_not_tell) == ({"good": 8, "bad": 1}, 0, 0, [])
    assert len(ledger_of(root)) == 9
    assert ledger_of(other) == []
    [sentence] = done.put_aside
    assert sentence.startswith("the worker other does not see ")


@pytest.mark.parametrize("place", ["records", "replica"])
def test_what_is_written_where_nobody_else_sees_it_counts_nowhere(tmp_path, blind, place):
    """A worker without the mount of the records, or of a replica, which are empty at first."""
    folder = tmp_path / "fleet" / "there"  # moves with the fleet for the blind worker
    root = make_fleet(tmp_path / "runs", 1, 3)
    settings = QUICK.changed(records=str(folder)) if place == "records" else QUICK
    settings = settings.changed(replicas=(f"{folder}/{{run}}",)) if place == "replica" else settings
    engine = blind(tmp_path / "other", tmp_path / "fleet")
    for verb in ("verify", "replicate") if place == "replica" else ("verify",):
        plan = plan_bulk(engine, verb, [FleetRun(url=str(root / "run0"), name="run0", settings=settings)])
        done = done_by(engine, plan)
        assert (done.outcomes, done.could_not_tell) == ({"good": 3}, [])
    assert len(list(folder.rglob("manifests/*/*.json"))) == 3
    assert len(done.put_aside) == 1


def test_a_run_that_nobody_sees_costs_only_itself(tmp_path, blind):
    """It is undecided, with the reason; the others are done."""
    root = make_fleet(tmp_path / "fleet", 3, 2)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("run0", "run2"):
        (other / name).symlink_to(root / name)
    engine = blind(other)
    done = done_by(engine, plan_of(engine, root))
    assert done.outcomes == {"good": 4, "pending": 2}
    assert len(done.could_not_tell) == 2
    assert all("no worker sees it" in sentence for sentence in done.could_not_tell)


def test_a_file_that_changes_blames_nobody(tmp_path, blind, monkeypatch):
    """The coordinator looks again before it believes that a worker is blind."""
    root = make_fleet(tmp_path / "fleet", 1, 1)
    look = Sight.look

    def look_and_change(self, tasks):
        found = look(self, tasks)
        for file in root.rglob("*"):
            if file.is_file():
                file.write_bytes(file.read_bytes())
        return found

    monkeypatch.setattr(Sight, "look", look_and_change)
    engine = blind(root)
    done = done_by(engine, plan_of(engine, root))
    assert (done.outcomes, done.put_aside) == ({"good": 1}, [])


def test_what_is_removed_meanwhile_is_counted_as_gone(tmp_path, blind):
    """The sums are those of the plan."""
    root = make_fleet(tmp_path / "fleet", 2, 3)
    engine = blind(root)
    plan = plan_of(engine, root)
    shutil.rmtree(root / "run1" / name_of(step_of(1)))
    done = done_by(engine, plan)
    assert (done.outcomes, done.gone, done.left, done.done) == ({"good": 5}, 1, 0, 6)


def test_sight_is_of_the_same_file_only(tmp_path):
    """A file that was copied with its times is another one."""
    root = make_fleet(tmp_path / "fleet", 1, 1)
    shutil.copytree(root, tmp_path / "copy")
    task = Task(verb="verify", url=str(root / "run0"))
    sight = Sight({task.url: QUICK})
    assert sight.look([task]) == {}
    shown = sight.of(task)
    assert other_sight(msgspec.structs.replace(task, shown=shown), NO_OPTIONS) == ""
    moved = tuple(msgspec.structs.replace(one, place=one.place.replace("fleet", "copy")) for one in shown)
    assert "is another file" in other_sight(msgspec.structs.replace(task, shown=moved), NO_OPTIONS)

"""Whole jobs on real runs: what is found, what is recorded, and what a second call does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fleets import QUICK, bad_in, counts, done_by, ledger_of, make_fleet, plan_of, step_of
from support.tiny_run import name_of, rot

from ckptguard.bulk import worker
from ckptguard.bulk.engine import Engine, open_engine
from ckptguard.bulk.job import carry_out, plan_bulk, report_on
from ckptguard.bulk.messages import SOFTWARE, TaskAnswer
from ckptguard.bulk.worker import VERBS, perform
from ckptguard.fleet import FleetRun, find_runs
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import StorageOptions

TESTS = Path(__file__).resolve().parents[2]


@pytest.fixture
def work():
    """Do a verb in two threads: the plan and the result."""

    def run(*what, **how):
        with open_engine("threads", 2) as engine:
            plan = plan_of(engine, *what, **how)
            return plan, done_by(engine, plan)

    return run


@pytest.fixture
def command(tmp_path):
    """The command in a process of its own, as users have it: returns its exit code and its document."""

    def run(*arguments, **environment):
        notes = tmp_path / "notes"
        notes.mkdir(exist_ok=True)
        found = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
        path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
        settings = {"CKPTGUARD_SETTLE": "0", "DYING_NOTES": str(notes), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-m", "ckptguard", "fleet", *map(str, arguments), "--json"],
            env={**found, **settings, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    return run


def test_every_checkpoint_is_verified_once_and_damage_is_found(tmp_path, work):
    """The second call reads nothing, and still says what is bad."""
    root = make_fleet(tmp_path / "fleet", 3, 4, sick=[(1, 2)])
    plan, done = work(root)
    assert (plan.cost.runs, plan.cost.checkpoints, done.done, done.left) == (3, 12, 12, 0)
    assert done.outcomes == {"good": 11, "bad": 1}
    assert [(Path(one.run).name, one.path) for one in done.wrong] == [("run1", name_of(step_of(2)))]
    entries = ledger_of(root)
    assert len(entries) == 12
    assert len(list((root / "run1" / "_ckptguard/incidents").glob("*.json"))) == 1
    plan, again = work(root)
    assert (plan.tasks, again.outcomes, again.wrong[0].outcome) == ((), done.outcomes, "bad")
    assert ledger_of(root) == entries


def test_a_checkpoint_that_is_good_again_has_no_open_incident(tmp_path, work):
    """Somebody put the right bytes back. The incident is closed, as by `ckptguard verify`."""
    root = make_fleet(tmp_path / "fleet", 1, 2)
    run, key = open_run(str(root / "run0")), f"{name_of(step_of(1))}/model.safetensors"
    work(root)
    right = (root / "run0" / key).read_bytes()
    rot(str(root / "run0"), key)
    work(root, "scrub", max_age=0.0)
    assert [one.state for one in list_incidents(run)] == ["open"]
    (root / "run0" / key).write_bytes(right)
    _, done = work(root)
    assert (done.outcomes, done.wrong) == ({"good": 2}, [])
    assert [one.state for one in list_incidents(run)] == ["closed"]


def test_what_changed_is_read_again(tmp_path, work):
    """Files that were saved again have no verdict."""
    root = make_fleet(tmp_path / "fleet", 1, 3)
    work(root)
    os.utime(root / "run0" / name_of(step_of(1)) / "config.json")
    plan, _ = work(root)
    assert [task.path for task in plan.tasks] == [name_of(step_of(1))]


def test_a_large_checkpoint_is_scanned_in_parts_and_sealed_once(tmp_path, work, monkeypatch):
    """Each file by a task of its own, and no byte is read twice."""
    root = make_fleet(tmp_path / "fleet", 1, 2)
    scanned = []
    scan = VERBS["scan"]
    monkeypatch.setitem(VERBS, "scan", lambda task, *rest: scanned.append(task.files) or scan(task, *rest))
    plan, done = work(root, large=64)
    folder = name_of(step_of(0))
    assert scanned[:2] == [(f"{folder}/model.safetensors",), (f"{folder}/config.json",)]
    assert len(scanned) == 4
    assert (len(plan.tasks), done.outcomes, len(ledger_of(root))) == (2, {"good": 2}, 2)
    whole = make_fleet(tmp_path / "whole", 1, 2)
    work(whole)
    assert manifests(root) == manifests(whole)


def manifests(root):
    """What was sealed, without what differs between two copies of a run."""
    found = []
    for path in sorted(root.rglob("_ckptguard/manifests/*/*.json")):
        manifest = json.loads(path.read_text().partition("\ncrc32")[0])
        own = ("mtime_ns", "ctime_ns", "inode")
        found.append([{k: v for k, v in f.items() if k not in own} for f in manifest["files"]])
    return found


def test_a_scrub_reads_what_nobody_read_for_long(tmp_path, work):
    """It finds rot, and a second call does not read the same again."""
    root = make_fleet(tmp_path / "fleet", 2, 2)
    work(root)
    rot(str(root / "run1"), f"{name_of(step_of(0))}/model.safetensors")
    plan, _ = work(root, "scrub", max_age=3600.0)
    assert plan.tasks == ()  # the verdict is younger
    plan, done = work(root, "scrub", max_age=0.0)
    assert (len(plan.tasks), done.outcomes) == (4, {"good": 3, "bad": 1})
    plan, done = work(root, "scrub", max_age=3600.0)
    assert (plan.tasks, done.outcomes) == ((), {"good": 3, "bad": 1})


def test_replicas_get_what_they_lack_and_repair_uses_them(tmp_path, work):
    """Of each run, once; then the damaged file is as it was sealed."""
    root = make_fleet(tmp_path / "fleet", 2, 2)
    settings = QUICK.changed(replicas=(str(tmp_path / "copies/{run}"),))
    work(root, settings=settings)
    plan, done = work(root, "replicate", settings)
    assert (len(plan.tasks), done.outcomes, done.could_not_tell) == (4, {"good": 4}, [])
    plan, done = work(root, "replicate", settings)
    assert (plan.tasks, done.outcomes) == ((), {"good": 4})
    key = f"{name_of(step_of(0))}/model.safetensors"
    right = (root / "run1" / key).read_bytes()
    rot(str(root / "run1"), key)
    work(root, "scrub", settings, max_age=0.0)
    plan, done = work(root, "repair", settings)
    assert (len(plan.tasks), done.outcomes) == (1, {"good": 4})
    assert (root / "run1" / key).read_bytes() == right


def test_the_report_has_a_row_for_each_run(tmp_path, work):
    """Also for one that was never verified. One that cannot be read has a sentence."""
    root = make_fleet(tmp_path / "fleet", 3, 2, sick=[(0, 1)])
    break_records(root / "run2")
    runs = find_runs(str(root), QUICK).runs
    assert [row.outcomes for row in report_on(runs).rows] == [{"pending": 2}] * 2
    work(root)
    done = report_on(runs)
    assert [(row.name, row.outcomes, row.bad) for row in done.rows] == [
        ("run0", {"good": 1, "bad": 1}, (name_of(step_of(1)),)),
        ("run1", {"good": 2}, ()),
    ]
    assert done.rows[0].known_good_path == str(root / "run0" / name_of(step_of(0)))
    assert done.rows[0].protected == "partly"
    assert (done.done, done.outcomes) == (3, {"good": 3, "bad": 1})
    assert "have format 99" in done.could_not_tell[0]


def break_records(run):
    """Give a run records of a format that nobody knows."""
    (run / "_ckptguard").mkdir()
    (run / "_ckptguard/format.json").write_text('{"format": 99}\n')


def test_a_run_that_cannot_be_read_is_told_and_the_others_are_done(tmp_path, work):
    """It is neither good nor bad."""
    root = make_fleet(tmp_path / "fleet", 2, 1)
    break_records(root / "run0")
    _, done = work(root)
    assert done.outcomes == {"good": 1}
    assert len(done.could_not_tell) == 1
    assert "have format 99" in done.could_not_tell[0]


def test_a_task_has_no_secret(tmp_path, monkeypatch):
    """Only the names of storage options travel, and no address of people."""
    settings = Settings(
        storage=StorageOptions({"s3": {"secret": "hush"}}),
        webhook="https://chat/hush",
        notify=("slack://hush",),
        on_incident=("tell", "hush"),
        keep_good=5,
    )
    run = FleetRun(url=str(make_fleet(tmp_path, 1, 1) / "run0"), name="run", settings=settings)
    given = []

    class Notes(ThreadPoolExecutor):
        def submit(self, fn, /, *arguments):
            given.extend(arguments)
            return super().submit(fn, *arguments)

    monkeypatch.setattr(worker, "_PAUSE", 0.0)  # it has no such options
    engine = Engine(lambda: Notes(1), 1)
    done_by(engine, plan_bulk(engine, "verify", [run]))
    task = given[0]
    assert "hush" not in repr(given)
    assert (task["storage"], task["settings"]) == (("s3",), {"keep_good": 5})


def test_a_worker_uses_the_secrets_that_it_holds(monkeypatch):
    """By their names; one that lacks them says so, and touches nothing."""
    used = []

    def note(task, settings, work):
        used.append(settings.storage.revealed())
        return TaskAnswer()

    monkeypatch.setitem(VERBS, "repair", note)
    task = {"verb": "repair", "url": "memory://run", "storage": ["memory"], "software": SOFTWARE}
    monkeypatch.setenv("CKPTGUARD_STORAGE", '{"memory": {"x": 1}, "s3": {"secret": "hush"}}')
    perform(task)
    monkeypatch.delenv("CKPTGUARD_STORAGE")
    monkeypatch.setattr(worker, "_PAUSE", 0.0)
    assert "has no storage options for memory" in perform(task)["blind"]
    perform({**task, "options": {"memory": {"y": 2}}})
    assert used == [{"memory": {"x": 1}}, {"memory": {"y": 2}}]


@pytest.mark.parametrize(
    "engine", ["processes", "support.dying_workers:pool", "support.engines:Threads", "support.engines:dask_client"]
)
def test_every_engine_finds_the_same(tmp_path, command, engine):
    """Also those of a factory: an executor, what has only `submit`, and a Dask client."""
    if "dask" in engine:
        pytest.importorskip("distributed")
    root = make_fleet(tmp_path / "fleet", 2, 3, sick=[(0, 0)])
    code, text = command("verify", root, "--engine", engine, "--workers", "2")
    assert code == 3
    assert bad_in(text) == {("run0", name_of(step_of(0)))}
    assert (len(ledger_of(root)), json.loads(text)["done"]) == (6, 6)


def test_a_process_that_dies_takes_down_only_its_task(tmp_path, command):
    """One dies once, after its verdict; later one dies each time it reads one checkpoint: all else is recorded once."""
    engine = ("--engine", "support.dying_workers:pool", "--workers", "2")
    root = make_fleet(tmp_path / "once", 5, 3)
    code, text = command("verify", root, *engine, DYING_ONCE=f"run4/{name_of(step_of(0))}")
    done = json.loads(text)
    assert (code, counts(done), len(ledger_of(root))) == (0, {"good": 15}, 15)
    assert (tmp_path / "notes/once").exists()
    root = make_fleet(tmp_path / "fleet", 5, 3)
    poison = f"run2/{name_of(step_of(1))}"
    code, text = command("verify", root, *engine, DYING_ALWAYS=poison)
    done = json.loads(text)
    assert (code, counts(done)) == (1, {"good": 14, "pending": 1})
    assert [f"{Path(one['run']).name}/{one['path']}" for one in done["wrong"]] == [poison]
    assert len(ledger_of(root)) == 14
    assert len(list((tmp_path / "notes").glob("died-*"))) >= 3
    code, text = command("verify", root)
    assert (code, json.loads(text)["done"], len(ledger_of(root))) == (0, 1, 15)


def test_one_process_of_four_that_sees_other_storage(tmp_path, command):
    """Of an engine that cannot choose who does a task."""
    root = make_fleet(tmp_path / "fleet", 4, 5, sick=[(2, 2)])
    environment = {"BLIND_FROM": str(root), "BLIND_TO": str(tmp_path / "other"), "BLIND_NOTE": str(tmp_path / "note")}
    engine = ("--engine", "support.blind_workers:pool", "--workers", "4")
    code, text = command("verify", root, *engine, **environment)
    done = json.loads(text)
    assert (code, counts(done), done["left"], len(done["put_aside"])) == (3, {"good": 19, "bad": 1}, 0, 1)
    assert len(ledger_of(root)) == 20


@pytest.mark.parametrize(
    ("engine", "code"), [("nowhere", 2), ("no.such:thing", 2), ("dask://192.0.2.7:8786", 2), ("builtins:dict", 2)]
)
def test_an_engine_that_is_none_is_one_sentence(tmp_path, command, engine, code):
    """And nothing was done."""
    root = make_fleet(tmp_path / "fleet", 1, 1)
    if engine.startswith("dask"):
        pytest.importorskip("distributed")
    found, text = command("verify", root, "--engine", engine)
    assert found == code
    assert json.loads(text)["error"]["message"]
    assert ledger_of(root) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_bad_save_is_told_though_its_verdict_began_the_records(tmp_path, elsewhere):
    """The worker's own first record elsewhere is another sight than before, so it is asked again. What it told first
    is still told, once."""
    root = make_fleet(tmp_path / "runs", 1, 1, sick=[(0, 0)])
    settings = QUICK.changed(records=str(tmp_path / "records") if elsewhere else None)
    with ThreadPoolExecutor(1) as pool:
        engine = Engine(lambda: pool, 1)  # as one whose workers are elsewhere
        plan = plan_bulk(engine, "verify", [FleetRun(url=str(root / "run0"), name="run0", settings=settings)])
        told = [event["event"] for _, answer in carry_out(engine, plan) for event in answer.events]
    assert told == ["verdict"]

"""The gate: what a training may start from, how often, and what several gates at once agree on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from support.tiny_run import TINY, delete, files_below, inline, name_of, poison, rot, save
from support.views import look

from ckptguard.engine import gate as gate_module
from ckptguard.engine.gate import gate
from ckptguard.errors import (
    BusyError,
    CouldNotTellError,
    NoKnownGoodError,
    NotFoundError,
    RollbackExhausted,
    StorageError,
)
from ckptguard.inspect.list_states import survey
from ckptguard.records import starts as records_of_starts
from ckptguard.records.incidents import list_incidents
from ckptguard.records.leases import begin_training
from ckptguard.records.run import open_run
from ckptguard.records.starts import JobStart, list_starts, still_goes_on
from ckptguard.replicas.replicate import replicate
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome

PLAIN = TINY.changed(keep="none")


@pytest.fixture
def url(tmp_path):
    """A run with three good checkpoints."""
    place = str(tmp_path / "run")
    for step in (100, 200, 300):
        save(place, step, seed=step)
    judge(place)
    return place


def judge(url, settings=PLAIN):
    """A daemon's pass."""
    reconcile(look(url, settings), PassNotes(), work=Work(scanner=inline))


def start(url, *, attempts=3, settings=PLAIN, **how):
    """One start of the training."""
    return gate(look(url, settings), attempts=attempts, work=Work(scanner=inline), **how)


def in_place(url):
    """The checkpoints that a trainer finds."""
    return sorted(c.path for c in look(url).checkpoints)


def test_a_run_in_order_is_left_alone(url):
    """The newest good one, nothing moved, and the start is on record."""
    done = start(url)
    assert (done.known_good.path, done.attempt, done.spent) == (f"{url}/model-300", 1, ())
    assert done.rollback.quarantined == ()
    assert in_place(url) == ["model-100", "model-200", "model-300"]
    [record] = list_starts(open_run(url))
    assert (record.point.id.step, record.owner.pid) == (300, os.getpid())


def test_the_bytes_are_read_now(url):
    """Damage that nobody has seen yet, and a save that nobody has judged."""
    rot(url, "model-300/model.safetensors")
    save(url, 400, seed=400)
    poison(Path(url, "model-400", "model.safetensors"))
    done = start(url)
    assert done.known_good.path == f"{url}/model-200"
    assert sorted(done.rollback.quarantined) == ["model-300", "model-400"]
    assert in_place(url) == ["model-100", "model-200"]


@pytest.mark.parametrize("judged", [True, False])
def test_what_cannot_be_read_is_not_passed_over(url, judged):
    """Nobody knows whether it is good, so nothing is moved, and no older one is taken. The next gate starts from it."""
    save(url, 400, seed=400)
    if judged:
        judge(url)

    def failing(storage, keys, options=None, progress=None):
        if any(key.startswith("model-400/") for key in keys) and not (options and options.structure_only):
            raise StorageError("the disk does not answer", key=keys[0])
        return inline(storage, keys, options, progress)

    with pytest.raises(CouldNotTellError, match="does not answer"):
        gate(look(url, PLAIN), attempts=3, work=Work(scanner=failing))
    assert in_place(url) == ["model-100", "model-200", "model-300", "model-400"]
    assert list_starts(open_run(url)) == []
    assert start(url).known_good.path == f"{url}/model-400"


def test_so_many_deaths_lead_one_further_back(url):
    """After three starts without a good save; what was gone past is suspect, and the incident says why."""
    for attempt in (1, 2, 3):
        assert (start(url).known_good.step, list_starts(open_run(url))[-1].number) == (300, attempt)
    done = start(url)
    assert (done.known_good.step, done.attempt, done.spent) == (200, 1, ("model-300",))
    assert {s.path: s.outcome for s in survey(look(url))}["model-300"] is Outcome.SUSPECT
    [incident] = list_incidents(open_run(url))
    assert (incident.source, incident.state) == ("gate", "closed")
    assert incident.reason == "training was started 3 times from model-300, without a new good save"


def test_starts_of_other_jobs_do_not_count(url):
    """For jobs in any order, each of which saves nothing: a good checkpoint is passed over by the job alone that was
    requeued three times, whatever its siblings and starts outside of jobs did."""
    chance, counts = random.Random(20), Counter()
    for _ in range(60):
        job = chance.choice((None, *(JobStart(job=f"c/{n}", requeue=counts[f"c/{n}"]) for n in range(30))))
        name = job.job if job else ""
        if counts[name] < 3:
            counts[name] += 1
            done = start(url, job=job)
            assert (done.known_good.step, done.attempt, done.joined) == (300, counts[name], False)
    assert max(counts.values()) == 3
    assert in_place(url) == ["model-100", "model-200", "model-300"]
    worst = max(counts, key=lambda name: counts[name])
    done = start(url, job=JobStart(job=worst, requeue=3) if worst else None)
    assert (done.known_good.step, done.spent) == (200, ("model-300",))


def test_a_prolog_and_the_gate_of_its_job_are_one_start(url):
    """The gate in the job takes the answer of its prolog. A second gate in the job, or after a requeue, is a start."""
    prolog, job = JobStart(job="7", prolog=True), JobStart(job="7")
    assert start(url, job=prolog).attempt == 1
    done = start(url, job=job)
    assert (done.attempt, done.joined, done.known_good.step) == (1, True, 300)
    assert len(list_starts(open_run(url))) == 1
    assert start(url, job=JobStart(job="7", requeue=1)).attempt == 2
    assert start(url, job=JobStart(job="7", requeue=1)).attempt == 3


def test_starts_of_older_versions_are_read(url):
    """A record without a job is one outside of jobs."""
    start(url)
    [path] = Path(url, "_ckptguard", "starts").iterdir()
    document = json.loads(path.read_text())
    assert document.pop("job") is None
    path.write_text(json.dumps(document) + "\n")
    assert start(url).attempt == 2
    assert start(url, job=JobStart(job="7")).attempt == 1


def test_a_new_good_save_forgives(url):
    """Two starts, a good save that is damaged later, and again three starts from the old one."""
    start(url)
    start(url)
    save(url, 400, seed=400)
    judge(url)
    rot(url, "model-400/model.safetensors")
    assert [start(url).known_good.step for _ in range(4)] == [300, 300, 300, 200]
    assert len(list_starts(open_run(url))) == 4


def test_at_the_end_of_all_attempts_nothing_moves(url):
    """12, with what there is still in place; more attempts start from it once more."""
    for _ in range(3):
        start(url, attempts=1)
    with pytest.raises(RollbackExhausted, match="started 1 times from model-100"):
        start(url, attempts=1)
    assert in_place(url) == ["model-100"]
    assert start(url, attempts=2).known_good.step == 100


def test_a_name_that_is_saved_over_comes_to_an_end(tmp_path):
    """What is put back from its copy is a new generation of its name: it has no new attempts."""
    place = str(tmp_path / "run")
    for seed in (1, 2, 3):
        for name, data in files_of(seed).items():
            Path(place).mkdir(exist_ok=True)
            Path(place, f"tmp-{name}").write_bytes(data)
            Path(place, f"tmp-{name}").replace(Path(place, name))
        judge(place, TINY)
    contents = []
    for _ in range(4):
        start(place, attempts=2, settings=TINY)
        contents.append(Path(place, "last.safetensors").read_bytes())
    assert contents == [files_of(seed)["last.safetensors"] for seed in (3, 3, 2, 2)]
    with pytest.raises(RollbackExhausted):
        start(place, attempts=2, settings=TINY)


def files_of(seed):
    """One file under a fixed name."""
    from support.tiny_files import WEIGHTS, content

    return {"last.safetensors": content(seed)[WEIGHTS]}


def test_nothing_saved_yet_is_a_beginning(tmp_path):
    """No folder, an empty one, and one with other files: none of them gets a folder of ours."""
    place = tmp_path / "run"
    for prepare in (lambda: None, place.mkdir, lambda: (place / "log.txt").write_text("")):
        prepare()
        assert gate(look(open_run(str(place), must_exist=False)), attempts=3).known_good is None
        assert not (place / "_ckptguard").exists()
        with pytest.raises(NoKnownGoodError, match="nothing was saved"):
            gate(look(open_run(str(place), must_exist=False)), attempts=3, require=True)
    with pytest.raises(NotFoundError):
        open_run(str(tmp_path / "gone"))


def test_checkpoints_without_a_good_one_are_no_beginning(tmp_path):
    """13, and nothing is moved."""
    place = str(tmp_path / "run")
    save(place, 100, seed=1)
    poison(Path(place, "model-100", "model.safetensors"))
    with pytest.raises(NoKnownGoodError, match="none of them is good"):
        start(place)
    assert in_place(place) == ["model-100"]
    assert list_starts(open_run(place)) == []


@pytest.mark.parametrize("spoil", [rot, lambda url, key: delete(url, 300)])
def test_what_the_run_has_lost_comes_from_the_replica(url, tmp_path, spoil):
    """The newest good one, whether it is gone or damaged."""
    settings = PLAIN.changed(replicas=(str(tmp_path / "replica"),))
    before = files_below(url, "model-300")
    replicate(look(url, settings), settings.replicas[0], work=Work(scanner=inline))
    spoil(url, "model-300/model.safetensors")
    done = start(url, settings=settings)
    assert (done.known_good.step, files_below(url, "model-300")) == (300, before)


def test_a_dry_run_does_nothing(url):
    """No start, no move."""
    rot(url, "model-300/model.safetensors")
    assert start(url, dry_run=True).known_good.step == 200
    assert (in_place(url)[-1], list_starts(open_run(url))) == ("model-300", [])


def test_a_dry_run_does_not_guess(tmp_path):
    """What has no verdict yet may be good: nobody says that nothing is."""
    place = str(tmp_path / "unknown")
    save(place, 100, seed=1)
    with pytest.raises(CouldNotTellError, match="1 of its checkpoints have no verdict yet"):
        start(place, dry_run=True)
    assert start(place).known_good.step == 100


def test_a_writing_training_is_not_gone_back_under(url, monkeypatch):
    """11 after a while; the wait ends as soon as nothing changes."""
    now = [0.0]

    def pass_time(seconds):
        now[0] += seconds
        save(url, 300, seed=300)

    monkeypatch.setattr("ckptguard.engine.gate.time.sleep", pass_time)
    monkeypatch.setattr("ckptguard.engine.gate.time.monotonic", lambda: now[0])
    with pytest.raises(BusyError, match="still writing"):
        start(url, settings=PLAIN.changed(settle=3600.0))
    monkeypatch.setattr("ckptguard.engine.gate.time.sleep", lambda seconds: None)
    assert start(url, settings=PLAIN.changed(settle=3600.0)).known_good.step == 300


def test_under_a_living_guard_nothing_moves(url, monkeypatch):
    """A training that nobody started through a gate: 11. When it has ended, the gate opens."""
    rot(url, "model-300/model.safetensors")
    run = open_run(url)
    begin_training(run, "model-#", loops=True)
    with pytest.raises(BusyError, match=f"process {os.getpid()} is training into"):
        start(url)
    assert in_place(url)[-1] == "model-300"
    monkeypatch.setattr("ckptguard.engine.gate.has_ended", lambda owner: True)
    assert start(url).known_good.step == 200


def test_a_daemon_that_judges_at_this_moment_is_no_failure(url, monkeypatch):
    """Whoever seals first: the gate looks again."""
    calls = []

    def busy_once(*words, **how):
        calls.append(words)
        if len(calls) % 2:
            raise BusyError("another process sealed it")
        return real(*words, **how)

    for name in ("verify_pending", "roll_back"):
        real = getattr(gate_module, name)
        with monkeypatch.context() as patched:
            patched.setattr(gate_module, name, busy_once)
            assert start(url, attempts=9).known_good.step == 300


def test_gates_of_one_start_agree(url, monkeypatch):
    """A start whose process still lives is joined, and not counted; so is one elsewhere for a minute."""
    first = start(url)
    [record] = list_starts(open_run(url))
    alive = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        monkeypatch.setattr(records_of_starts, "this_process", lambda: None)  # we are another rank
        again = start(url)
        assert (again.joined, again.known_good.path, again.attempt) == (True, first.known_good.path, 1)
        assert len(list_starts(open_run(url))) == 1
    finally:
        alive.communicate()
    assert still_goes_on(open_run(url), record)


def test_of_gates_at_once_one_decides(url):
    """Whoever waits for the lock takes the answer of the one that had it."""
    for _ in range(2):
        start(url)
    found, threads = [], []
    together = threading.Barrier(4)

    def one():
        view = look(url, PLAIN)
        together.wait()
        found.append(gate(view, attempts=2, work=Work(scanner=inline)))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {done.known_good.step for done in found} <= {200, 100}
    assert len(list_starts(open_run(url))) - 2 == sum(not done.joined for done in found)


def test_damaged_records_of_starts_do_not_count(url):
    """They neither end nor stop a start."""
    start(url)
    for name, text in (("000000007.json", "{"), ("x.json", "{}"), ("000000009.json", '{"number": 1}')):
        Path(url, "_ckptguard", "starts", name).write_text(text)
    assert start(url).attempt == 2
    assert list_starts(open_run(url))[-1].number == 10


@pytest.mark.parametrize("code", [0, 7])
def test_the_command_takes_its_place(url, code):
    """Its output, its exit code, its process; the start is on record before it begins."""
    script = (
        f"import json, os; print(json.dumps([os.getpid(), os.listdir({url!r} + '/_ckptguard/starts')])); exit({code})"
    )
    words = [sys.executable, "-m", "ckptguard", "gate", url, "--", sys.executable, "-c", script]
    environment = {**os.environ, "CKPTGUARD_SETTLE": "0"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        out, err = process.communicate(timeout=250)
    assert json.loads(out) == [process.pid, ["000000001.json"]]
    assert err == f"training starts from {url}/model-300\n"
    assert process.returncode == code
    assert name_of(300) in in_place(url)


def test_a_start_elsewhere_that_saved_since_is_over(url, monkeypatch):
    """Training is started again on another machine within the minute: what it saved is read, not taken as agreed."""
    start(url)
    for module in ("records.leases", "engine.gate"):
        monkeypatch.setattr(f"ckptguard.{module}.is_here", lambda owner: False)
    monkeypatch.setattr(records_of_starts, "this_process", lambda: None)
    assert start(url).joined
    record = Path(url, "_ckptguard", list_starts(open_run(url))[-1].key)
    os.utime(record, (record.stat().st_mtime - 10,) * 2)
    save(url, 400, seed=400)
    poison(Path(url, "model-400", "model.safetensors"))
    done = start(url)
    assert (done.joined, done.known_good.step, in_place(url)[-1]) == (False, 300, "model-300")

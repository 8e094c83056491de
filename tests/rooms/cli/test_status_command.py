"""status of one run and of many, and when a run is not protected."""

from __future__ import annotations

import os

import fsspec
import pytest
import torch
from support.json_documents import EXAMPLES, MANY_RUNS, shape
from support.runs import QUICK, write_torch
from support.views import look

from ckptguard.records.daemon_record import DaemonRecord, write_daemon_record
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import this_host
from ckptguard.supervise.lock_file import Supervision, is_supervised
from ckptguard.upkeep.reconcile import PassNotes, reconcile


@pytest.fixture
def guarded(three):
    """A run whose good checkpoints have copies of their own."""
    reconcile(look(str(three), QUICK.changed(keep="copy")), PassNotes())
    return three


@pytest.fixture
def runs(root, invoke):
    """A folder of two runs, one of them verified, beside a folder and a file that are none."""
    for name, steps in (("a", (100, 200)), ("b", (100,))):
        (root / name).mkdir()
        for step in steps:
            write_torch(root / name, step, seed=step)
    invoke("verify", root / "a")
    (root / "logs").mkdir()
    (root / "notes.txt").write_text("x")
    return root


def daemon_record(run, pid, *, boot_id=None):
    """Have the run name a daemon."""
    host, boot = this_host()
    record = DaemonRecord(address="/x", host=host, boot_id=boot_id or boot, pid=pid, started_at="t")
    write_daemon_record(open_run(str(run)), record)


def test_what_waits_unwatched_is_not_protected(guarded, document, invoke):
    """A new save that nobody looks at: no, and what to do; once it is verified, yes."""
    assert document("status", guarded)[1]["protected"]
    write_torch(guarded, 400, seed=400)
    _, found = document("status", guarded)
    assert (found["protected"], found["watched"], found["pending"]) == (False, False, ["net-400.pt"])
    assert found["explanation"].startswith("no: 1 save waits for a verdict, and nothing watches this run")
    assert f"ckptguard verify {guarded}" in found["explanation"]
    invoke("verify", guarded)
    assert document("status", guarded)[1]["protected"]


def test_what_waits_while_a_daemon_lives_is_protected(guarded, document):
    """One of this machine is asked for; of another one its record counts."""
    write_torch(guarded, 400, seed=400)
    daemon_record(guarded, os.getpid())
    _, found = document("status", guarded)
    assert (found["protected"], found["watched"]) == (True, True)


@pytest.mark.parametrize("gone", ["process", "boot"])
def test_a_daemon_that_has_ended_watches_nothing(guarded, document, gone):
    """Its record stays behind after a kill, or a restart of the machine."""
    write_torch(guarded, 400, seed=400)
    if gone == "process":
        ended = os.spawnlp(os.P_NOWAIT, "true", "true")
        os.waitpid(ended, 0)
        daemon_record(guarded, ended)
    else:
        daemon_record(guarded, os.getpid(), boot_id="another")
    assert document("status", guarded)[1]["watched"] is False


def test_a_supervised_run_is_watched(guarded, document):
    """`supervise` leaves no record in the run; its note says so while it lives."""
    write_torch(guarded, 400, seed=400)
    assert not is_supervised(str(guarded), os.environ)
    supervision, _ = Supervision.begin(str(guarded), ["true"], os.environ)
    supervision.note(restarts=0)
    try:
        assert document("status", guarded)[1]["watched"]
    finally:
        supervision.end()
    assert not document("status", guarded)[1]["watched"]


@pytest.mark.parametrize("quoted", [True, False])
def test_many_runs_have_one_line_each(runs, invoke, quoted):
    """By a pattern, which leaves out what is no run, or by their names."""
    words = [f"{runs}/*"] if quoted else [runs / "a", runs / "b"]
    result = invoke("status", *words)
    assert result.exit_code == 13
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:3] == ["RUN", "PROTECTED", "KNOWN-GOOD"]
    assert [line[:3] for line in lines[1:]] == [
        [str(runs / "a"), "partly", "net-200.pt"],
        [str(runs / "b"), "no", "-"],
    ]


def test_a_pattern_on_a_store(runs, invoke):
    """Its last part stands for folders; a pattern in the middle is refused, for it would list the whole store."""
    store = fsspec.filesystem("memory")
    store.put(str(runs / "a"), "/status-runs/a", recursive=True)
    store.pipe("/status-runs/logs/x.txt", b"x")
    try:
        result = invoke("status", "memory://status-runs/*")
        assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["memory://status-runs/a"]
        assert invoke("status", "memory://*/a").exit_code == 2
    finally:
        store.rm("/status-runs", recursive=True)


def test_a_run_that_is_not_there_ends_no_other(runs, invoke, document):
    """It is unknown, its error is on stderr, and it has its entry in the document."""
    result = invoke("status", runs / "a", runs / "absent")
    assert result.exit_code == 10
    assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["partly", "unknown"]
    assert "there is no folder" in result.stderr
    code, found = document("status", runs / "a", runs / "absent")
    assert code == 10
    assert set(found["runs"][0]) == set(EXAMPLES["status"]) - {"schema", "command"}
    assert shape(found["runs"][1]) == shape(MANY_RUNS["runs"][0])


def test_nothing_known_good_outweighs_what_is_absent(runs, invoke):
    """What is known to be unprotected counts first."""
    assert invoke("status", runs / "absent", runs / "b").exit_code == 13


def test_a_pattern_of_nothing(runs, invoke, document):
    """It names no run: not found."""
    assert invoke("status", f"{runs}/x*").exit_code == 10
    assert document("status", f"{runs}/x*")[1]["runs"][0]["error"]["kind"] == "not_found"


def test_a_folder_with_an_odd_name_is_no_pattern(root, invoke):
    """What is there is meant."""
    odd = root / "run[1]"
    odd.mkdir()
    write_torch(odd, 1, seed=1)
    invoke("verify", odd)
    assert invoke("status", odd).stdout.startswith("protected?")


def test_quiet_names_what_is_not_protected(runs, guarded, invoke):
    """One that is protected has no line, alone and among others."""
    result = invoke("status", "-q", guarded)
    assert (result.exit_code, result.stdout) == (0, "")
    shown = invoke("status", "-q", guarded, runs / "b").stdout
    assert str(runs / "b") in shown
    assert f"{guarded} " not in shown


def test_a_run_that_cannot_be_read_hides_no_other_of_a_pattern(runs, invoke):
    """Its own line says that it is unknown, and the others have theirs."""
    (runs / "a" / "_ckptguard" / "format.json").write_text("{")
    result = invoke("status", f"{runs}/*")
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        [str(runs / "a"), "unknown"],
        [str(runs / "b"), "no"],
    ]
    assert (result.exit_code, "format.json" in result.stderr) == (13, True)


def test_quiet_names_a_replica_in_trouble(guarded, invoke, monkeypatch, tmp_path):
    """A copy that nobody can look at is wrong, also of a run that is protected here."""
    copy = tmp_path / "copy"
    (copy / "_ckptguard").mkdir(parents=True)
    (copy / "_ckptguard" / "format.json").write_text("{")
    monkeypatch.setenv("CKPTGUARD_REPLICAS", str(copy))
    alone = invoke("status", "-q", guarded).stdout
    assert alone.startswith("protected? yes")
    assert str(copy) in alone
    result = invoke("status", "-q", guarded, guarded)
    assert str(guarded) in result.stdout
    assert str(copy) in result.stderr


@pytest.mark.parametrize("bad", range(4))
def test_it_begins_with_what_matters_most(tmp_path, invoke, document, bad):
    """The newest saves that are bad, and how to go back; else whether the run is protected."""
    for step in range(1, 5):
        tensors = {"a.weight": torch.full((8, 8), float("nan") if step > 4 - bad else float(step))}
        torch.save({"model": tensors, "step": step}, tmp_path / f"step-{step}.pt")
        os.utime(tmp_path / f"step-{step}.pt", (1_700_000_000 + step,) * 2)
    invoke("verify", tmp_path)
    said, *facts = invoke("status", tmp_path).stdout.splitlines()
    assert not [fact for fact in facts if fact.endswith(("()", ":"))]  # what there is none of has no line
    paths = [f"step-{step}.pt" for step in range(5 - bad, 5)]
    lead = {0: "protected?", 1: "the newest save is bad: step-4.pt "}.get(bad, f"the newest {bad} saves are bad: ")
    assert said.startswith(lead)
    assert all(path in said for path in paths)
    assert (f"ckptguard rollback {tmp_path}" in said) is bool(bad)
    assert document("status", tmp_path)[1]["newest_bad"] == paths
    assert ("newest" in invoke("status", "-q", tmp_path).stdout) is bool(bad)

"""A daemon over a fleet: runs come, go and change their settings while it works."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import DaemonProcess, Starter, once, request, save, until

from ckptguard.records.daemon_record import read_daemon_record
from ckptguard.records.run import open_run


def make(fleet: Path, name: str, *steps: int) -> Path:
    """A run with small saves, a folder each."""
    for step in steps:
        (fleet / name / f"checkpoint-{step}").mkdir(parents=True)
        save(fleet / name / f"checkpoint-{step}", step)
    return fleet / name


def guarded(daemon: DaemonProcess) -> dict[str, Any]:
    """What the daemon says of its runs, by URL."""
    return {run["url"]: run for run in request(daemon.address, "GET", "/v1/runs")[1]["runs"]}


def known_good(daemon: DaemonProcess, run: Path) -> int:
    """The step of a run's known-good checkpoint, once there is one."""

    def look() -> int | None:
        status, answer = daemon.ask("known-good?wait_seconds=20", run=run)
        return answer["step"] if status == 200 else None

    return until(look, f"a verdict for {run}")


def test_runs_come_and_go(tmp_path: Path, start: Starter) -> None:
    """Runs that were there, that come later and that are named are guarded; one whose folder is gone is left, once."""
    fleet = tmp_path / "fleet"
    first = make(fleet, "team/a", 1)
    named = make(tmp_path, "named", 1)
    daemon = start(named, arguments=("--fleet", str(fleet)))
    assert [known_good(daemon, run) for run in (first, named)] == [1, 1]
    second = make(fleet, "team/b", 2)
    assert known_good(daemon, second) == 2
    assert set(guarded(daemon)) == {str(first), str(second), str(named)}
    shutil.rmtree(first)
    daemon.logged("run_left", run=str(first))
    assert set(guarded(daemon)) == {str(second), str(named)}
    shutil.rmtree(named)
    daemon.logged("ended", run=str(named))
    assert make(tmp_path, "named", 3) == named
    until(lambda: known_good(daemon, named) == 3, "the verdict on a named run that came back")
    assert [line["run"] for line in daemon.log_lines() if line["event"] == "run_left"] == [str(first)]
    assert daemon.stop() == 0
    assert read_daemon_record(open_run(str(second))) is None


def test_the_plan_is_read_again(tmp_path: Path, start: Starter) -> None:
    """SIGHUP applies a changed fleet file; a wrong one is told, and everything stays."""
    one, other = make(tmp_path, "one/a", 1), make(tmp_path, "other/b", 1)
    file = tmp_path / "fleet.toml"
    file.write_text('folders = ["one"]')
    daemon = start(arguments=("--fleet", str(file)))
    assert known_good(daemon, one) == 1
    assert guarded(daemon)[str(one)]["replicas"] == []
    file.write_text("folders = [")
    daemon.process.send_signal(signal.SIGHUP)
    assert "not valid TOML" in daemon.logged("plan_not_reloaded")["reason"]
    assert set(guarded(daemon)) == {str(one)}
    file.write_text(f'folders = ["one", "other"]\n[runs."a"]\nreplicas = ["{tmp_path}/copies/{{run}}"]')
    daemon.process.send_signal(signal.SIGHUP)
    daemon.logged("plan_reloaded")
    assert known_good(daemon, other) == 1
    until(lambda: [r["last_good"] for r in guarded(daemon)[str(one)]["replicas"]] == ["1.1"], "the replica of one run")
    assert guarded(daemon)[str(other)]["replicas"] == []
    file.write_text('folders = ["other"]')
    daemon.process.send_signal(signal.SIGHUP)
    daemon.logged("run_left", run=str(one))
    assert daemon.process.poll() is None


def test_all_runs_share_a_budget(tmp_path: Path, start: Starter) -> None:
    """What the fleet file gives to all runs thins out the larger one by its next save. A named run has no share."""
    small, large = make(tmp_path, "fleet/small", 1, 2), make(tmp_path, "fleet/large", *range(1, 9))
    named = make(tmp_path, "named", *range(1, 9))
    one = sum(os.lstat(path).st_blocks * 512 for path in (large / "checkpoint-1").rglob("*"))
    file = tmp_path / "fleet.toml"
    settings = '[settings]\nkeep = "none"\ntrash_grace = 0.0\n'
    file.write_text(f'folders = ["fleet"]\nkeep_bytes = {6 * one}\n{settings}')
    daemon = start(named, arguments=("--fleet", str(file)))
    assert [known_good(daemon, run) for run in (small, large, named)] == [2, 8, 8]
    for run in (large, named):
        make(run.parent, run.name, 9)
        assert known_good(daemon, run) == 9
    until(lambda: not (large / "checkpoint-5").exists(), "the budget to be kept")
    assert known_good(daemon, large) == 9
    assert len(list(small.glob("checkpoint-*"))) == 2
    assert len(list(large.glob("checkpoint-*"))) == 4
    assert len(list(named.glob("checkpoint-*"))) == 9


def test_each_run_has_its_own_settings(tmp_path: Path, start: Starter) -> None:
    """A table of settings reaches the runs that it names: here what tensors may hold."""
    for name in ("strict", "loose"):
        (tmp_path / "fleet" / name / "checkpoint-1").mkdir(parents=True)
        save(tmp_path / "fleet" / name / "checkpoint-1", 1, nan=True)
    file = tmp_path / "fleet.toml"
    file.write_text('folders = ["fleet"]\n[runs."loose"]\nallow_nonfinite = ["*"]')
    daemon = start(arguments=("--fleet", str(file)))
    daemon.logged("verified", run=str(tmp_path / "fleet" / "loose"), outcome="good")
    daemon.logged("verified", run=str(tmp_path / "fleet" / "strict"), outcome="bad")


@pytest.mark.parametrize("table", ['[runs."a"]', '[runs."a"]\nteam = "vision"\n[runs."team=vision"]'])
def test_events_reach_the_hooks_of_their_run(tmp_path: Path, start: Starter, table: str) -> None:
    """A command for incidents in a table of a run, or of a label that it has, is told of that run alone."""
    for name in ("a", "b"):
        (tmp_path / "fleet" / name / "checkpoint-1").mkdir(parents=True)
        save(tmp_path / "fleet" / name / "checkpoint-1", 1, nan=True)
    told = tmp_path / "told"
    file = tmp_path / "fleet.toml"
    command = json.dumps(["sh", "-c", f"cat >> {told}"])
    file.write_text(f'folders = ["fleet"]\n{table}\non_incident = {command}')
    daemon = start(arguments=("--fleet", str(file)))
    daemon.logged("verified", run=str(tmp_path / "fleet" / "b"), outcome="bad")
    daemon.logged("hook_ran")
    labels = {"team": "vision"} if "team" in table else {}
    event = json.loads(told.read_text())
    assert (event["url"], event["labels"]) == (str(tmp_path / "fleet" / "a"), labels)
    assert {run["url"]: run["labels"] for run in request(daemon.address, "GET", "/v1/fleet")[1]["runs"]} == {
        str(tmp_path / "fleet" / "a"): labels,
        str(tmp_path / "fleet" / "b"): {},
    }


def test_ready_after_every_runs_first_pass(tmp_path: Path, start: Starter) -> None:
    """`/readyz` is 503 until every run had a pass or says why not, and then stays 200."""
    fleet = tmp_path / "fleet"
    make(fleet, "a", 1)
    (fleet / "broken" / "_ckptguard").mkdir(parents=True)
    (fleet / "broken" / "_ckptguard" / "format.json").write_text('{"format": 99}')
    daemon = start(tmp_path / "later", arguments=("--fleet", str(fleet)))

    def ready() -> Any:
        status, answer = request(daemon.address, "GET", "/readyz")
        assert (status == 200) == (answer["status"] == "ready")
        assert answer["without_pass"] == 0 or status == 503
        return answer if status == 200 else None

    assert until(ready, "readiness")["runs"] == 3
    assert {run["state"] for run in guarded(daemon).values()} == {"guarded", "failing", "waiting"}
    assert daemon.ask("checkpoints", run=fleet / "a")[0] == 200


def test_not_ready_before_every_place_was_seen(tmp_path: Path, start: Starter) -> None:
    """A place that cannot be searched since the start: `/readyz` says so, and `/healthz` is well. Once it was searched,
    it is ready, also when the place goes again."""
    make(tmp_path / "fleet", "a", 1)
    (tmp_path / "fleet.toml").write_text('folders = ["fleet", "later"]')
    daemon = start(arguments=("--fleet", str(tmp_path / "fleet.toml")))
    assert known_good(daemon, tmp_path / "fleet" / "a") == 1

    def ready() -> tuple[int, str, int]:
        status, answer = request(daemon.address, "GET", "/readyz")
        return status, answer["status"], answer["unseen_places"]

    until(lambda: ready() == (503, "a place cannot be searched", 1), "the end of the first search")
    assert request(daemon.address, "GET", "/healthz")[0] == 200
    make(tmp_path / "later", "b", 1)
    until(lambda: ready() == (200, "ready", 0), "readiness")
    shutil.move(tmp_path / "later", tmp_path / "elsewhere")
    until(lambda: 'cause="missing"} 1' in metrics(daemon), "the metric of the place")
    assert ready() == (200, "ready", 0)


def metrics(daemon: DaemonProcess) -> str:
    """What the daemon tells Prometheus."""
    with contextlib.closing(http.client.HTTPConnection("localhost")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(daemon.address)
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def test_once_over_a_fleet(tmp_path: Path) -> None:
    """`--once --fleet` verifies every run that is there; what could not be searched is no success."""
    make(tmp_path / "fleet", "a", 1)
    make(tmp_path / "fleet", "b", 1)
    assert once("--fleet", tmp_path / "fleet").returncode == 0
    (tmp_path / "fleet.toml").write_text('folders = ["fleet", "gone"]')
    done = once("--fleet", tmp_path / "fleet.toml")
    assert (done.returncode, "gone cannot be searched" in done.stderr) == (1, True)
    (tmp_path / "fleet" / "b" / "checkpoint-2").mkdir()
    save(tmp_path / "fleet" / "b" / "checkpoint-2", 2, nan=True)
    assert once("--fleet", tmp_path / "fleet").returncode == 3


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        ((), "name at least one RUN", 2),
        (("--fleet", "nothing"), "no folder or fleet file", 10),
        (("--fleet", "model.pt"), "no fleet file", 2),
    ],
)
def test_wrong_use_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str, code: int
) -> None:
    """A mistake in the command or the fleet file is told at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_bytes(os.urandom(64))
    done = once(*arguments)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_fleet_has_no_one_place_for_records(tmp_path: Path) -> None:
    """The setting is refused, wherever it comes from."""
    done = once("--fleet", tmp_path, CKPTGUARD_RECORDS="elsewhere")
    assert (done.returncode, "a fleet has several runs" in done.stderr) == (2, True), done.stderr


def test_the_address_is_found_again(tmp_path: Path, start: Starter) -> None:
    """A daemon over the same fleet has the same address again, and says so in each run's records."""
    run = make(tmp_path / "fleet", "a", 1)
    first = start(arguments=("--fleet", str(tmp_path / "fleet")))
    assert known_good(first, run) == 1
    record = read_daemon_record(open_run(str(run)))
    assert record is not None
    assert record.address == first.address
    address = first.address
    first.kill()
    second = start(arguments=("--fleet", str(tmp_path / "fleet")))
    assert second.address == address
    assert known_good(second, run) == 1

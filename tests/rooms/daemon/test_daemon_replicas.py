"""Replicas are brought up to date behind verdicts; one in trouble is told of once and stops nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from support.daemon_process import DaemonProcess, Starter, request, save, until
from support.faults import flip
from support.hook_commands import command, told, toml

from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good


def replicas_of(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """What the daemon tells of the replicas of its run."""
    answer = request(daemon.address, "GET", "/v1/runs")[1]
    found: list[dict[str, Any]] = answer["runs"][0]["replicas"]
    return found


def test_good_checkpoints_arrive_at_the_replicas(run: Path, start: Starter, tmp_path: Path) -> None:
    """Each save is in the replica soon after its verdict, under the run's name; the daemon tells where it stands."""
    place = tmp_path / "elsewhere" / "run"
    daemon = start(run, arguments=toml(tmp_path, replicas=[str(tmp_path / "elsewhere" / "{run}")]))
    for step in (1, 2):
        save(run, step)

        def up_to_date(step: int = step) -> bool:
            return replicas_of(daemon) == [{"url": str(place), "behind": 0, "last_good": f"{step}.1", "trouble": None}]

        until(up_to_date, f"the arrival of step {step}")
    daemon.stop()
    shutil.rmtree(run)
    assert find_known_good(open_run(str(place))).step == 2


def test_a_replica_in_trouble_is_told_of_once(run: Path, start: Starter, tmp_path: Path) -> None:
    """A file lies where the replica's folder should be: the hook is told once, verdicts go on, the other replica is
    filled; when the file is gone, the replica is, too."""
    blocked, other, log = tmp_path / "blocked", tmp_path / "other", tmp_path / "told"
    blocked.write_text("not a folder")
    settings = toml(tmp_path, replicas=[str(blocked), str(other)], on_incident=command(log))
    daemon = start(run, arguments=settings)
    save(run, 1)
    until(lambda: (other / "net-1.safetensors").exists(), "the arrival at the other replica")
    until(lambda: [e for e in told(log) if e["event"] == "replica"], "the hook")
    save(run, 2)
    until(lambda: (other / "net-2.safetensors").exists(), "the next arrival")
    assert [r["trouble"] is None for r in replicas_of(daemon)] == [False, True]
    assert len([e for e in told(log) if e["event"] == "replica"]) == 1
    os.unlink(blocked)
    until(lambda: (blocked / "net-2.safetensors").exists(), "the arrival after the trouble")
    assert len([e for e in told(log) if e["event"] == "replica"]) == 1


def test_damage_that_is_found_on_the_way_is_told(run: Path, start: Starter, tmp_path: Path) -> None:
    """A save that rotted after its verdict never arrives, and is an incident like any other."""
    log = tmp_path / "told"
    daemon = start(run, arguments=toml(tmp_path, keep="none"))
    save(run, 1)
    save(run, 2)
    daemon.known_good(2)
    daemon.stop()
    flip(run / "net-2.safetensors")
    place = tmp_path / "elsewhere"
    settings = toml(tmp_path, keep="none", replicas=[str(place)], on_incident=command(log))
    start(run, arguments=settings)
    until(lambda: [e for e in told(log) if e["event"] == "verdict"], "the hook")
    until(lambda: (place / "net-1.safetensors").exists(), "the arrival of the older one")
    assert not (place / "net-2.safetensors").exists()

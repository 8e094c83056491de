"""What the daemon does behind verdicts: it reads again what was verified, repairs kept copies, and fills replicas."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from support.daemon_process import DaemonProcess, Starter, request, save, until
from support.faults import flip
from support.hook_commands import command, told, toml
from support.records_on_disk import at

from ckptguard.decisions.turns import LARGE
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good


def scrub_of(daemon: DaemonProcess) -> dict[str, Any]:
    """What the daemon says of its scrub."""
    found = request(daemon.address, "GET", "/v1/runs")[1]["runs"][0]["scrub"]
    assert isinstance(found, dict)
    return found


def content(path: Path) -> bytes | None:
    """The bytes of a file; None while it is exchanged."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def test_rot_is_found_told_and_repaired(run: Path, start: Starter) -> None:
    """A bit rots in place and another in a kept copy: the verdict turns BAD, incidents are open, the copy is repaired
    from its place, and with `repair` the place from its copy."""
    save(run, 100)
    save(run, 200)
    daemon = start(run, CKPTGUARD_KEEP="copy", CKPTGUARD_SCRUB_EVERY="2", CKPTGUARD_REPAIR="true")
    daemon.logged("verified", step=200)
    daemon.logged("scrubbed", id="200.1", place="kept", outcome="good")
    good = (run / "net-100.safetensors").read_bytes()
    flip(run / "net-100.safetensors")
    [kept] = run.glob("_ckptguard/kept/*/000000000200.1/*net-200*")
    flip(kept)
    daemon.logged("verified", step=100, outcome="bad")
    daemon.logged("scrubbed", id="200.1", place="kept", outcome="bad")
    until(lambda: content(run / "net-100.safetensors") == good, "the repair of the place")
    until(lambda: content(kept) == content(run / "net-200.safetensors"), "that of the kept copy")

    def closed() -> bool:
        found = list_incidents(open_run(str(run)))
        return len(found) == 2 and all(i.state == "closed" and i.source == "daemon" for i in found)

    until(closed, "closing both incidents")
    assert scrub_of(daemon)["every_seconds"] == 2.0


def test_it_goes_on_after_a_restart(run: Path, start: Starter) -> None:
    """After a kill -9 only that is read again whose time has come by the records, and the answers say what is next."""
    save(run, 100)
    save(run, 200)
    first = start(run, CKPTGUARD_KEEP="none", CKPTGUARD_SCRUB_EVERY="1w")
    first.logged("verified", step=200)
    until(lambda: scrub_of(first)["next"], "the first look")
    assert scrub_of(first)["next"]["id"] == "100.1"
    assert not (run / "_ckptguard" / "scrubs").exists()  # both were read just now
    first.kill()
    folder = at(run, "_ckptguard/scrubs/net-#.safetensors")
    folder.mkdir(parents=True)
    (folder / "000000000200.1.place.20200101T000000Z.1-1.json").write_text("{}")
    second = start(run, CKPTGUARD_KEEP="none", CKPTGUARD_SCRUB_EVERY="1w")
    second.logged("scrubbed", id="200.1", place="place", outcome="good")
    found = until(lambda: (state := scrub_of(second))["next"] and state, "the look after it")
    assert (found["next"]["id"], found["last"]["id"], found["reading"]) == ("100.1", "200.1", None)
    assert [line["id"] for line in second.log_lines() if line["event"] == "scrubbed"] == ["200.1"]
    [record] = folder.iterdir()  # in place of the old one
    assert "20200101" not in record.name


def test_a_large_save_gets_its_md5_after_its_verdict(run: Path, start: Starter) -> None:
    """Its first verdict leaves it out. It is taken without a scrub, once, and the metric says when none waits."""
    path = save(run, 100, numbers=(LARGE >> 2) + 1)
    daemon = start(run, CKPTGUARD_KEEP="none", CKPTGUARD_SCRUB_EVERY="0", CKPTGUARD_SCRUB_RATE="1e12")
    daemon.logged("scrubbed", id="100.1", place="place", outcome="good")
    record = json.loads(at(run, "_ckptguard/md5/net-#.safetensors/000000000100.1.json").read_text())
    assert record["files"] == {path.name: hashlib.md5(path.read_bytes()).hexdigest()}

    def none_waits() -> bool:
        return request(daemon.address, "GET", "/v1/fleet")[1]["runs"][0]["without_md5"] == 0

    until(none_waits, "the count")
    assert [line["id"] for line in daemon.log_lines() if line["event"] == "scrubbed"] == ["100.1"]


def test_a_scrub_may_be_switched_off(run: Path, start: Starter) -> None:
    """With 0 nothing is read again, and the answer says so."""
    save(run, 100)
    daemon = start(run, CKPTGUARD_SCRUB_EVERY="0")
    daemon.logged("verified", step=100)
    assert request(daemon.address, "GET", "/v1/runs")[1]["runs"][0]["scrub"] is None


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

"""Actions in a real daemon: they end with it, whatever ends it, and the catalogue tells of them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import DaemonProcess, Starter, save, until

SLOW = {"CKPTGUARD_VERIFY_RATE": "65536"}  # bytes a second: reading the save below takes minutes
NUMBERS = 4_000_000


def action(daemon: DaemonProcess) -> Any:
    """The only action on record, once there is one."""

    def look() -> Any:
        found = daemon.ask("actions")[1]["actions"]
        assert len(found) <= 1
        return found[0] if found else None

    return until(look, "an action on record")


def is_read(path: Path) -> bool:
    """Whether some process has the file open: the plan was agreed to by then, so a new save no longer changes it."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == str(path):
                return True
    return False


@pytest.fixture
def at_work(run: Path, start: Starter) -> DaemonProcess:
    """A daemon that carries out an action that will not end for minutes."""
    save(run, 300, numbers=NUMBERS)
    first = start(run)
    first.known_good(300)
    assert first.stop() == 0
    daemon = start(run, **SLOW)
    token = daemon.post("actions/verify", {})[1]["token"]
    body = {"dry_run": False, "reason": "look again", "token": token}
    status, answer = daemon.post("actions/verify?wait_seconds=0", body)
    assert (status, answer["state"]) == (202, "running")
    assert action(daemon)["state"] == "began"
    until(lambda: is_read(run / "net-300.safetensors"), "the save being read")
    return daemon


def test_an_action_is_stopped_with_its_daemon(at_work: DaemonProcess, run: Path, start: Starter) -> None:
    """The daemon ends at once, and the record says that the action was stopped."""
    assert at_work.stop() == 0
    found = action(start(run))
    assert (found["state"], found["reason"]) == ("stopped", "look again")
    assert found["result"][1] == "  notice [reading] the scan was stopped"


def test_an_action_is_cut_short_by_a_kill(at_work: DaemonProcess, run: Path, start: Starter) -> None:
    """What a killed daemon began is told from what goes on, and the save is as good as before."""
    at_work.kill()
    later = start(run)
    assert action(later)["state"] == "cut short"
    assert later.known_good(300)["step"] == 300


def test_answers_do_not_wait_for_an_action(at_work: DaemonProcess, run: Path) -> None:
    """While an action is at work, a new save gets its verdict, and a plan is made."""
    save(run, 400)
    assert at_work.outcome(400) == "suspect"  # its tensor has another shape
    assert at_work.post("actions/pin", {"checkpoint": "400"})[1]["plan"] == ["would pin net-400.safetensors"]
    assert action(at_work)["state"] == "began"


def test_the_catalogue_tells_of_an_action(run: Path, start: Starter) -> None:
    """Its beginning and its end are events of the run, with who and why, also in a daemon that starts from scratch."""
    save(run, 300)
    daemon = start(run)
    daemon.known_good(300)
    token = daemon.post("actions/pin", {"checkpoint": "300"})[1]["token"]
    body = {"checkpoint": "300", "dry_run": False, "reason": "the last one before\u202e the jump", "token": token}
    assert daemon.post("actions/pin", body)[0] == 200

    def events(of: DaemonProcess) -> list[tuple[str, str]] | None:
        found = [(e["cause"], e["text"]) for e in of.ask("page")[1]["events"] if e["kind"] == "action"]
        return found if len(found) == 2 else None

    told = [
        ("pin", "owner: the last one before\\u202e the jump"),
        ("pin", "owner: done: pinned net-300.safetensors"),
    ]
    assert until(lambda: events(daemon), "two events of the action") == told
    assert daemon.stop() == 0
    later = start(run)
    assert until(lambda: events(later), "the same two events") == told

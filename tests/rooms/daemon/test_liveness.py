"""Whether the daemon works: what systemd is told, and what the probes of a container answer."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ckptguard_daemon import liveness
from ckptguard_daemon.command import command
from ckptguard_daemon.liveness import Systemd, WorkStop
from ckptguard_daemon.loop import Loop
from ckptguard_daemon.run_set import RunSet
from click.testing import CliRunner
from support.daemon_process import PATIENCE, Starter, save, until

from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings


class Manager:
    """Stands for systemd: a datagram socket, and what was sent to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[str] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)

    def until(self, line: str) -> None:
        """Return when a line is heard that was not heard before this call."""
        while not any(found.startswith(line) for found in self._next()):
            pass

    def waiting(self) -> list[str]:
        """The lines that were sent since the last call, without waiting for more."""
        self.socket.setblocking(False)
        lines: list[str] = []
        while True:
            try:
                lines += self._next()
            except BlockingIOError:
                self.socket.settimeout(PATIENCE)
                return lines

    def _next(self) -> list[str]:
        lines = self.socket.recv(4096).decode().splitlines()
        self.heard += lines
        return lines


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Manager]:
    """systemd's end of the socket, at a path or without one, as in containers."""
    found = Manager(f"@ckptguard-{uuid.uuid4()}" if request.param == "abstract" else str(short_folder / "notify"))
    yield found
    found.socket.close()


def test_systemd_hears_of_start_progress_and_end(manager: Manager, run: Path, start: Starter) -> None:
    """A real daemon is ready when it can be asked, feeds the watchdog as it works, says how many runs are not there
    yet, and that it stops."""
    save(run, 100)
    daemon = start(run, run / "later", NOTIFY_SOCKET=manager.address)
    manager.until("READY=1")
    assert daemon.ask("known-good?wait_seconds=20")[0] == 200
    manager.until("STATUS=watching 2 runs, 1 not there yet")
    manager.until("WATCHDOG=1")
    manager.until("WATCHDOG=1")
    (run / "later").mkdir()
    manager.until("STATUS=watching 2 runs")
    assert daemon.stop() == 0
    manager.until("STOPPING=1")
    assert manager.heard[0] == "READY=1"
    assert manager.heard[-2:] == ["STOPPING=1", "STATUS=stopping"]


@pytest.mark.parametrize("address", ["", "/nobody/listens", "@ckptguard-nobody", "vsock:2:1234", "x" * 200])
def test_nobody_to_tell(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a manager, or with one that is gone, nothing is told and nothing fails. Hooks do not inherit it."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    manager = Systemd()
    manager.is_ready()
    manager.tell_progress(1.0, [])
    manager.is_stopping()
    assert "NOTIFY_SOCKET" not in os.environ


class _Run(SimpleNamespace):
    """A run whose first pass hangs, as in dead storage, until it is let go. It then asks whether it must end."""

    def step(self, work: Work) -> None:
        self.began.set()
        self.go_on.wait()
        work.is_stopped()
        self.due = time.monotonic() + 1000.0


def _run(name: str) -> Any:
    """One for a loop."""
    began, go_on = threading.Event(), threading.Event()
    values = {"run_id": name, "storage": name, "settings": Settings(), "state": "guarded", "trouble": None}
    return _Run(**values, began=began, go_on=go_on)


def test_the_watchdog_starves_only_when_nothing_makes_progress(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that hangs feeds nothing, however often systemd could be told. Another run's pass does, and so does a loop
    that has nothing to do."""
    systemd = Manager(str(short_folder / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    manager, stop, stuck, other = Systemd(), threading.Event(), _run("a"), _run("b")
    run_set = RunSet([stuck])
    loop = Loop(run_set, stop, lambda run: None)
    thread = threading.Thread(target=loop.run)
    thread.start()

    def is_fed() -> bool:
        manager.tell_progress(loop.last_progress(), [])
        return "WATCHDOG=1" in systemd.waiting()

    assert stuck.began.wait(PATIENCE)
    is_fed()  # for what was before
    for _ in range(3):
        loop.wake("a")  # what feeds it is the work, not who wakes it
        assert not is_fed()
    run_set.add(other)
    loop.wake("b")
    assert other.began.wait(PATIENCE)
    assert is_fed()
    assert not is_fed()
    other.go_on.set()
    until(is_fed, "food from another run")
    stuck.go_on.set()
    until(lambda: loop.lanes.turn_of("a") is None, "the end of the pass")
    is_fed()
    loop.wake()
    until(is_fed, "food from a loop without work")
    stop.set()
    loop.lanes.wake(())
    thread.join()
    systemd.socket.close()


def test_progress_that_was_long_ago_is_not_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question of the work is a sign of progress, whichever thread asks, and it ends with everything else."""
    stop = threading.Event()
    work_stop, now = WorkStop(stop), 1e9
    monkeypatch.setattr(liveness.time, "time", lambda: now)
    assert not liveness.is_fresh(work_stop.asked_at)
    assert not work_stop.is_set()
    now += liveness.LONGEST_SILENCE - 1
    assert liveness.is_fresh(work_stop.asked_at)
    now += 2
    assert not liveness.is_fresh(work_stop.asked_at)
    work_stop.wait(0)
    assert liveness.is_fresh(work_stop.asked_at)
    stop.set()
    assert work_stop.is_set()
    assert WorkStop(threading.Event(), 0.0).wait(60)  # its own time is over


def asked(*arguments: object) -> tuple[int, str]:
    """The exit code and the words of a probe."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_probes_ask_the_socket(run: Path, start: Starter, short_folder: Path) -> None:
    """A daemon that works is alive, and ready once it has looked at its runs. Where none answers, a probe fails with
    one sentence."""
    daemon = start(run)
    assert asked("--alive", daemon.address) == (0, "")
    until(lambda: asked("--ready", daemon.address) == (0, ""), "readiness")
    daemon.stop()
    code, words = asked("--alive", daemon.address)
    assert (code, words.startswith(f"no daemon answers at {daemon.address}: ")) == (1, True)
    for wrong in (short_folder, short_folder / ("x" * 200), "", "a\0b"):
        code, words = asked("--ready", wrong)
        assert (code, words.count("\n")) == (1, 1)

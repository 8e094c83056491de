"""The daemon's answer to known-good: fresh every time, and what it remembers is only what saves work."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ckptguard_daemon import run_routes
from ckptguard_daemon.application import application, routes
from ckptguard_daemon.http.gate import admit_owner
from ckptguard_daemon.loop import Loop, Waiters
from ckptguard_daemon.run_set import RunSet
from support.daemon_process import PATIENCE, Starter, save
from support.served_runs import answer_of, served, watched

from benchmarks.bench_known_good import counted
from ckptguard.records.ledger import append_verdict
from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.runs.work import PLAIN
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

SERIES = "net-#.safetensors"


def make_suspect(run: Path, step: int) -> None:
    """As anybody may, with or without the daemon."""
    opened = open_run(str(run))
    verdict = load_history(opened).verdict(CheckpointId(SERIES, step, 1))
    assert verdict is not None
    append_verdict(opened, msgspec.structs.replace(verdict, outcome=Outcome.SUSPECT))


def test_a_change_is_in_the_next_answer(run: Path, start: Starter) -> None:
    """Verdicts, files and records that change behind its back, right after a question or long after."""
    for step in (100, 200, 300, 400):
        save(run, step)
    daemon = start(run, CKPTGUARD_SETTLE="0.1", CKPTGUARD_SCAN_INTERVAL="1000")
    daemon.known_good(400)
    assert [daemon.ask("known-good")[1]["id"] for _ in range(3)] == ["400.1"] * 3
    make_suspect(run, 400)
    assert daemon.ask("known-good")[1]["id"] == "300.1"
    make_suspect(run, 300)
    assert daemon.ask("known-good")[1]["id"] == "200.1"
    assert daemon.ask("known-good?before_step=200")[1]["id"] == "100.1"
    assert [daemon.ask("known-good")[1]["id"] for _ in range(2)] == ["200.1"] * 2
    (run / "net-200.safetensors").unlink()
    shutil.rmtree(run / "_ckptguard" / "kept")
    assert daemon.ask(f"known-good?wait_seconds={PATIENCE:g}")[1]["id"] == "100.1"  # its link was removed: it is read
    shutil.rmtree(run / "_ckptguard")
    assert daemon.ask("known-good")[0] == 404


class Guarded:
    """A run that is guarded within this process: passes are made when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.run, self.alive = watched(folder, Settings(settle=0.0, keep="none")), True
        self.served = served([self.run], alive=lambda: self.alive)
        self.loop = self.served.loop
        self.application = application(routes(self.served), admit_owner)

    def make_pass(self) -> None:
        """One pass."""
        assert self.run.step(PLAIN) is not None

    def ask(self, query: str = "", **scope: object) -> Any:
        """The answer."""
        path = f"/v1/runs/{self.run.run_id}/known-good?{query}"
        return asyncio.run(answer_of(self.application, path, **scope)).document


@pytest.fixture
def guarded(run: Path) -> Guarded:
    """A run with one good checkpoint, after a pass."""
    save(run, 500)
    found = Guarded(run)
    found.make_pass()
    return found


@pytest.fixture
def looked_through(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """How often the run was looked through for what is pending: the checkpoints that could be newer."""
    found: list[list[str]] = []
    real = run_routes.undecided

    def look(history: Any, checkpoints: Any) -> Any:
        found.append([c.path for c in checkpoints])
        return real(history, checkpoints)

    monkeypatch.setattr(run_routes, "undecided", look)
    return found


@pytest.fixture
def time_passes_by_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an answer, time passes while it waits for a pass, and at once."""
    now = 0.0

    async def wait(passed: asyncio.Event, seconds: float) -> bool:
        nonlocal now
        now += seconds
        return False

    monkeypatch.setattr(run_routes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Waiters, "wait", staticmethod(wait))


def test_names_are_listed_for_every_question(guarded: Guarded) -> None:
    """A question costs one listing of names, and nothing is remembered for the next."""
    with counted() as counts:
        assert [guarded.ask()["id"] for _ in range(3)] == ["500.1"] * 3
    assert counts["names"] == 3


def test_pending_is_what_the_last_pass_left(guarded: Guarded, run: Path, looked_through: list[list[str]]) -> None:
    """Without waiting the run is not looked through again, unless something hints at a change."""
    path = run / "net-600.safetensors"
    path.write_bytes(b"\x10" + bytes(7))  # a save that goes on
    guarded.make_pass()
    assert guarded.ask()["pending"] == ["net-600.safetensors"]
    assert guarded.ask("before_step=600")["pending"] == []
    path.rename(run / "net-700.safetensors")
    assert guarded.ask()["pending"] == ["net-600.safetensors"]
    assert looked_through == []
    guarded.loop.wake(guarded.run.run_id)
    assert guarded.ask()["pending"] == ["net-700.safetensors"]
    assert looked_through == [["net-700.safetensors"]]


@pytest.mark.usefixtures("time_passes_by_waiting")
def test_whoever_waits_is_told_what_is_there_now(guarded: Guarded, run: Path, looked_through: list[list[str]]) -> None:
    """With `wait_seconds` the run is looked through, whatever the last pass left: above what is known-good already."""
    (run / "net-600.safetensors").write_bytes(b"\x10" + bytes(7))
    assert guarded.ask()["pending"] == []
    answer = guarded.ask("wait_seconds=10")
    assert (answer["id"], answer["waited"], answer["pending"]) == ("500.1", True, ["net-600.safetensors"])
    assert looked_through
    assert all(asked == ["net-600.safetensors"] for asked in looked_through)


@pytest.mark.usefixtures("time_passes_by_waiting")
def test_who_is_locked_out_meanwhile_learns_nothing(guarded: Guarded, run: Path) -> None:
    """A token that ends while its question waits gets no answer."""
    (run / "net-600.safetensors").write_bytes(b"\x10" + bytes(7))
    assert guarded.ask("wait_seconds=10", still_in=lambda: True)["id"] == "500.1"
    refused = guarded.ask("wait_seconds=10", still_in=lambda: False)
    assert refused["error"]["kind"] == "unauthorized"


def test_a_verdict_while_it_is_looked_through(guarded: Guarded, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gets its verdict meanwhile is the answer, and what loses it is looked behind."""
    real = run_routes.undecided
    changes: list[Callable[[], None]] = [lambda: make_suspect(run, 500), lambda: None]

    def look(history: Any, checkpoints: Any) -> Any:
        changes.pop(0)()
        return real(history, checkpoints)

    save(run, 400)
    guarded.make_pass()
    (run / "net-450.safetensors").write_bytes(b"\x10" + bytes(7))
    monkeypatch.setattr(run_routes, "undecided", look)
    answer = guarded.ask("wait_seconds=1e-9")
    assert (answer["id"], answer["pending"]) == ("400.1", ["net-450.safetensors"])
    assert changes == []


@pytest.mark.parametrize("why", ["no pass yet", "the last pass failed", "the loop has ended"])
def test_without_a_pass_to_go_by(guarded: Guarded, run: Path, looked_through: list[list[str]], why: str) -> None:
    """Then the run is looked through."""
    if why == "no pass yet":
        guarded = Guarded(run)
    elif why == "the last pass failed":
        run.rename(run.with_name("away"))
        assert guarded.run.step(PLAIN) is None
        run.with_name("away").rename(run)
    else:
        guarded.alive = False
    assert guarded.ask()["id"] == "500.1"
    assert looked_through == [[]]


@pytest.mark.parametrize("damaged", [False, True])
def test_what_something_happened_to_is_read_before_it_is_named(guarded: Guarded, run: Path, damaged: bool) -> None:
    """Until then nothing is said of it, neither that it is good nor that there is none."""
    path = run / "net-500.safetensors"
    before, data = path.stat(), bytearray(path.read_bytes())
    if damaged:
        data[-1] ^= 0x10
        with path.open("r+b") as file:
            file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert guarded.ask()["error"]["kind"] == "could_not_tell"
    guarded.make_pass()
    answer = guarded.ask()
    assert (answer["error"]["kind"] == "no_known_good") if damaged else (answer["id"] == "500.1")


def test_the_loop_says_what_it_has_not_seen() -> None:
    """A hint counts until the pass after it has ended; one that comes meanwhile, until the next has."""
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def step(*_: object) -> None:
        begun.release()
        assert go_on.acquire(timeout=PATIENCE)
        one.due = float("inf")

    one: Any = SimpleNamespace(run_id="one", due=0.0, step=step, settings=Settings(), storage="")
    stop, after = threading.Event(), threading.Semaphore(0)
    loop = Loop(RunSet([one]), stop, lambda run: after.release())
    thread = threading.Thread(target=loop.run)
    assert loop.has_seen_all("one")
    thread.start()
    assert begun.acquire(timeout=PATIENCE)
    assert not loop.has_seen_all("one")
    loop.wake("one")
    go_on.release()
    assert after.acquire(timeout=PATIENCE)
    assert not loop.has_seen_all("one")
    assert begun.acquire(timeout=PATIENCE)
    go_on.release()
    assert after.acquire(timeout=PATIENCE)
    assert loop.has_seen_all("one")
    stop.set()
    loop.wake()
    thread.join(timeout=PATIENCE)
    assert not thread.is_alive()

"""A place of a fleet that hangs holds up no other place, is told once, and is searched on when it answers again."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon import run_set as run_set_module
from ckptguard_daemon.log import log
from ckptguard_daemon.plan import DaemonPlan
from ckptguard_daemon.run_set import RunDiscovery, RunSet
from support.daemon_process import PATIENCE, save, until

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.fleet import Discovery, FleetRun, find_runs, read_fleet
from ckptguard.fleet.search import RunSearch
from ckptguard.reporting.notify import Hooks, HookSets
from ckptguard.values.ids import run_id_of
from ckptguard.values.settings import Settings

finding = importlib.import_module("ckptguard.fleet.find_runs")  # the package has a function of this name


class Mounts:
    """Two places of a fleet with a run each. A search of the second one hangs while `dead` is set."""

    def __init__(self, folder: Path) -> None:
        for name in ("well", "ill"):
            (folder / name / "run").mkdir(parents=True)
            save(folder / name / "run", 1)
        self.file = folder / "fleet.toml"
        self.file.write_text(f'folders = ["{folder}/well", "{folder}/ill"]')
        self.names = {str(folder / name / "run"): name for name in ("well", "ill")}
        self.dead, self.alive = False, threading.Event()
        self.searches = 0

    def hang(self) -> None:
        """Hang from now on."""
        self.dead = True
        self.alive.clear()

    def revive(self) -> None:
        """Answer again, also who hangs."""
        self.dead = False
        self.alive.set()


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mounts]:
    """Both answer. Nobody hangs after the test."""
    made = Mounts(tmp_path)
    honest = RunSearch.find

    def find(search: RunSearch) -> list[str]:
        if search._root.endswith("/ill"):
            made.searches += 1
            if made.dead:
                assert made.alive.wait(PATIENCE)
        return honest(search)

    monkeypatch.setattr(RunSearch, "find", find)
    yield made
    made.revive()


@pytest.mark.parametrize("known", [False, True])
def test_the_others_are_found(mounts: Mounts, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """What was found in a place before it hung stays. It is searched once, however often others are."""
    late = threading.Event()
    discovery = Discovery(read_fleet(str(mounts.file), Settings()), late.set)

    def names() -> set[str]:
        return {mounts.names[run.url] for run in discovery.find(0.01).runs}

    if known:
        assert len(discovery.find().runs) == 2
    before = mounts.searches
    mounts.hang()
    expected = {"well", "ill"} if known else {"well"}
    until(lambda: names() == expected and mounts.searches > before, "the others")
    fleet = discovery.find(0.01)
    assert (fleet.troubles, len(fleet.searching)) == ((), 1)
    assert not [folder for folder in discovery.folders if "/ill" in folder]
    monkeypatch.setattr(finding, "_OVERDUE", 0.0)
    for _ in range(3):
        fleet = discovery.find(0.01)
        [trouble] = fleet.troubles
        assert trouble.endswith("/ill does not answer: its runs are as they were before")
        assert fleet.searching == ()
    assert mounts.searches == before + 1
    late.clear()
    mounts.revive()
    assert late.wait(PATIENCE)
    fleet = discovery.find()
    assert (len(fleet.runs), fleet.troubles, fleet.searching) == (2, (), ())
    assert mounts.searches == before + 1  # what came late counts
    assert find_runs(str(mounts.file), Settings()).runs == fleet.runs


def test_the_daemon_goes_on_and_says_so_once(mounts: Mounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs elsewhere are guarded. It counts as ready when it is clear that the place does not answer."""
    told: list[object] = []
    monkeypatch.setattr(run_set_module, "log", lambda event, **fields: told.append((event, fields.get("reason"))))
    monkeypatch.setattr(run_set_module, "_TIMEOUT", 0.01)
    run_set, hooks = RunSet(), HookSets(log)

    def make(found: FleetRun) -> WatchedRun:
        return WatchedRun(found.url, run_id_of(found.url), found.settings, hooks.of(found.settings), None)

    settings = Settings(scan_interval=0.1)
    plan = DaemonPlan(urls=(), settings=settings, fleet=read_fleet(str(mounts.file), settings))
    mounts.hang()
    stop, looks = threading.Event(), threading.Semaphore(0)
    following = RunDiscovery(plan, run_set, make, lambda run, found: None, looked=looks.release)
    thread = threading.Thread(target=following.run, args=(stop,))
    thread.start()
    try:
        until(lambda: [mounts.names[run.url] for run in run_set] == ["well"], "the run that can be found")
        assert not following.has_looked
        monkeypatch.setattr(finding, "_OVERDUE", 0.0)
        until(lambda: following.has_looked, "the end of the search")
        while looks.acquire(blocking=False):
            continue
        for _ in range(3):
            following.wake()
            assert looks.acquire(timeout=PATIENCE)
        assert [event for event, _ in told] == ["fleet_trouble"]
        mounts.revive()
        until(lambda: len(list(run_set)) == 2, "the other run")
    finally:
        stop.set()
        following.wake()
        thread.join(PATIENCE)


def test_hooks_that_no_run_has_any_more_end(tmp_path: Path) -> None:
    """After what they still have to tell. Those of other runs stay."""
    told = tmp_path / "told"
    sets = HookSets(log)
    gone, kept = (Settings(on_incident=("sh", "-c", f"cat > {told}-{name}")) for name in ("gone", "kept"))
    hooks: dict[str, Hooks] = {"gone": sets.of(gone), "kept": sets.of(kept)}
    hooks["gone"].tell(None, {"event": "test", "id": "1"})
    sets.keep_only([kept])
    until(lambda: hooks["gone"].has_ended, "their end")
    assert Path(f"{told}-gone").read_text()
    assert not hooks["kept"].has_ended
    assert sets.of(kept) is hooks["kept"]
    assert sets.of(gone) is not hooks["gone"]
    sets.close(timeout=PATIENCE)

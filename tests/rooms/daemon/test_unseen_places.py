"""Places that nobody can look at: runs that were ever guarded keep their series, and the search says what is wrong."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.metrics import DaemonFacts, exposition
from ckptguard_daemon.plan import DaemonPlan
from ckptguard_daemon.run_set import RunDiscovery, RunSet
from fsspec.implementations.memory import MemoryFileSystem
from support.tiny_run import inline, save
from support.unreadable import closed

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.engine import watched_run
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.fleet import read_fleet
from ckptguard.fleet.search import CAUSES
from ckptguard.reporting.notify import Hooks
from ckptguard.runs.work import Work
from ckptguard.values.ids import run_id_of
from ckptguard.values.settings import Settings

SETTINGS = Settings(settle=0.0, scan_interval=0.001, keep="copy", workers=1)
NAMES = ("a", "b")


class Daemon:
    """As much of a daemon as finds runs, makes passes and is scraped. Another one is the same after a restart."""

    def __init__(self, place: str, memory: Path) -> None:
        self.feed, self.runs = CatalogueFeed(Catalogue(str(memory))), RunSet()
        file = memory.with_name("fleet.toml")
        file.write_text(f"folders = {json.dumps([place])}")
        plan = DaemonPlan(urls=(), settings=SETTINGS, fleet=read_fleet(str(file), SETTINGS))
        hooks = Hooks(SETTINGS, lambda *args, **fields: None)
        self.following = RunDiscovery(
            plan,
            self.runs,
            lambda found: WatchedRun(found.url, run_id_of(found.url), found.settings, hooks, None, self.feed),
            lambda run, found: None,
            looked=lambda: self.feed.keep_only(run.run_id for run in self.runs),
            catalogue=self.feed.catalogue,
        )

    def turn(self, times: int = 5) -> None:
        """Search, and make passes."""
        for _ in range(times):
            self.following.look()
            for run in self.runs:
                run.step(Work(scanner=inline))

    def states(self) -> dict[str, str]:
        """The state of each run, by its name."""
        return {run.url.rpartition("/")[2]: run.state for run in self.runs}

    def series(self, name: str) -> dict[str, float]:
        """The series of a metric, by the last part of the run, or by the cause."""
        facts = DaemonFacts(loop_at=0.0, places=tuple(self.following.places))
        text = exposition([self.feed.summary(run) for run in self.runs], facts, 0.0).decode()
        found = re.findall(rf'^ckptguard_{name}{{(?:place="[^"]*")?,?\w*=?"?([^"}}]*)"?}} (\S+)$', text, re.MULTILINE)
        return {label.rpartition("/")[2]: float(value) for label, value in found}

    def check(self, guarded: tuple[str, ...], state: str, cause: str, *, seen: bool) -> None:
        """What must be said of the runs and of the place."""
        assert self.states() == dict.fromkeys(guarded, state)
        assert self.series("failing") == dict.fromkeys(guarded, float(state == "failing"))
        assert set(self.series("protected")) == set(guarded)
        assert self.series("search_failing") == {one: float(one == cause) for one in CAUSES}
        since = self.series("search_failing_since_timestamp_seconds")
        assert len(since) == bool(cause)
        assert [place.seen for place in self.following.places] == [seen]


@contextlib.contextmanager
def shut_place(place: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder around the runs is closed."""
    with closed(place):
        yield


@contextlib.contextmanager
def shut_runs(place: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each run is closed."""
    with closed(*(place / name for name in NAMES)):
        yield


@contextlib.contextmanager
def no_mount(place: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The place is not mounted, and its folder is missing, too."""
    aside = place.rename(place.with_name("aside"))
    with patch.context() as away:
        away.setattr(watched_run, "mount_of", lambda path: ("/", ""))
        away.setattr(WatchedRun, "_device_now", lambda run: -1)
        yield
    aside.rename(place)


@contextlib.contextmanager
def empty_mount(place: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The place is not mounted, and its mount point is an empty folder."""
    with no_mount(place, patch):
        place.mkdir()
        yield
        place.rmdir()


@contextlib.contextmanager
def bad_key(place: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store refuses all requests."""

    def refuse(*args: Any, **named: Any) -> Any:
        raise PermissionError("InvalidAccessKeyId")

    with patch.context() as refusing:
        for name in ("ls", "find", "info", "_open", "cat_file", "pipe_file"):
            refusing.setattr(MemoryFileSystem, name, refuse)
        yield


Kind = Callable[[Path, pytest.MonkeyPatch], contextlib.AbstractContextManager[None]]
# Of each kind: its cause, and whether the place itself is seen by a daemon that starts then.
KINDS: dict[Kind, tuple[str, bool]] = {
    shut_place: ("permission", False),
    shut_runs: ("permission", True),
    no_mount: ("missing", False),
    empty_mount: ("", True),
    bad_key: ("credentials", False),
}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def unseen(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Kind, str, Path]]:
    """A way to make a place unseen, and a place with two runs: by its URL, and by its path."""
    place = tmp_path / "mnt" / "runs"
    place.mkdir(parents=True)
    url = "memory://unseen-places" if request.param is bad_key else str(place)
    for number, name in enumerate(NAMES, 1):
        save(f"{url}/{name}", 100, number)
    mount = str(place)
    monkeypatch.setattr(watched_run, "mount_of", lambda path: (mount, "ext4"))
    yield request.param, url, place
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("when", ["before the start", "while it runs", "over a restart", "over two restarts"])
def test_what_was_guarded_keeps_its_series(
    unseen: tuple[Kind, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """By the model: all runs are failing then, none before the first search that found them, and all are guarded once
    they can be seen."""
    kind, url, place = unseen
    cause, seen = KINDS[kind]
    if (kind, when) == (shut_runs, "while it runs"):
        cause = ""  # nobody has to look into the folder of a run that is known
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    daemon = Daemon(url, memory)
    if when != "before the start":
        daemon.turn()
        daemon.check(NAMES, "guarded", "", seen=True)
        assert daemon.series("protected") == dict.fromkeys(NAMES, 1.0)
    with kind(place, monkeypatch):
        for _ in range({"over a restart": 1, "over two restarts": 2}.get(when, 0)):
            daemon = Daemon(url, memory)
            assert set(daemon.states()) == set(NAMES)  # at once
        for _ in range(4):
            daemon.turn()
            guarded = () if when == "before the start" else NAMES
            daemon.check(guarded, "failing", cause, seen=seen or when == "while it runs")
            assert daemon.series("protected") == dict.fromkeys(guarded, 0.0)
    daemon.turn()
    daemon.check(NAMES, "guarded", "", seen=True)
    assert daemon.series("protected") == dict.fromkeys(NAMES, 1.0)


def test_what_was_removed_meanwhile_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose folder is gone from a place that can be searched has no series any more, and none after that."""
    place, memory = tmp_path / "runs", tmp_path / "memory"
    memory.mkdir(mode=0o700)
    for number, name in enumerate(NAMES, 1):
        save(f"{place}/{name}", 100, number)
    daemon = Daemon(str(place), memory)
    daemon.turn()
    assert set(daemon.states()) == set(NAMES)
    shutil.rmtree(place / "a")
    for _ in range(2):
        daemon = Daemon(str(place), memory)
        daemon.turn(20)
        daemon.check(("b",), "guarded", "", seen=True)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'[["/x"]]', b"\xff"])
def test_a_damaged_memory_is_none(tmp_path: Path, damage: bytes) -> None:
    """The search finds the runs, as without one."""
    place, memory = tmp_path / "runs", tmp_path / "memory"
    memory.mkdir(mode=0o700)
    save(f"{place}/a", 100, 1)
    Daemon(str(place), memory).turn()
    [file] = memory.glob("*.runs")
    file.write_bytes(damage)
    daemon = Daemon(str(place), memory)
    assert daemon.states() == {}
    daemon.turn()
    daemon.check(("a",), "guarded", "", seen=True)


def test_what_a_new_plan_guards_is_remembered_too(tmp_path: Path) -> None:
    """A reload with more places and the same runs, then a restart while nobody can look at them."""
    place, memory = tmp_path / "place", tmp_path / "memory"
    memory.mkdir(mode=0o700)
    save(str(place / "a"), 100, 1)
    daemon = Daemon(str(place), memory)
    daemon.turn()
    wider = tmp_path / "wider.toml"
    (tmp_path / "more").mkdir()
    wider.write_text(f"folders = {json.dumps([str(place), str(tmp_path / 'more')])}")
    plan = DaemonPlan(urls=(), settings=SETTINGS, fleet=read_fleet(str(wider), SETTINGS))
    daemon.following.reload(lambda: plan)
    daemon.turn()
    known = Catalogue(str(memory)).remembered_runs(daemon.following._plan_name)
    assert [run.url for run in known] == [str(place / "a")]

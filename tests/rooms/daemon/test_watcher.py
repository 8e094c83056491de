"""Hints of change: which come, and what happens without."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon_process import save, until

from ckptguard.engine import watcher as watcher_module
from ckptguard.engine.watcher import Watcher
from ckptguard.storage.local import inotify
from ckptguard.storage.local.inotify import FileEvent, Inotify


class Watching:
    """A watcher whose hints are counted, and all changes that it reads."""

    def __init__(self) -> None:
        self.hints: queue.Queue[str] = queue.Queue()
        self.logged: list[tuple[str, dict[str, object]]] = []
        self.watcher = Watcher(self.hints.put, lambda event, /, **fields: self.logged.append((event, fields)))

    def hint(self) -> str:
        """The next hint, once it comes."""
        return self.hints.get(timeout=100)

    def no_more_hints(self, folder: Path) -> bool:
        """True if nothing hints at what was done before now. Changes come in their order."""
        mark = folder / f"mark-{os.urandom(4).hex()}"
        self.watcher.watch(str(folder), "mark")
        mark.touch()
        found = set()
        while (hint := self.hint()) != "mark":
            found.add(hint)
        self.watcher.forget("mark")
        return not found


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """A watcher that ends with the test, on a disk of this machine."""
    monkeypatch.setattr(watcher_module, "_is_own_disk", lambda path: True)
    one = Watching()
    yield one
    one.watcher.close()


def test_a_save_is_hinted_at_wherever_it_lies(run: Path, watching: Watching) -> None:
    """A finished save is hinted at, in a folder that was there, in a new one, and in one that was moved there."""
    (run / "checkpoints").mkdir()
    watching.watcher.watch(str(run), "run")
    save(run, 1)
    assert watching.hint() == "run"
    save(run / "checkpoints", 2)
    assert watching.hint() == "run"
    (run / "a" / "b").mkdir(parents=True)
    assert watching.hint() == "run"
    until(lambda: len(watching.watcher._paths) == 4, "a watch of the new folders")
    save(run / "a" / "b", 3)
    assert watching.hint() == "run"
    (run / "a").rename(run / "c")
    assert watching.hint() == "run"
    until(lambda: str(run / "c" / "b") in {path for path, _ in watching.watcher._paths.values()}, "the new name")
    watching.watcher.settle("run")
    save(run / "c" / "b", 4)
    until(lambda: not watching.watcher.rests("run"), "the change")


def test_our_own_doings_are_no_hints(run: Path, watching: Watching, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Reading checkpoints and writing records is no hint, but the run does not rest either. A trainer's seal is one,
    and so is an incident."""
    records, aside = run / "_ckptguard", tmp_path_factory.mktemp("aside")
    (records / "manifests" / "step-#").mkdir(parents=True)
    (records / "ledger").mkdir()
    (records / "lock").touch()
    path = save(run, 1)
    watching.watcher.watch(str(run), "run")
    watching.watcher.settle("run")
    path.read_bytes()
    (records / "lock").open("r+b").close()
    assert watching.no_more_hints(aside)
    assert watching.watcher.rests("run")
    (records / "ledger" / "x.json").write_text("{}")
    (records / "daemon.json").write_text("{}")
    assert watching.no_more_hints(aside)
    assert not watching.watcher.rests("run")
    for name in ("manifests/step-#/000000000001.1.json", "incidents/20270131T120000-01234567.json"):
        (records / name).parent.mkdir(exist_ok=True)
        assert watching.no_more_hints(aside)
        (records / name).write_text("{}")
        assert watching.hint() == "run"
        until(lambda: watching.no_more_hints(aside), "the end of its hints")


@pytest.mark.parametrize("later", [False, True])
def test_a_folder_that_may_not_be_read_ends_no_watch(
    run: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """The rest of the run is watched. But nobody knows that nothing changed, so the run does not rest."""
    honest = Inotify.add

    def refusing(reader: Inotify, path: str) -> int:
        if "closed" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return honest(reader, path)

    monkeypatch.setattr(Inotify, "add", refusing)
    if not later:
        (run / "closed").mkdir()
    watching.watcher.watch(str(run), "run")
    if later:
        (run / "closed").mkdir()
        assert watching.hint() == "run"
    watching.watcher.settle("run")
    assert not watching.watcher.rests("run")
    save(run, 1)
    assert watching.hint() == "run"


def instances_open() -> int:
    """How many inotify instances this process has."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(descriptor) == "anon_inode:inotify"
    return found


UNREAD = """
import os, sys
from ckptguard.storage.local.inotify import Inotify
unread = Inotify()
unread.add(sys.argv[1])
unread.end()
names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
assert not [name for name in names if "inotify" in name], names
"""


def test_an_instance_that_nobody_read_is_freed(tmp_path: Path) -> None:
    """Also one that could watch nothing."""
    subprocess.run([sys.executable, "-c", UNREAD, str(tmp_path)], check=True)


def test_one_descriptor_serves_many_runs(tmp_path: Path, watching: Watching) -> None:
    """However many runs there are, they take one instance of inotify and one thread, and each has its own hints."""
    before, instances = threading.active_count(), instances_open()
    for number in range(200):
        (tmp_path / f"run{number}" / "checkpoint-1").mkdir(parents=True)
        watching.watcher.watch(str(tmp_path / f"run{number}"), f"run{number}")
    assert instances_open() <= instances + 1
    assert threading.active_count() <= before + 1
    for number in (7, 150):
        save(tmp_path / f"run{number}" / "checkpoint-1", 1)
        while watching.hint() != f"run{number}":
            continue  # one save may be several hints
    watching.watcher.forget("run7")
    assert len(watching.watcher._paths) == 2 * 199


def test_a_new_folder_under_the_name_is_watched(run: Path, watching: Watching) -> None:
    """When the run's folder is removed and made again, or replaced, the new one is watched."""
    watching.watcher.watch(str(run), "run")
    run.rename(run.with_name("old"))
    watching.watcher.watch(str(run), "run")
    assert not watching.watcher._paths
    run.mkdir()
    watching.watcher.watch(str(run), "run")
    while not watching.hints.empty():
        watching.hint()
    save(run, 1)
    assert watching.hint() == "run"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EPERM])
@pytest.mark.parametrize("where", ["__init__", "add"])
def test_without_watches_the_timer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    """Out of watches or instances, the daemon says so once for all its runs, what is whole stays unknown, and later it
    tries again."""

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Inotify, where, full)
    watching = Watching()
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        watching.watcher.watch(str(tmp_path / name), name)
        watching.watcher.settle(name)
        assert not watching.watcher.rests(name)
    assert len(watching.logged) == 1
    assert ("sysctl" in str(watching.logged)) == (number != errno.EPERM)
    monkeypatch.undo()
    watching.watcher.watch(str(tmp_path / "a"), "a")  # not yet
    assert not watching.watcher._paths
    monkeypatch.setattr(watcher_module, "_AGAIN", 0.0)
    watching.watcher.watch(str(tmp_path / "a"), "a")
    save(tmp_path / "a", 1)
    assert watching.hint() == "a"
    watching.watcher.close()


def test_it_leaves_half_of_the_watches_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One daemon never takes all watches of its user. A run that does not fit is looked at by the timer alone."""
    monkeypatch.setattr(inotify, "fair_share", lambda: 10)
    watching = Watching()
    for name, folders in (("small", 3), ("large", 20), ("other", 3)):
        for number in range(folders):
            (tmp_path / name / str(number)).mkdir(parents=True)
        watching.watcher.watch(str(tmp_path / name), name)
    assert [event for event, _ in watching.logged] == ["watching_by_timer_only"]
    assert len(watching.watcher._paths) == 8
    save(tmp_path / "other" / "1", 1)
    assert watching.hint() == "other"
    watching.watcher.close()


LIMITED = """
import resource, sys
from pathlib import Path
import ckptguard.engine.watcher as module
events = []
watcher = module.Watcher(print, lambda event, /, **fields: events.append((event, fields["reason"])))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
for run in ("a", "b"):
    watcher.watch(f"{sys.argv[1]}/{run}", run)
assert len(events) == 1 and "sysctl" in events[0][1], events
"""


def test_a_real_limit_of_the_system(tmp_path: Path) -> None:
    """The same where the kernel itself says no, to a process that may not open more."""
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_lost_changes_touch_everything(run: Path, watching: Watching) -> None:
    """When the kernel's queue overflows, every run may have changed, and none rests."""
    watching.watcher.watch(str(run), "run")
    watching.watcher.settle("run")
    assert set(watching.watcher._keys_of(FileEvent(-1, inotify.OVERFLOW, ""))) == {"run"}
    assert not watching.watcher.rests("run")


def test_nothing_rests_on_anothers_disk(run: Path, monkeypatch: pytest.MonkeyPatch, watching: Watching) -> None:
    """On a network file system other machines change files unseen, so silence there means nothing."""
    monkeypatch.undo()
    monkeypatch.setattr(watcher_module, "_OWN_DISKS", frozenset({"nothing"}))
    watching.watcher.watch(str(run), "run")
    watching.watcher.settle("run")
    assert not watching.watcher.rests("run")
    save(run, 1)
    assert watching.hint() == "run"


def test_a_run_that_is_named_by_a_link_is_watched(run: Path, watching: Watching) -> None:
    """The user's own link to a run hides no save: the run is watched, and does not rest."""
    link = run.with_name("latest")
    link.symlink_to(run)
    watching.watcher.watch(str(link), "run")
    watching.watcher.settle("run")
    save(run, 1)
    assert watching.hint() == "run"
    assert not watching.watcher.rests("run")


def test_nothing_rests_above_another_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mounted below a run may be a disk of another machine."""

    class Any:
        def __contains__(self, kind: str) -> bool:
            return True

    monkeypatch.setattr(watcher_module, "_OWN_DISKS", Any())
    assert watcher_module._is_own_disk("/proc/self")
    assert not watcher_module._is_own_disk("/")

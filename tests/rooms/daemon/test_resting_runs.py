"""A run in which nothing changed for certain costs no listing, and one in which anything may have changed is listed."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from ckptguard_daemon.log import log
from support.daemon_process import save
from support.faults import flip
from support.served_runs import of_this_process, watched

from ckptguard.engine import watcher as watcher_module
from ckptguard.engine.watcher import Watcher
from ckptguard.records.daemon_record import write_daemon_record
from ckptguard.records.run import open_run, write_once
from ckptguard.records.silences import silence_run
from ckptguard.runs.work import PLAIN
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.values.settings import Settings

SETTINGS = Settings(settle=0.0, keep="none")


class Resting:
    """A guarded run with two good saves and a real watcher, whose passes the test makes, and which has come to rest."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.listings: list[str] = []
        self.hints: queue.Queue[str] = queue.Queue()
        self.watcher = Watcher(self.hints.put, log)
        self.run = watched(folder, SETTINGS)
        self.run.watcher = self.watcher
        monkeypatch.setattr(watcher_module, "_is_own_disk", lambda path: True)
        honest = LocalStorage._walk

        def counting(storage: LocalStorage, prefix: str, **options: object) -> object:
            self.listings.append(prefix)
            return honest(storage, prefix, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalStorage, "_walk", counting)
        save(folder, 1)
        save(folder, 2)
        self.watcher.watch(str(folder), self.run.run_id)
        while self.lists():  # until its own records are written, and their changes are read
            self.read_changes()

    def lists(self) -> bool:
        """Make a pass. True if it listed anything."""
        self.listings.clear()
        assert self.run.step(PLAIN) is not None
        return bool(self.listings)

    def read_changes(self) -> None:
        """Wait until the watcher has read what was done before now: changes come in their order."""
        aside = self.folder.with_name("aside")
        aside.mkdir(exist_ok=True)
        self.watcher.watch(str(aside), "mark")
        (aside / os.urandom(4).hex()).touch()
        while self.hints.get(timeout=100) != "mark":
            continue
        self.watcher.forget("mark")


@pytest.fixture
def resting(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resting]:
    """A run at rest."""
    one = Resting(run, monkeypatch)
    yield one
    one.watcher.close()


def overwrite_in_place(run: Path) -> None:
    """What `torch.save` does to a fixed name: the folder does not change."""
    path = run / "net-2.safetensors"
    path.write_bytes(path.read_bytes())


CHANGES: dict[str, Callable[[Path], object]] = {
    "a new save": lambda run: save(run, 3),
    "a save in a new folder": lambda run: ((run / "a" / "b").mkdir(parents=True), save(run / "a" / "b", 3)),
    "a save written over in place": overwrite_in_place,
    "a flipped bit": lambda run: flip(run / "net-1.safetensors"),
    "another time": lambda run: os.utime(run / "net-1.safetensors", (1, 1)),
    "a removed save": lambda run: (run / "net-1.safetensors").unlink(),
    "a renamed save": lambda run: (run / "net-1.safetensors").rename(run / "net-7.safetensors"),
    "a record of another process": lambda run: write_once(open_run(str(run)), "pins/x.json"),
    "a silence": lambda run: silence_run(open_run(str(run)), time.time() + 60.0, reason="", by="me"),
    "a record that is gone": lambda run: next((run / "_ckptguard" / "ledger").rglob("*.json")).unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_any_change_ends_a_rest(resting: Resting, change: Callable[[Path], object]) -> None:
    """A pass over a run at rest lists nothing. After any change of its files or of its records' names, one lists."""
    assert not resting.lists()
    change(resting.folder)
    resting.read_changes()
    assert resting.lists()


def test_what_is_asked_for_ends_a_rest(resting: Resting) -> None:
    """So do a checkpoint that is to be read again, other settings, and work that is due by the clock."""
    assert not resting.lists()
    resting.run.ask("net-1.safetensors")
    assert resting.lists()
    resting.run.take("run", SETTINGS.changed(keep_good=5), resting.run.hooks)
    assert resting.lists()
    resting.run.repair_soon()
    assert resting.lists()


def test_what_waits_for_its_verdict_ends_a_rest(resting: Resting) -> None:
    """A save that is not finished yet is looked at again, although nothing changes."""
    resting.run.take("run", SETTINGS.changed(settle=1000.0), resting.run.hooks)
    save(resting.folder, 3, age=0.0)
    resting.read_changes()
    assert all(resting.lists() for _ in range(3))
    assert [one.path for one in resting.run.last_pass.pending] == ["net-3.safetensors"]


def test_nobody_rests_where_others_write_unseen(resting: Resting, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system silence means nothing; nor does it without a watch."""
    monkeypatch.setattr(watcher_module, "_is_own_disk", lambda path: False)
    resting.watcher.forget(resting.run.run_id)
    assert resting.lists()
    resting.watcher.watch(str(resting.folder), resting.run.run_id)
    assert all(resting.lists() for _ in range(3))


def test_nobody_rests_whose_records_are_elsewhere(resting: Resting, tmp_path: Path) -> None:
    """Other processes write records there, which nobody watches."""
    resting.run.take("run", SETTINGS.changed(records=str(tmp_path / "records")), resting.run.hooks)
    assert all(resting.lists() for _ in range(4))


def test_a_scrub_that_ends_late_brings_back_no_old_settings(resting: Resting) -> None:
    """New settings come while a scrub works by the old ones. What it notes then changes nothing."""
    run, old = resting.run, resting.run.scrub
    assert old is not None
    run.take("run", SETTINGS.changed(scrub_every="3d"), run.hooks)
    new = run.scrub
    assert new is not None
    assert new.every != old.every
    run.note_scrub(old)
    assert run.scrub is new
    run.take("run", SETTINGS.changed(scrub_every=0), run.hooks)
    run.note_scrub(new)
    assert run.scrub is None


def test_an_unchanged_run_that_nobody_watches_costs_two_listings(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each pass opens it again. A new save has all of it looked at."""
    guarded = watched(run, SETTINGS)
    listings: list[str] = []
    honest = LocalStorage._walk

    def counting(storage: LocalStorage, prefix: str, **options: object) -> object:
        listings.append(os.path.join(os.path.basename(storage.url), prefix))
        return honest(storage, prefix, **options)  # type: ignore[arg-type]

    save(run, 1)
    for _ in range(3):  # until its own records are written
        guarded.step(PLAIN)
    monkeypatch.setattr(LocalStorage, "_walk", counting)
    assert guarded.step(PLAIN) is not None
    assert listings == ["_ckptguard/", "run/"]
    save(run, 2)
    assert guarded.step(PLAIN) is not None
    assert len(listings) > 4
    assert guarded.verdicts == 2


def test_a_run_that_is_not_opened_again_is_still_seen_to_change(run: Path) -> None:
    """Another format of its records, another daemon, and another folder under its name are noticed at the next look."""
    own = of_this_process("/own")
    guarded = watched(run, SETTINGS, presence=own)
    save(run, 1)
    for _ in range(3):
        assert guarded.step(PLAIN) is not None
    opened = guarded.run
    assert guarded.step(PLAIN) is not None
    assert guarded.run is opened

    write_daemon_record(open_run(str(run)), msgspec.structs.replace(own, address="/other"))
    guarded.yields = True
    assert guarded.step(PLAIN) is not None
    assert not guarded.guards
    write_daemon_record(open_run(str(run)), own)
    assert guarded.step(PLAIN) is not None
    assert guarded.guards

    known = run / "_ckptguard" / "format.json"
    before = known.read_bytes()
    known.write_text('{"format": 99}')
    assert guarded.step(PLAIN) is None
    assert guarded.state == "failing"
    known.write_bytes(before)
    assert guarded.step(PLAIN) is not None

    run.rename(run.with_name("moved"))
    assert guarded.step(PLAIN) is None
    assert guarded.state == "ended"
    run.with_name("moved").rename(run)
    assert guarded.step(PLAIN) is not None
    assert guarded.state == "guarded"

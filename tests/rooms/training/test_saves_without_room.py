"""A disk without room for the next save: an error before a byte is written, or a wait that training does not feel."""

import os
import threading
import types

import pytest
import torch
from support.guards import guard_of

import ckptguard
from ckptguard.errors import StorageFullError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.runs import free_space
from ckptguard.values.settings import Settings


class Disk:
    """Says how much is free, and when somebody has waited for more."""

    def __init__(self, monkeypatch):
        self.free = 10**15
        self.asked = threading.Event()
        monkeypatch.setattr(os, "statvfs", self.statvfs)
        monkeypatch.setattr(free_space, "_TICK", 0.01)

    def statvfs(self, place):
        if self.free < 10**6:
            self.asked.set()
        return types.SimpleNamespace(f_bavail=self.free, f_frsize=1)


WAITS = Settings(settle=0.0, on_full="wait")


@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch, blocking):
    """By default it is an error with the numbers; nothing is left, nothing was set aside, and the good one restores."""
    disk = Disk(monkeypatch)
    guard = guard_of(tmp_path / "run")
    guard.save(step=10)
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    disk.free = 1000

    def save():
        guard.save(step=10, blocking=blocking)
        guard.wait_for_save()

    with pytest.raises(StorageFullError, match=r"step-000000010: it takes \d+ bytes, and 1000 bytes are free"):
        save()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before
    assert guard.resume() == 10


def test_tied_weights_need_their_room_once(tmp_path, monkeypatch):
    """What is stored once is counted once: a save that fits is not refused."""
    disk = Disk(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300, bias=False), torch.nn.Linear(300, 300, bias=False))
    model[1].weight = model[0].weight
    guard = guard_of(tmp_path / "run", model)
    disk.free = 400_000
    guard.save(step=1)
    assert guard.resume() == 1


def test_a_save_behind_training_waits_for_room_and_is_sealed_then(tmp_path, monkeypatch):
    """Training goes on meanwhile."""
    disk = Disk(monkeypatch)
    guard = guard_of(tmp_path / "run", settings=WAITS)
    disk.free = 1000
    guard.save(step=5, blocking=False)
    assert disk.asked.wait(100)
    assert not guard.wait_for_save(0)
    disk.free = 10**15
    assert guard.wait_for_save(60)
    assert guard.resume() == 5


def test_the_next_save_takes_the_place_of_one_that_still_waits(tmp_path, monkeypatch):
    """Training is never held up by a full disk: the older save is given up, and that is on record."""
    disk = Disk(monkeypatch)
    with guard_of(tmp_path / "run", settings=WAITS) as guard:
        guard.save(step=1)
        disk.free = 1000
        for step in (2, 3, 4):
            disk.asked.clear()
            guard.save(step=step, blocking=False)
            assert disk.asked.wait(100)
            in_flight = guard._saving._in_flight
            while not in_flight.turn.waits_for_room:
                assert in_flight.wait(0.01) is False
        disk.free = 10**15
        assert guard.wait_for_save(60)
        assert guard.resume() == 4
    names = sorted(p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("step"))
    assert names == ["step-000000001", "step-000000004"]
    told = [incident.reason for incident in list_incidents(open_run(str(tmp_path / "run")))]
    assert len([reason for reason in told if "no space" in reason]) == 2


def saves_of_its_own(run, settings):
    """A guard whose user writes the files."""
    model = torch.nn.Linear(30, 20)
    saved = []

    def save(path, step):
        saved.append(step)
        torch.save(model.state_dict(), path)

    def load(path):
        model.load_state_dict(torch.load(path))

    guard = ckptguard.TrainingGuard(run, model=model, save=save, load=load, daemon="off", settings=settings)
    return guard, saved


def test_a_save_of_the_users_own_is_not_begun_without_room_for_one_like_the_last(tmp_path, monkeypatch):
    """What it will take is not known, but what the one before took; also in the next process. The first is tried."""
    disk = Disk(monkeypatch)
    guard, saved = saves_of_its_own(tmp_path / "run", Settings(settle=0.0))
    disk.free = 1000
    guard.save(step=1)
    again, saved_again = saves_of_its_own(tmp_path / "run", Settings(settle=0.0))
    for one in (guard, again):
        with pytest.raises(
            StorageFullError, match=r"step-2.pt, if it is as large as the one before: it takes \d+ bytes"
        ):
            one.save(step=2)
        with pytest.raises(StorageFullError):
            one.save(step=1)
    assert (saved, saved_again) == ([1], [])
    assert guard.resume() == 1
    disk.free = 10**15
    guard.save(step=2)
    assert saved == [1, 2]


def test_a_save_of_the_users_own_waits_for_room(tmp_path, monkeypatch):
    """With `on_full = "wait"`."""
    disk = Disk(monkeypatch)
    guard, saved = saves_of_its_own(tmp_path / "run", WAITS)
    guard.save(step=1)
    disk.free = 1000
    thread = threading.Thread(target=guard.save, kwargs={"step": 2})
    thread.start()
    assert disk.asked.wait(100)
    assert saved == [1]
    disk.free = 10**15
    thread.join(60)
    assert saved == [1, 2]

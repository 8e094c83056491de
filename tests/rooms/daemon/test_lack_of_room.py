"""What the daemon's log says about a lack of room."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.daemon_process import save
from support.served_runs import watched

from ckptguard.engine import watched_run as guarded
from ckptguard.runs.work import PLAIN
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.values.settings import Settings

SETTINGS = Settings(settle=0.0, keep="copy")
HOUR = 3600.0


def test_a_lack_of_room_that_comes_and_goes_is_said_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the limit each save changes whether there is room for all copies. The first lack is logged, and its end once
    there was room for an hour."""
    said: list[str] = []
    free, later = 0, 0.0
    monkeypatch.setattr(LocalStorage, "free_space", lambda self: free)
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + later)
    monkeypatch.setattr(guarded, "time", clock)
    one = watched(run, SETTINGS, log=lambda event, **_: said.append(event))
    for step in range(1, 9):
        free = 0 if step % 2 else 10**12
        save(run, step)
        done = one.step(PLAIN)
        assert done is not None
        assert (done.room is not None) == bool(step % 2)
    later = HOUR
    for _ in range(2):
        assert one.step(PLAIN) is not None
    free = 0
    save(run, 9)
    assert one.step(PLAIN) is not None
    about_room = [event for event in said if event.endswith("enough_room")]
    assert about_room == ["not_enough_room", "enough_room", "not_enough_room"]

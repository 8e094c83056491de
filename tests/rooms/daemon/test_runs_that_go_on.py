"""A run that looks removed for a while, and is not, is guarded again, with all that was known of it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from ckptguard_daemon.log import log
from support.daemon_process import save
from support.views import look

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.records.run import open_run
from ckptguard.reporting.notify import Hooks
from ckptguard.runs.work import PLAIN
from ckptguard.values.ids import RECORDS_FOLDER, run_id_of
from ckptguard.values.settings import Settings

SETTINGS = Settings(settle=0.0, keep="none")
DEADLINE = 60.0


def watched(folder: Path, settings: Settings = SETTINGS) -> WatchedRun:
    """A run as a daemon watches it, after its first pass."""
    run = WatchedRun(str(folder), run_id_of(str(folder)), settings, Hooks(settings, log), None)
    assert run.step(PLAIN) is not None
    return run


def step_until(run: WatchedRun, state: str) -> None:
    """Make passes until the run is shown so."""
    deadline = time.monotonic() + DEADLINE
    while run.state != state:
        run.step(PLAIN)
        assert time.monotonic() < deadline, run.trouble
        time.sleep(0.02)


def test_training_goes_on_without_records(tmp_path: Path) -> None:
    """Somebody removes the records alone while the trainer writes its log all the time: they begin again."""
    folder = tmp_path / "run"
    folder.mkdir()
    save(folder, 1)
    run = watched(folder)
    shutil.rmtree(folder / RECORDS_FOLDER)
    deadline = time.monotonic() + DEADLINE
    while run.step(PLAIN) is None or run.state != "guarded":
        with open(folder / "train.log", "a") as lines:
            lines.write("loss 1.0\n")
        assert time.monotonic() < deadline, run.trouble
        time.sleep(0.02)
    assert (folder / RECORDS_FOLDER).is_dir()


def test_a_mount_that_is_away_is_no_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the records elsewhere, an empty mount point is no run whose saves were removed."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings = SETTINGS.changed(records=str(tmp_path / "records"))
    path = save(folder, 1)
    run = watched(folder, settings)
    shutil.move(path, tmp_path / "away")
    honest = os.stat

    def elsewhere(place: object, *args: object, **options: object) -> os.stat_result:
        info = honest(place, *args, **options)  # type: ignore[call-overload]
        if place == str(folder):
            fields = list(info)
            fields[2] += 1
            return os.stat_result(fields)
        return info

    with monkeypatch.context() as away:
        away.setattr(os, "stat", elsewhere)
        for _ in range(2000):  # the pause between its tries doubles, up to a limit
            run.step(PLAIN)
        assert run.state == "failing"
        assert 0 < run.due - time.monotonic() <= 600
        assert not run._notes.gone
    shutil.move(tmp_path / "away", path)
    step_until(run, "guarded")
    assert look(str(folder), settings).checkpoints
    assert open_run(str(folder), settings).records.root == str(tmp_path / "records")

"""What `status` says would be lost if training died now."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from click.testing import CliRunner
from support.daemon_process import save
from support.runs import write_torch

from ckptguard.cli.entry import commands
from ckptguard.inspect.status import Status, status
from ckptguard.runs.run_view import open_view
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

HOUR = 3600.0


def looked_at(root: Path, keep: str = "copy") -> Status:
    """The status of a run after a pass that verifies and protects."""
    settings = Settings(settle=0.0, keep=keep)
    reconcile(open_view(str(root), settings), PassNotes())
    return status(open_view(str(root), settings))


def told(root: Path) -> str:
    """What the command prints."""
    return CliRunner().invoke(commands, ["status", str(root)]).stdout


def test_it_counts_from_the_newest_safe_save(root: Path) -> None:
    """By the time of its files, however late it was verified. What is bad does not count."""
    for step, hours in ((1, 4), (2, 3)):
        save(root, step, age=hours * HOUR)
    save(root, 3, nan=True, age=2 * HOUR)
    begun = time.time()
    lost = looked_at(root).at_risk
    assert lost is not None
    assert lost.remains
    assert lost.world_size is None
    assert abs(lost.since - (root / "net-2.safetensors").stat().st_mtime) < 1
    assert lost.gpu_seconds >= begun - lost.since


def test_what_was_saved_over_counts_from_its_own_files(root: Path) -> None:
    """Its kept copy is newer, and so is its verdict: neither says when training saved it."""
    times = []
    for hours, nan in ((4, False), (3, False), (2, True)):
        save(root, hours, nan=nan, age=hours * HOUR).rename(root / "ckpt.safetensors")
        times.append((root / "ckpt.safetensors").stat().st_mtime)
        lost = looked_at(root).at_risk
    assert lost is not None
    assert lost.remains
    assert abs(lost.since - times[1]) < 1


def test_without_copies_nothing_is_safe(root: Path) -> None:
    """The whole training is at risk, as far as it is on record."""
    for step, hours in ((1, 4), (2, 3), (3, 2)):
        save(root, step, age=hours * HOUR)
    lost = looked_at(root, keep="none").at_risk
    assert lost is not None
    assert not lost.remains
    assert abs(lost.since - (root / "net-1.safetensors").stat().st_mtime) < 1


def test_ranks_with_files_of_their_own_are_counted(root: Path) -> None:
    """A Trainer's checkpoint of four processes."""
    for step, hours in ((1, 3), (2, 2)):
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        save(root, step).rename(folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
        for rank in range(4):
            (root / write_torch(root, 1000, seed=rank)).rename(folder / f"rng_state_{rank}.pth")
        for path in folder.iterdir():
            os.utime(path, (time.time() - hours * HOUR,) * 2)
    lost = looked_at(root).at_risk
    assert lost is not None
    assert (lost.world_size, lost.remains) == (4, True)
    said = told(root)
    assert re.search(r"at risk: +8\.\d GPU-hours since the newest safe checkpoint, on 4\s+GPUs", said), said


def test_nothing_is_said_of_a_training_that_ended(root: Path) -> None:
    """Its saves came hourly, and the last one a day ago."""
    for step, hours in ((1, 26), (2, 25), (3, 24)):
        save(root, step, age=hours * HOUR)
    assert looked_at(root).at_risk is None
    assert "at risk" not in told(root)

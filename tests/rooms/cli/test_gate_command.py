"""``ckptguard gate``: what it says, and what it refuses."""

from __future__ import annotations

import os

import pytest
from support.runs import write_torch


def test_a_dry_run_says_what_would_be_verified_first(verified, invoke):
    """It may be good, and then nothing is moved."""
    write_torch(verified, 400, seed=400)
    done = invoke("gate", verified, "--dry-run")
    assert (done.exit_code, done.stdout) == (0, f"{verified}/net-300.pt\n")
    assert done.stderr.splitlines() == [
        "would first verify net-400.pt, and start from it if it is good; else:",
        "would quarantine net-400.pt",
        f"training would start from {verified}/net-300.pt",
    ]
    assert invoke("gate", verified).stdout == f"{verified}/net-400.pt\n"


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), os.mkfifo])
def test_what_is_no_folder_is_no_beginning(root, invoke, make):
    """A path that is wrong by one name."""
    make(root / "train.log")
    done = invoke("gate", root / "train.log")
    assert (done.exit_code, done.stdout) == (10, "")
    assert "is not a folder" in done.stderr


def test_a_verified_folder_below_does_not_keep_a_training_from_its_start(root, invoke):
    """Somebody has verified the folder of the checkpoints, which has records now: the run is the one that is named."""
    folder = root / "exp" / "checkpoints"
    folder.mkdir(parents=True)
    write_torch(folder, 100, seed=1)
    assert invoke("verify", folder).exit_code == 0
    assert "is no run" in invoke("verify", root / "exp").stderr
    started = invoke("gate", root / "exp")
    assert (started.exit_code, started.stdout) == (0, f"{folder}/net-100.pt\n")

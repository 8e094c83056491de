"""``ckptguard gate``: what it says, and what it refuses."""

from __future__ import annotations

import os

import pytest
from support.runs import save_file, state_dict, write_torch


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


@pytest.mark.parametrize("recorded", [False, True])
def test_a_checkpoint_is_no_run(root, invoke, recorded):
    """What is in it must not be taken for a run's saves, and nothing of ours belongs there."""
    save = root / "checkpoint-100"
    save.mkdir()
    save_file(state_dict(1), save / "model.safetensors")
    if recorded:
        invoke("verify", root)
    done = invoke("gate", save)
    assert (done.exit_code, done.stdout) == (10, "")
    assert f"{save} is a checkpoint, not a run" in done.stderr
    assert [path.name for path in save.iterdir()] == ["model.safetensors"]

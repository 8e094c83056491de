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

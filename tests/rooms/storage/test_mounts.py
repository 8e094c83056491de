"""What is mounted where, as the kernel lists it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptguard.storage.local import mounts


def test_the_longest_mount_above_a_path_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one with a space in its name."""
    listed = tmp_path / "mountinfo"
    listed.write_text(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /net\\040home rw - nfs4 host:/x rw\n"
        "3 2 0:3 / /net\\040home/local rw shared:1 - xfs /dev/b rw\n"
    )
    real: Any = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: real(listed, *a, **k))
    folders = {"/net home/me": "nfs4", "/net home/local": "xfs", "/run": "ext4"}
    assert {folder: mounts.mount_of(folder)[1] for folder in folders} == folders

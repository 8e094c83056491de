"""Of which file systems the times of folders are trusted."""

from __future__ import annotations

import pytest

from ckptguard.storage.local import folder_times
from ckptguard.storage.local.local_storage import LocalStorage


@pytest.mark.parametrize(
    ("magic", "trusted"),
    [(0xEF53, True), (0x9123683E, True), (0x6969, False), (0x65735546, False), (0xFF534D42, False), (None, False)],
    ids=["ext4", "btrfs", "nfs", "fuse", "cifs", "unknown"],
)
def test_which_file_systems_are_trusted(magic, trusted, tmp_path, monkeypatch):
    """Those whose folders only this machine's kernel changes."""
    monkeypatch.setattr(folder_times, "_file_system", lambda path: magic)
    assert LocalStorage(str(tmp_path)).capabilities().folder_times is trusted


def test_what_is_no_folder_is_on_no_file_system(tmp_path):
    """Records that are not there yet."""
    assert not folder_times.folder_times_tell(str(tmp_path / "absent"))

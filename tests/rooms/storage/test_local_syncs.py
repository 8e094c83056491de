"""What is made durable together is so at the end of the block, and before whatever says that it counts."""

import errno
import os
import re

import pytest
from support.records_on_disk import at
from support.runs import QUICK, write_torch
from support.views import look

from ckptguard.errors import StorageError, StorageFullError
from ckptguard.keep.copies import keep_checkpoint
from ckptguard.records.run import open_run
from ckptguard.runs.lock import run_lock
from ckptguard.storage.local import syncs as local_syncs
from ckptguard.storage.local.syncs import sync, synced_together
from ckptguard.values.ids import CheckpointId


@pytest.fixture
def synced(monkeypatch):
    """The paths that the kernel was asked to make durable, in order."""
    paths = []
    monkeypatch.setattr(local_syncs.os, "fsync", lambda fd: paths.append(os.readlink(f"/proc/self/fd/{fd}")))
    return paths


def test_each_is_synced_once_at_the_end(tmp_path, synced):
    """Not before, whatever closes its descriptor meanwhile, and at most so many are held open."""
    files = [tmp_path / f"{number}" for number in range(100)]
    before = len(os.listdir("/proc/self/fd"))
    with synced_together(str(tmp_path)):
        for file in [*files[:3], *files[:3]]:
            file.touch()
            with file.open() as opened:
                sync(opened.fileno())
        assert synced == []
        for file in files[3:]:
            file.touch()
            with file.open() as opened:
                sync(opened.fileno())
        assert len(os.listdir("/proc/self/fd")) - before <= 64
    assert sorted(synced) == sorted(str(f) for f in files)
    assert len(os.listdir("/proc/self/fd")) == before
    with files[0].open() as opened:
        sync(opened.fileno())
    assert len(synced) == 101


def test_an_error_is_one_of_storage_and_nothing_stays_open(tmp_path, monkeypatch):
    """A full disk may show only when it is synced."""
    before = len(os.listdir("/proc/self/fd"))

    def full(fd):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(local_syncs.os, "fsync", full)
    with pytest.raises(StorageFullError):
        sync_two(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def sync_two(folder):
    """Make two files durable together."""
    with synced_together(str(folder)):
        for name in "ab":
            with (folder / name).open("w") as opened:
                sync(opened.fileno())


def test_a_kept_copy_is_durable_before_its_mark_is_written(tmp_path, synced):
    """All links and their folders come first, then the mark."""
    write_torch(tmp_path / "run", 1, seed=1)
    run = open_run(str(tmp_path / "run"))
    [checkpoint] = look(run).checkpoints
    with run_lock(run):
        copy = keep_checkpoint(look(run), checkpoint, CheckpointId(checkpoint.series, checkpoint.step, 1))
    # It is written without a name, or with a temporary one where the file system has no others.
    mark = next(i for i, path in enumerate(synced) if re.fullmatch(r".*/kept/[^/]*net-#[^/]*/(#|\.tmp-)[^/]*", path))
    place = str(at(tmp_path / "run", f"_ckptguard/{copy.folder}"))
    assert place in synced[:mark]
    if copy.how == "link":
        assert str(tmp_path / "run/net-1.pt") in synced[:mark]


def test_a_copy_that_cannot_be_made_durable_leaves_nothing(tmp_path, monkeypatch):
    """No mark, and no files."""
    write_torch(tmp_path / "run", 1, seed=1)
    run = open_run(str(tmp_path / "run"))
    [checkpoint] = look(run).checkpoints
    real = os.fsync

    def fail(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("net-1.pt"):
            raise OSError(errno.EIO, "input/output error")
        real(fd)

    with run_lock(run):
        monkeypatch.setattr(local_syncs.os, "fsync", fail)
        with pytest.raises(StorageError):
            keep_checkpoint(
                look(run, QUICK.changed(keep="link")), checkpoint, CheckpointId(checkpoint.series, checkpoint.step, 1)
            )
        monkeypatch.undo()
    assert not [
        p for p in (tmp_path / "run/_ckptguard").rglob("*") if p.suffix == ".json" or (p.is_file() and "net" in p.name)
    ]

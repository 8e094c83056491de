"""A daemon on a disk that has little room: a real file system, a real daemon, and a trainer that saves and rotates."""

import contextlib
import os
import shutil
import subprocess

import numpy as np
import pytest
from support.daemon_process import DaemonProcess, until
from support.small_disk import BLOCK, save_numbers

from ckptguard.inspect.status import status
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import RunView
from ckptguard.values.settings import Settings

MIB = 1 << 20
SAVE = 16 * MIB


@contextlib.contextmanager
def mounted(folder, kind):
    """A file system of 60 MiB for checkpoints. Skips where none may be mounted."""
    folder.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=60m", "none", str(folder)]
    else:
        image = folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(72 * MIB)
        tool = shutil.which(f"mkfs.{kind}")
        if tool is None or subprocess.run([tool, "-q", str(image)], capture_output=True).returncode:
            pytest.skip(f"mkfs.{kind} cannot make a file system here")
        command = ["mount", "-o", "loop", str(image), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def save(run, step):
    """A save as a trainer makes it, then its rotation of two. Raises OSError if the disk is full."""
    path = run / f"net-{step}.safetensors"
    weights = np.random.default_rng(step).standard_normal((SAVE - BLOCK) // 4).astype("<f4")
    try:
        save_numbers(weights, step, path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    (run / f"net-{step - 2}.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("keep", ["auto", "copy", "link"])
def test_ten_saves_on_a_disk_for_three(tmp_path, kind, keep):
    """60 MiB, saves of 16 MiB, a rotation of two: ten of ten succeed beside the daemon, which says once what it lacks
    room for. The trainer saves when the one before has its verdict."""
    with mounted(tmp_path / "disk", kind) as disk:
        run = disk / "run"
        run.mkdir()
        daemon = DaemonProcess(tmp_path, run, CKPTGUARD_KEEP=keep)
        try:
            daemon.logged("started")
            failed = []
            for step in range(1, 11):
                try:
                    save(run, step)
                except OSError as error:
                    failed.append((step, error.errno))
                    continue
                daemon.logged("verified", path=f"net-{step}.safetensors")
                until(lambda: has_room(disk), "room for the next save")
            assert failed == []
            assert [line["event"] for line in daemon.log_lines()].count("not_enough_room") == 1
            found = status(RunView(open_run(str(run)), Settings(keep=keep)))
            assert found.room.problem.startswith("not enough room")
            assert found.known_good.path.endswith("net-10.safetensors")
        finally:
            daemon.stop()


def has_room(disk):
    """The next save fits."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize >= SAVE

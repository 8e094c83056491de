"""Copying a stored object to a local file: whole, in bounded memory, or an error that names what failed."""

import errno
import os
import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptguard.errors import StorageFullError, TransientError
from ckptguard.recover import restore as fetch_module
from ckptguard.recover.restore import fetch_files
from ckptguard.storage import open_storage
from ckptguard.storage.remote.remote_storage import RemoteReader

CHUNK = 1 << 16
DATA = os.urandom(20 * CHUNK + 11)


class Held:
    """Counts the bytes that were asked of a remote storage and are not written yet: `most` at any time."""

    def __init__(self, monkeypatch):
        self._lock, self._now, self.most = threading.Lock(), 0, 0
        real = RemoteReader.read

        def read(reader, offset, length):
            with self._lock:
                self._now += length
                self.most = max(self.most, self._now)
            return real(reader, offset, length)

        monkeypatch.setattr(RemoteReader, "read", read)

    def written(self, length):
        """The `progress` of a fetch."""
        with self._lock:
            self._now -= length


@pytest.fixture(params=["memory", "local"])
def stored(request, tmp_path, monkeypatch):
    """A storage that holds the data under "a", read in small chunks."""
    monkeypatch.setattr(fetch_module, "CHUNK", CHUNK)
    monkeypatch.setattr(fetch_module, "_BLOCK", CHUNK)
    if request.param == "memory":
        MemoryFileSystem().pipe_file("/fetched/a", DATA)
        return open_storage("memory://fetched")
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a").write_bytes(DATA)
    return open_storage(tmp_path / "from")


def test_the_copy_has_every_byte_and_progress_counts_them(stored, tmp_path):
    """Chunks that come in any order land where they belong; folders are made."""
    done = []
    fetch_files(stored, [("a", str(tmp_path / "x" / "y" / "b"))], done.append)
    assert (tmp_path / "x" / "y" / "b").read_bytes() == DATA
    assert sum(done) == len(DATA)


def test_few_chunks_are_in_memory(tmp_path, monkeypatch):
    """As many as there are requests at once."""
    monkeypatch.setattr(fetch_module, "CHUNK", CHUNK)
    MemoryFileSystem().pipe_file("/fetched/a", DATA)
    held = Held(monkeypatch)
    fetch_files(open_storage("memory://fetched"), [("a", str(tmp_path / "b"))], held.written)
    assert held.most <= fetch_module.IN_FLIGHT * CHUNK


def test_a_read_that_fails_ends_it(tmp_path, monkeypatch):
    """The error is the storage's; nobody reads on."""
    monkeypatch.setattr(fetch_module, "CHUNK", CHUNK)
    MemoryFileSystem().pipe_file("/fetched/a", DATA)
    storage = open_storage("memory://fetched").inner
    read, real = [], RemoteReader.read

    def fail(self, offset, length):
        read.append(offset)
        if offset == 3 * CHUNK:
            raise TransientError("503", key="a")
        return real(self, offset, length)

    monkeypatch.setattr(RemoteReader, "read", fail)
    with pytest.raises(TransientError):
        fetch_files(storage, [("a", str(tmp_path / "b"))])
    assert threading.active_count() == len([t for t in threading.enumerate() if "ckptguard-fetch" not in t.name])


def test_a_full_disk_is_told_by_its_name(stored, tmp_path, monkeypatch):
    """Whichever chunk meets it."""

    def pwrite(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageFullError, match="no space left"):
        fetch_files(stored, [("a", str(tmp_path / "b"))])


def test_several_come_at_once_and_share_what_is_in_memory(tmp_path, monkeypatch):
    """Files of many chunks, of one, and empty ones: each is whole, and no more chunks are held than for one file."""
    monkeypatch.setattr(fetch_module, "CHUNK", CHUNK)
    sizes = {f"f{n}": size for n, size in enumerate([5 * CHUNK, 0, 1, CHUNK, 7 * CHUNK + 3, 3 * CHUNK])}
    for name, size in sizes.items():
        MemoryFileSystem().pipe_file(f"/several/{name}", DATA[:size])
    held = Held(monkeypatch)
    wanted = [(name, str(tmp_path / "out" / name)) for name in sizes]
    fetch_files(open_storage("memory://several"), wanted, held.written)
    assert {n: (tmp_path / "out" / n).read_bytes() for n in sizes} == {n: DATA[:size] for n, size in sizes.items()}
    assert held.most <= fetch_module.IN_FLIGHT * CHUNK


def test_one_that_fails_ends_the_others(tmp_path, monkeypatch):
    """However many wait: the failure is what is told, and nobody reads on."""
    monkeypatch.setattr(fetch_module, "CHUNK", CHUNK)
    for number in range(50):
        MemoryFileSystem().pipe_file(f"/ends/{number:02d}", DATA[:CHUNK])
    storage = open_storage("memory://ends").inner
    real = RemoteReader.read

    def fail(self, offset, length):
        if self.entry.key == "01":
            raise TransientError("503", key="01")
        return real(self, offset, length)

    monkeypatch.setattr(RemoteReader, "read", fail)
    with pytest.raises(TransientError):
        fetch_files(storage, [(f"{n:02d}", str(tmp_path / f"{n:02d}")) for n in range(50)])
    assert not any("ckptguard-fetch" in t.name for t in threading.enumerate())

"""Chunks that are fetched ahead: the same bytes, a bounded number of them, and errors where they belong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptguard.errors import ChangedWhileReadError, TransientError
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.storage import open_storage
from ckptguard.storage.protocol import Entry
from ckptguard.storage.read_ahead import ReadAhead
from ckptguard.storage.remote.remote_storage import RemoteReader

DATA = bytes(range(256)) * 40 + b"the end"


class CountingReader:
    """Bytes in memory; knows how many of them were asked for."""

    def __init__(self, data: bytes, *, fails_at: int | None = None) -> None:
        self.data, self.fails_at = data, fails_at
        self.entry = Entry(key="a", kind="file", size=len(data))
        self.asked: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        if self.fails_at is not None and offset <= self.fails_at < offset + length:
            raise TransientError("503", key="a")
        return self.data[offset : offset + length]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def check_unchanged(self) -> None:
        raise ChangedWhileReadError("it changed", key="a")

    def done_with(self, offset: int, length: int) -> None:
        pass

    def close(self) -> None:
        raise AssertionError("the reader belongs to whoever opened it")

    def __enter__(self) -> CountingReader:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.mark.parametrize("step", [1, 7, 100, 256, 1000, 20_000])
@pytest.mark.parametrize("chunk", [64, 1000, 100_000])
def test_the_bytes_are_those_of_the_file_and_each_is_asked_for_once(step: int, chunk: int) -> None:
    """Whatever is asked for in one go, and whatever is fetched in one."""
    reader = CountingReader(DATA)
    with ThreadPoolExecutor(3) as threads, ReadAhead(reader, threads, chunk=chunk) as ahead:
        found = b"".join(ahead.read(at, min(step, len(DATA) - at)) for at in range(0, len(DATA), step))
    assert found == DATA
    assert sum(length for _, length in reader.asked) == len(DATA)


def test_no_more_is_fetched_than_may_be_on_its_way() -> None:
    """Reading stays a few chunks ahead."""
    reader = CountingReader(DATA)
    with ThreadPoolExecutor(3) as threads, ReadAhead(reader, threads, chunk=100, in_flight=lambda: 3) as ahead:
        for at in range(0, len(DATA), 50):
            assert ahead.read(at, min(50, len(DATA) - at)) == DATA[at : at + 50]
            assert sum(length for _, length in reader.asked) <= at + 50 + 3 * 100


def test_what_is_read_out_of_order_is_right_too() -> None:
    """Back and forth, inside of chunks and over their ends."""
    with ThreadPoolExecutor(2) as threads, ReadAhead(CountingReader(DATA), threads, chunk=100) as ahead:
        for at in (5000, 0, 90, 20, 9000, 9050, 300, 10_000, 120):
            assert ahead.read(at, 130) == DATA[at : at + 130], at


def test_an_error_comes_where_its_bytes_are_wanted_and_the_threads_come_free() -> None:
    """Neither earlier nor lost, and nobody waits for it."""
    reader = CountingReader(DATA, fails_at=450)
    with ThreadPoolExecutor(2) as threads:
        with ReadAhead(reader, threads, chunk=100) as ahead:
            assert ahead.read(0, 400) == DATA[:400]
            with pytest.raises(TransientError):
                ahead.read(400, 100)
            with pytest.raises(ChangedWhileReadError):
                ahead.check_unchanged()
        assert threads.submit(lambda: 1).result(timeout=250) == 1


def test_a_scan_of_a_store_is_that_of_the_files_and_holds_few_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of four files side by side; the most that was ever asked for and not yet looked at is counted."""
    import os

    from fsspec.implementations.memory import MemoryFileSystem

    chunk = 1 << 20
    files = {f"{name}.bin": os.urandom(12 * chunk + 17) for name in "abcd"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        MemoryFileSystem().pipe_file(f"/read-ahead/{name}", data)
    lock, held, most = threading.Lock(), 0, 0
    real = RemoteReader.read

    def read(self: RemoteReader, offset: int, length: int) -> bytes:
        nonlocal held, most
        with lock:
            held += length
            most = max(most, held)
        return real(self, offset, length)

    def done(length: int) -> None:
        nonlocal held
        with lock:
            held -= length

    monkeypatch.setattr(RemoteReader, "read", read)
    monkeypatch.setattr(
        "ckptguard.storage.read_ahead.ReadAhead",
        lambda reader, threads, in_flight: ReadAhead(reader, threads, chunk=chunk, in_flight=in_flight),
    )
    options = ScanOptions(workers=4, sums=("sha256",))
    remote = scan_files(open_storage("memory://read-ahead"), list(files), options, done)
    local = scan_files(open_storage(tmp_path), list(files), options)
    assert [(f.envelope, f.md5, f.sums) for f in remote.files] == [(f.envelope, f.md5, f.sums) for f in local.files]
    assert most <= 16 * chunk  # of 48: what may be on its way for all, and one chunk at hand for each

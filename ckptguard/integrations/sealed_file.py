"""One file whose bytes are in memory: written, hashed meanwhile, sealed once it is durable. Nothing is read back."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Self, cast

import msgspec

from ckptguard.errors import ChangedWhileReadError
from ckptguard.runs.run_view import RunView
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.storage.protocol import Entry, Reader, Storage
from ckptguard.values.manifest import Manifest
from ckptguard.verify.collect_evidence import collect_evidence, manifest_files
from ckptguard.verify.seal import seal_written

_BLOCK = 64 * 1024**2  # one write of more than 2 GiB is cut short


def write_sealed(view: RunView, path: str, data: memoryview) -> Manifest | None:
    """Write `data` to a local file of the run, durably and in one step for every reader, and seal it.

    It still has no verdict. None for a file that names no step: it is not sealed. OSError if it could not be written;
    anything else means that it was written, and could not be sealed.
    """
    run = view.run
    place = run.usable(path)
    failures: list[OSError] = []
    writing = threading.Thread(target=_write, args=(place, data, failures), name="ckptguard-write", daemon=True)
    writing.start()
    try:
        scan = scan_files(cast(Storage, _InMemory(path, data)), [path], ScanOptions(md5=False))
    finally:
        writing.join()
        if failures:
            raise failures[0]
    checkpoint = view.look_again(path)
    if checkpoint is None or checkpoint.step is None:
        return None
    entry = run.storage.stat(path)
    scan = msgspec.structs.replace(scan, files=tuple(msgspec.structs.replace(f, entry=entry) for f in scan.files))
    files = manifest_files(collect_evidence(run.storage, checkpoint, scan))
    return seal_written(run, path=path, layout=checkpoint.layout, step=checkpoint.step, files=files)


class _InMemory(Reader):
    """As much of a storage, and of its reader, as a scan of one file needs."""

    root = None

    def __init__(self, key: str, data: memoryview) -> None:
        self._data = data
        self.entry = Entry(key=key, kind="file", size=len(data))

    def open(self, key: str) -> Self:
        return self

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._range(offset, length))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._range(offset, len(buffer))

    def _range(self, offset: int, length: int) -> memoryview:
        if offset + length > len(self._data):
            raise ChangedWhileReadError(f"{self.entry.key} ends earlier than expected", key=self.entry.key)
        return self._data[offset : offset + length]

    def check_unchanged(self) -> None:
        pass

    def done_with(self, offset: int, length: int) -> None:
        pass

    def close(self) -> None:
        pass


def _write(place: str, data: memoryview, failures: list[OSError]) -> None:
    folder, name = os.path.split(place)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:8]}")
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            left = data
            while left:
                left = left[os.write(descriptor, left[:_BLOCK]) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, place)
        names = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(names)
        finally:
            os.close(names)
    except OSError as error:
        failures.append(error)
        try:
            os.unlink(temporary)
        except OSError:
            pass  # it was renamed, or never there

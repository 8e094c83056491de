"""A scanner that holds what it scans: the bytes that are judged are the bytes that are loaded, whatever becomes of the
files."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

from ckptguard.errors import CouldNotTellError
from ckptguard.scan.options import Progress, Scanner, ScanOptions
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.storage.memory_reader import MemoryReader
from ckptguard.storage.protocol import Reader, Storage
from ckptguard.storage.read_ahead import CHUNK, IN_FLIGHT, ReadAhead
from ckptguard.values.ids import escape


@dataclass(frozen=True)
class HeldFile:
    """A file that was read once: its bytes, and what a scan of these bytes found."""

    data: bytearray | memoryview
    scanned: ScannedFile


@dataclass
class HoldingScanner:
    """Scans as `scanner` does, in this process and in memory. `files` has what the last scan read, by storage and key;
    with `gathers` what all scans read, for a checkpoint that takes several."""

    scanner: Scanner
    gathers: bool = False
    files: dict[tuple[str, str], HeldFile] = field(default_factory=dict)

    def scan(
        self, storage: Storage, keys: Sequence[str], options: ScanOptions, progress: Progress | None = None
    ) -> Scan:
        """What the scanner finds in the bytes that are now held."""
        if not self.gathers:
            self.files.clear()
        memory = _ReadOnce(storage, sum(len(held.data) for held in self.files.values()))
        scan = self.scanner(cast(Storage, memory), keys, options, progress)
        for file in scan.files:
            self.files[storage.url, file.entry.key] = HeldFile(memory.read[file.entry.key].data, file)
        return scan


class _ReadOnce:
    """A storage of which every file is read once, whole, when it is first opened. The rest is the storage's own."""

    def __init__(self, storage: Storage, held: int) -> None:
        self._storage, self._held = storage, held
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self.read: dict[str, MemoryReader] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, key: str) -> Reader:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self.read:
                with self._storage.open(key) as reader:
                    self._need_memory(key, reader.entry.size)
                    self.read[key] = MemoryReader(reader.entry, _whole(self._storage, reader))
            return self.read[key]

    def _need_memory(self, key: str, size: int) -> None:
        """A sparse file of any size is quickly made, and memory that is promised is not always there."""
        with self._lock:
            self._held += size
            if self._held > _physical_memory():
                raise CouldNotTellError(
                    f"{escape(key)} cannot be held in memory: that takes {self._held} bytes",
                    hint="ckptguard.restore copies it to a disk, verified",
                )


def _whole(storage: Storage, reader: Reader) -> bytearray:
    """All bytes of an open file. ChangedWhileReadError if it changed meanwhile."""
    data = bytearray(reader.entry.size)
    if storage.root is not None:
        reader.read_into(0, memoryview(data))
    else:
        with ThreadPoolExecutor(IN_FLIGHT, "ckptguard-read") as requests, ReadAhead(reader, requests) as ahead:
            for begin in range(0, len(data), CHUNK):
                ahead.read_into(begin, memoryview(data)[begin : begin + CHUNK])
    reader.check_unchanged()
    return data


def _physical_memory() -> int:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << 62

"""The structures of a storage's files while they are scanned: those that others refer to are read only once."""

from __future__ import annotations

import threading

from ckptguard.errors import ObjectMissingError
from ckptguard.formats import Structure, read_structure
from ckptguard.storage.protocol import Entry, Reader, Storage


class Structures:
    """May be asked from several threads at once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, tuple[Entry, Structure] | None] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def read(self, reader: Reader, key: str) -> Structure:
        """The structure of an open file."""
        # Held while it is read, and with it another's that it refers to: nothing that is referred to refers further.
        with self._lock_of(key):
            known = self._known.get(key)
            if known is not None and known[0] == reader.entry and known[1].chunks:
                return known[1]
            structure = read_structure(reader, key, lambda name: self._beside(key, name))
            if structure.chunks:  # what it says of other files, they will ask for
                self._known[key] = (reader.entry, structure)
            return structure

    def _beside(self, key: str, name: str) -> Structure | None:
        """The structure of a file in the same folder; what it refers to in turn is not looked at."""
        other = key.rpartition("/")[0] + "/" + name if "/" in key else name
        with self._lock_of(other):
            if other not in self._known:
                self._known[other] = None
                try:
                    if self._storage.stat(other).kind == "file":  # a link or FIFO has a finding of its own
                        with self._storage.open(other) as reader:
                            self._known[other] = (reader.entry, read_structure(reader, other))
                except ObjectMissingError:
                    pass
            known = self._known[other]
            return None if known is None else known[1]

    def _lock_of(self, key: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

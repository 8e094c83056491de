"""Check for free space before the first byte is written, and know what other runs of this process need."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from ckptguard.decisions.room import NextSave, together
from ckptguard.errors import StorageError, StorageFullError
from ckptguard.storage import Storage
from ckptguard.values.own_log import log as _log

_TICK = 0.5  # seconds between two checks whether the wait was stopped
_LOOKS = 10  # ticks between two queries of the free space
_REPORTED = 600.0  # seconds between two warnings
_TRY_AGAIN = 600.0  # seconds without a full copy after a write failed for lack of space


def need_room(
    storage: Storage,
    size: int,
    what: str,
    *,
    wait: bool = False,
    check_stop: Callable[[], None] = lambda: None,
    waits: Callable[[bool], None] = lambda _: None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Raise StorageFullError if fewer than `size` bytes are free; with `wait`, warn and wait until they are.

    `check_stop` is called often while waiting, and may raise. `waits` is called when a wait begins and ends. Quotas,
    other writers and storages that do not report free space are not seen, so a write may still fail.
    """
    reported: float | None = None
    try:
        while (free := free_space(storage)) is not None and free < size:
            message = f"no space left for {what}: it takes {_words(size)}, and {_words(free)} are free in {storage.url}"
            if not wait:
                raise StorageFullError(message, key="", hint='free some space, or set on_full = "wait"')
            if reported is None:
                waits(True)
            if reported is None or time.monotonic() - reported > _REPORTED:
                reported = time.monotonic()
                _log.warning("%s; waiting for free space", message)
            for _ in range(_LOOKS):
                check_stop()
                pause(_TICK)
        check_stop()
    finally:
        if reported is not None:
            waits(False)
    if reported is not None:
        _log.warning("there is enough free space now for %s", what)


def free_space(storage: Storage) -> int | None:
    """Return the free bytes, or None if the storage does not say."""
    try:
        return storage.free_space()
    except StorageError:
        return None  # the write itself reports the error


def _words(size: int) -> str:
    return f"{size} bytes" if size < 10**6 else f"{size / 10**9:.3f} GB ({size} bytes)"


def file_system_of(storage: Storage) -> str:
    """Return a name for the file system of a storage: equal names share their free space."""
    place = storage.root
    if place is None:
        return "://".join(part.partition("/")[0] for part in storage.url.split("://", 1))
    while True:
        try:
            return f"device {os.stat(place).st_dev}"
        except OSError:
            above = os.path.dirname(place)
            if above == place:
                return storage.url
            place = above


class SharedSpace:
    """What the runs of this process need of the file systems that they share. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[str, dict[str, NextSave]] = {}  # by file system and run
        self._links: dict[str, dict[str, int]] = {}  # what copies of a run will take once the trainer deletes files
        self._growth: dict[str, dict[str, float]] = {}  # bytes a second, by file system and run
        self._copying: Counter[str] = Counter()
        self._full_until: dict[str, float] = {}  # monotonic

    def note_save(self, file_system: str, run: str, save: NextSave) -> None:
        """Note what the next save of a run needs."""
        with self._lock:
            self._saves.setdefault(file_system, {})[run] = save

    def note_links(self, file_system: str, run: str, size: int) -> None:
        """Note how many bytes the copies of a run will take in addition once the trainer deletes files."""
        with self._lock:
            self._links.setdefault(file_system, {})[run] = size

    def note_growth(self, file_system: str, run: str, growth: float) -> float:
        """Note by how many bytes a second a run grows. Returns that of all runs on the file system."""
        with self._lock:
            known = self._growth.setdefault(file_system, {})
            known[run] = growth
            return sum(known.values())

    def links_of(self, file_system: str, run: str) -> int:
        """Return what was noted last for a run."""
        with self._lock:
            return self._links.get(file_system, {}).get(run, 0)

    def needed(self, file_system: str, run: str) -> int:
        """Return how many bytes must stay free for the next saves of all runs, for the copies of other runs than this
        one, and for those that are being made now."""
        with self._lock:
            links = sum(size for other, size in self._links.get(file_system, {}).items() if other != run)
            saves = together(self._saves.get(file_system, {}).values(), time.time())
            return saves + links + self._copying[file_system]

    @contextlib.contextmanager
    def copying(self, file_system: str, size: int) -> Iterator[None]:
        """Count the bytes of a copy as taken while it is made."""
        with self._lock:
            self._copying[file_system] += size
        try:
            yield
        finally:
            with self._lock:
                self._copying[file_system] -= size

    def note_full(self, file_system: str) -> None:
        """Note that a write failed for lack of space, such as a quota of which the free space says nothing."""
        with self._lock:
            self._full_until[file_system] = time.monotonic() + _TRY_AGAIN

    def is_full(self, file_system: str) -> bool:
        """True for some time after a write failed for lack of space."""
        with self._lock:
            return time.monotonic() < self._full_until.get(file_system, 0.0)


SHARED = SharedSpace()

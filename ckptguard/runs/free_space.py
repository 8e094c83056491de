"""Check for free space before the first byte is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckptguard.errors import StorageError, StorageFullError
from ckptguard.storage import Storage

_log = logging.getLogger("ckptguard")
_TICK = 0.5  # seconds between two checks whether the wait was stopped
_LOOKS = 10  # ticks between two queries of the free space
_TOLD = 600.0  # seconds between two warnings


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
    told: float | None = None
    try:
        while (free := _free(storage)) is not None and free < size:
            message = f"no space left for {what}: it takes {_words(size)}, and {_words(free)} are free in {storage.url}"
            if not wait:
                raise StorageFullError(message, key="", hint='free some space, or set on_full = "wait"')
            if told is None:
                waits(True)
            if told is None or time.monotonic() - told > _TOLD:
                told = time.monotonic()
                _log.warning("%s; waiting for free space", message)
            for _ in range(_LOOKS):
                check_stop()
                pause(_TICK)
        check_stop()
    finally:
        if told is not None:
            waits(False)
    if told is not None:
        _log.warning("there is enough free space now for %s", what)


def _free(storage: Storage) -> int | None:
    try:
        return storage.free_space()
    except StorageError:
        return None  # the write itself reports the error


def _words(size: int) -> str:
    return f"{size} bytes" if size < 10**6 else f"{size / 10**9:.3f} GB ({size} bytes)"

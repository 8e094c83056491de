"""Room: is there space for what is about to be written? Asked before the first byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckptguard.errors import StorageError, StorageFullError
from ckptguard.storage import Storage

_log = logging.getLogger("ckptguard")
_TICK = 0.5  # seconds between two looks whether the wait was called off
_LOOKS = 10  # ticks between two questions to the storage
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
    """StorageFullError, with the numbers, if fewer bytes are free than `size`; or `wait` until they are, and warn.
    `check_stop` is called often while it waits, and may raise; `waits` is told when a wait begins and ends. Quotas,
    what others write, and a storage that does not say what is free, are not seen: writing may still fail."""
    told: float | None = None
    try:
        while (free := _free(storage)) is not None and free < size:
            message = f"no space left for {what}: it takes {_words(size)}, and {_words(free)} are free in {storage.url}"
            if not wait:
                raise StorageFullError(message, key="", hint='free some space; or on_full = "wait"')
            if told is None:
                waits(True)
            if told is None or time.monotonic() - told > _TOLD:
                told = time.monotonic()
                _log.warning("%s; waiting for room", message)
            for _ in range(_LOOKS):
                check_stop()
                pause(_TICK)
        check_stop()
    finally:
        if told is not None:
            waits(False)
    if told is not None:
        _log.warning("there is room now for %s", what)


def _free(storage: Storage) -> int | None:
    try:
        return storage.free_space()
    except StorageError:
        return None  # whatever is wrong, writing will tell


def _words(size: int) -> str:
    return f"{size} bytes" if size < 10**6 else f"{size / 10**9:.3f} GB ({size} bytes)"

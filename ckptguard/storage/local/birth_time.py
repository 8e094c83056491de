"""When a file was made. Python reports that on macOS and BSD, and Linux by its call `statx`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

_HERE, _NO_FOLLOW = -100, 0x100  # AT_FDCWD, AT_SYMLINK_NOFOLLOW
_BIRTH = 0x800  # STATX_BTIME
_SIZE, _AT = 256, 80  # of struct statx, and where its stx_btime begins: 8 bytes of seconds, 4 of nanoseconds
_ROUNDING = 1000  # nanoseconds: Python has the time as a float


def born_ns(path: str) -> int | None:
    """Return when this file was made, in nanoseconds since 1970, never too early. None if the system does not say."""
    try:
        seconds = getattr(os.lstat(path), "st_birthtime", None)
    except OSError:
        return None
    return _by_statx(path) if seconds is None else int(seconds * 10**9) + _ROUNDING


def _by_statx(path: str) -> int | None:
    import ctypes

    function, answer = _statx(), ctypes.create_string_buffer(_SIZE)
    if function is None or function(_HERE, os.fsencode(path), _NO_FOLLOW, _BIRTH, answer) != 0:
        return None
    if not ctypes.c_uint32.from_buffer(answer).value & _BIRTH:
        return None
    return ctypes.c_int64.from_buffer(answer, _AT).value * 10**9 + ctypes.c_uint32.from_buffer(answer, _AT + 8).value


@functools.cache
def _statx() -> Callable[[int, bytes, int, int, object], int] | None:
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None)

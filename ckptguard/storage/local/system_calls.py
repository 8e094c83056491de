"""The few Linux calls that Python has no names for. Where one is absent they raise OSError with ENOSYS."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Callable

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_FICLONE = 0x40049409  # _IOW(0x94, 9, int)

# What these calls answer where the kernel or the file system does not offer them.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOTSUP})


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    import ctypes

    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


def rename_exclusively(source_folder: int, source: str, target_folder: int, target: str) -> None:
    """One rename that never replaces; FileExistsError if the target exists, an UNSUPPORTED errno if not offered."""
    _rename(source_folder, source, target_folder, target, _RENAME_NOREPLACE)


def exchange_names(one_folder: int, one: str, other_folder: int, other: str) -> None:
    """Have two names change places in one step: neither is ever free. An UNSUPPORTED errno if not offered."""
    _rename(one_folder, one, other_folder, other, _RENAME_EXCHANGE)


def _rename(source_folder: int, source: str, target_folder: int, target: str, flag: int) -> None:
    import ctypes

    function = _renameat2()
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    done = function(source_folder, os.fsencode(source), target_folder, os.fsencode(target), flag)
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def clone_into(source: int, target: int) -> bool:
    """Make the open file `target` share the blocks of `source` (copy on write); False where that is not offered."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in UNSUPPORTED | {errno.EXDEV, errno.EPERM, errno.EBADF}:
            return False
        raise
    return True

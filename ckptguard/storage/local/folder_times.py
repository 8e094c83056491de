"""Whether a folder's times tell of every change of the names in it: a question of its file system."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

# Where this machine's kernel itself stamps a folder whenever a name in it comes or goes, by the numbers of statfs(2).
# Not NFS, SMB, FUSE and the like: there a server does, for others too, and what is known of its folders is cached.
_STAMPED_HERE = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # XFS
        0x9123683E,  # Btrfs
        0x01021994,  # tmpfs
        0x794C7630,  # overlay
        0x2FC12FC1,  # ZFS
        0xF2F52010,  # F2FS
        0xCA451A4E,  # bcachefs
    }
)


def folder_times_tell(path: str) -> bool:
    """Whether they do on the file system of this path; False where nobody can say."""
    return _file_system(path) in _STAMPED_HERE


def _file_system(path: str) -> int | None:
    import ctypes

    statfs = _statfs()
    answer = ctypes.create_string_buffer(1024)  # several times the size of the structure, which begins with the kind
    if statfs is None or statfs(os.fsencode(path), answer) != 0:
        return None
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF


@functools.cache
def _statfs() -> Callable[[bytes, object], int] | None:
    if sys.platform != "linux":
        return None
    import ctypes

    try:
        function = ctypes.CDLL(None).statfs
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function

"""Folders that nobody may read, for root too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_VERSION = 0x20080522  # of the system call: two words for each set
_READ_ANYTHING = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Powers(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def without_powers() -> Iterator[None]:
    """Give up root's right to read anything, in this thread and those that it starts."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, powers = _Header(_VERSION, 0), (_Powers * 2)()
    assert libc.capget(ctypes.byref(header), powers) == 0
    before = powers[0].effective
    powers[0].effective &= ~_READ_ANYTHING
    assert libc.capset(ctypes.byref(header), powers) == 0
    try:
        yield
    finally:
        powers[0].effective = before
        assert libc.capset(ctypes.byref(header), powers) == 0


@contextlib.contextmanager
def closed(*folders: Path, mode: int = 0) -> Iterator[None]:
    """Nobody may read these folders until the block ends."""
    before = {folder: folder.stat().st_mode for folder in folders}
    try:
        with without_powers():
            for folder in folders:
                folder.chmod(mode)
            yield
    finally:
        for folder, mode_before in before.items():
            folder.chmod(mode_before)


def give_up_powers() -> None:
    """Give them up for good, in a process that is about to run a program."""
    if os.geteuid() == 0 and sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        for power in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            assert libc.prctl(24, power, 0, 0, 0) == 0  # PR_CAPBSET_DROP

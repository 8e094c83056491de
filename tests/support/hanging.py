"""A command of ours in which one function hangs for ever, as on a dead mount: no signal and no exception ends it.

    python hanging.py MODULE:FUNCTION[~TEXT][#N] MARKER PACKAGE WORD...

It touches MARKER when something hangs. With TEXT only calls with this text in an argument hang, with N those from the
N-th on.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any


def hang(marker: Path) -> None:
    """Wait for a lock that nobody gives back. It is no lock of Python's, whose waits are interrupted by signals."""
    system, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    system.pthread_mutex_lock(lock)
    marker.touch()
    system.pthread_mutex_lock(lock)


def let_hang(where: str, marker: Path) -> None:
    """Replace the function that `where` names."""
    where, _, number = where.partition("#")
    place, _, text = where.partition("~")
    calls = itertools.count(1)
    module, _, names = place.partition(":")
    *above, name = names.split(".")
    owner: Any = functools.reduce(getattr, above, importlib.import_module(module))
    honest = getattr(owner, name)

    def hanging(*args: Any, **named: Any) -> Any:
        wanted = not text or any(text in str(arg) for arg in (*args, *named.values()))
        if wanted and next(calls) >= int(number or 1):
            hang(marker)
        return honest(*args, **named)

    setattr(owner, name, hanging)


if __name__ == "__main__":
    _, where, marker, package, *words = sys.argv
    sys.path.pop(0)  # the folder of this file
    let_hang(where, Path(marker))
    sys.argv = [package, *words]
    importlib.import_module(f"{package}.__main__").main()

"""Runs that are removed beside a daemon, as people and trainers remove them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

Remove = Callable[[Path], str | None]


def by_rm(run: Path) -> str | None:
    """Remove a run by `rm -rf`; what it said if it failed."""
    done = subprocess.run(["rm", "-rf", str(run)], capture_output=True, text=True, check=False)
    return done.stderr or str(done.returncode) if done.returncode else None


def by_rmtree(run: Path) -> str | None:
    """Remove a run as a trainer does that begins again; what it said if it failed."""
    try:
        shutil.rmtree(run)
    except OSError as error:
        return str(error)
    return None


class Removals(msgspec.Struct):
    """What came of removing runs."""

    runs: int = 0
    failed: list[str] = []
    left: list[str] = []
    messages: list[str] = []


def removal_steps(run: Path, first: str, begun: bool = False) -> Generator[None, None, bool]:
    """Remove a run as ``rm -rf`` does, one call of the system at a time; OSError where that would fail.

    The names in a folder are read before any of them is removed, and the folder itself is removed last. What has the
    name `first` comes first. Nobody can see that names are read: until something was removed (`begun`), it is no step.
    """
    try:
        names = sorted(os.listdir(run), key=lambda name: (name != first, name))
    except FileNotFoundError:
        return begun
    if begun:
        yield
    for name in names:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            begun = yield from removal_steps(path, first, begun)
        else:
            path.unlink(missing_ok=True)
            begun = True
            yield
    with contextlib.suppress(FileNotFoundError):
        run.rmdir()
    yield
    return True

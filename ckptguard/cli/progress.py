"""A bar for long reads: on stderr, on a terminal only, in bytes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptguard.runs.work import Work


@contextlib.contextmanager
def progress_bar(title: str, total: int | None = None) -> Iterator[Callable[[int], None] | None]:
    """Yield what to call with the bytes done since the last call, from any thread; None where nobody is watching."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total or None)
        yield lambda done: bar.advance(task, done)


@contextlib.contextmanager
def working(title: str, total: int | None = None, **how: Any) -> Iterator[Work]:
    """Yield the `Work` that is done in this way, with a bar that shows how far it is."""
    from ckptguard.runs.work import Work

    with progress_bar(title, total) as advance:
        yield Work(progress=advance, **how)


def bytes_below(target: str) -> int | None:
    """An estimate for the bar alone: the bytes of a local file or folder; None where that is not known.

    What links lead to counts once, as it is read once: in a hub cache the links are the files.
    """
    if "://" in target or not sys.stderr.isatty():
        return None
    if os.path.isfile(target):
        return os.path.getsize(target)
    from ckptguard.values.ids import RECORDS_FOLDER

    total = 0
    own: set[tuple[int, int]] = set()
    linked: dict[tuple[int, int], int] = {}
    for folder, folders, names in os.walk(target):
        folders[:] = [f for f in folders if f != RECORDS_FOLDER]
        for name in names:
            with contextlib.suppress(OSError):
                path = os.path.join(folder, name)
                info = os.stat(path)
                if os.path.islink(path):
                    linked[info.st_dev, info.st_ino] = info.st_size
                else:
                    own.add((info.st_dev, info.st_ino))
                    total += info.st_size
    return total + sum(size for place, size in linked.items() if place not in own)

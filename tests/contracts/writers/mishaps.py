"""What happens to the files of a checkpoint, each undone afterwards: nothing here reads what it damages by our code."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

Mishap = Callable[[Path, Path | None], contextlib.AbstractContextManager[bool]]
"""``with mishap(file, the same file one step earlier)``: yields whether there was anything to do."""


@contextlib.contextmanager
def removed(file: Path, earlier: Path | None) -> Iterator[bool]:
    """Gone."""
    aside = _aside(file)
    file.rename(aside)
    yield True
    aside.rename(file)


@contextlib.contextmanager
def renamed(file: Path, earlier: Path | None) -> Iterator[bool]:
    """There under another name, as somebody leaves it who meant to look at it later."""
    other = file.with_name(file.name + ".old")
    file.rename(other)
    yield True
    other.rename(file)


@contextlib.contextmanager
def truncated(file: Path, earlier: Path | None) -> Iterator[bool]:
    """Its first two thirds, with a fresh time: a writer that was killed."""
    content = file.read_bytes()
    with _rewritten(file, content[: len(content) * 2 // 3]):
        yield len(content) > 2


@contextlib.contextmanager
def emptied(file: Path, earlier: Path | None) -> Iterator[bool]:
    """Its name alone."""
    there = file.stat().st_size > 0
    with _rewritten(file, b""):
        yield there


@contextlib.contextmanager
def flipped(file: Path, earlier: Path | None) -> Iterator[bool]:
    """One bit in the middle, all times kept: rot."""
    content = bytearray(file.read_bytes())
    if content:
        content[len(content) // 2] ^= 16
    with _rewritten(file, bytes(content), keep_time=True):
        yield bool(content)


@contextlib.contextmanager
def stale(file: Path, earlier: Path | None) -> Iterator[bool]:
    """The same file of the step before, with a fresh time."""
    content = earlier.read_bytes() if earlier is not None and earlier.is_file() else file.read_bytes()
    differs = content != file.read_bytes()
    with _rewritten(file, content):
        yield differs


@contextlib.contextmanager
def stale_unseen(file: Path, earlier: Path | None) -> Iterator[bool]:
    """The same file of the step before, with the time of the file that it replaces."""
    content = earlier.read_bytes() if earlier is not None and earlier.is_file() else file.read_bytes()
    differs = content != file.read_bytes()
    with _rewritten(file, content, keep_time=True):
        yield differs


@contextlib.contextmanager
def swapped(file: Path, earlier: Path | None) -> Iterator[bool]:
    """Changed places with another shard or rank of its own kind."""
    others = (p for p in sorted(file.parent.iterdir()) if p != file and _shape(p) == _shape(file) and p.is_file())
    other = next((p for p in others if p.read_bytes() != file.read_bytes()), None)
    if other is not None:
        _exchange(file, other)
    yield other is not None
    if other is not None:
        _exchange(file, other)


MISHAPS: dict[str, Mishap] = {
    made.__name__: made for made in (removed, renamed, truncated, emptied, flipped, stale, stale_unseen, swapped)
}


def age(folder: Path) -> None:
    """Every file gets a time of its own, years apart, the newest in the future: contents stay."""
    for number, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file() and "_ckptguard" not in p.parts)):
        when = 86400 * 300 * (number + 1)
        os.utime(path, (when, when))


@contextlib.contextmanager
def _rewritten(file: Path, content: bytes, *, keep_time: bool = False) -> Iterator[None]:
    before, stat = file.read_bytes(), file.stat()
    file.write_bytes(content)
    if keep_time:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    yield
    file.write_bytes(before)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _exchange(one: Path, two: Path) -> None:
    aside = _aside(one)
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def _aside(file: Path) -> Path:
    """A name that belongs to no checkpoint."""
    return file.with_name(f".tmp-{file.name}")


def _shape(path: Path) -> str:
    return re.sub(r"\d+", "#", path.name)

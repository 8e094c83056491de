"""What is mounted where on this machine. Nothing here asks a mounted file system, which may hang."""

from __future__ import annotations

import contextlib


def mounts() -> list[tuple[str, str]]:
    """Return the mount points and their types of file system, those mounted last at the end. Empty if unknown."""
    found: list[tuple[str, str]] = []
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines,
    ):
        for line in lines:
            left, _, right = line.partition(" - ")
            where = left.split(" ")[4].encode("utf-8", "surrogateescape")
            where = where.decode("unicode_escape").encode("latin-1")
            found.append((where.decode("utf-8", "surrogateescape").rstrip("/") or "/", right.split(" ")[0]))
    return found


def mount_of(path: str) -> tuple[str, str]:
    """Return the mount point at or above an absolute path, and its type. Empty texts if that is unknown."""
    best = ("", "")
    for where, kind in mounts():
        if is_below(path, where) and len(where) >= len(best[0]):
            best = (where, kind)
    return best


def is_below(path: str, folder: str) -> bool:
    """True if a path is a folder or lies in it, by their names."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")

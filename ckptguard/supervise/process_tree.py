"""The processes below a command: found in ``/proc``, signalled by descriptor, reaped when orphaned. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One process as ``/proc`` shows it. A pid is reused; pid and `started` together are not."""

    pid: int
    parent: int
    started: int  # clock ticks since boot
    state: str

    @property
    def is_over(self) -> bool:
        """True if it has ended and only waits to be reaped."""
        return self.state in ("Z", "X")


def become_subreaper() -> bool:
    """Become the parent of orphans among our descendants, in any session. False if the system refuses."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def descendants(*roots: int, leave: Callable[[], Collection[int]] = tuple) -> list[Process]:
    """Return all running processes below `roots`, parents first, except `leave` and what is below those.

    `leave` is called after the processes were listed, so that it knows all of them.
    """
    below: dict[int, list[Process]] = {}
    for process in _processes():
        below.setdefault(process.parent, []).append(process)
    left = leave()
    found: list[Process] = []
    parents = list(roots)
    for parent in parents:  # grows while it is iterated
        children = [p for p in below.pop(parent, ()) if p.pid not in left]
        parents += [p.pid for p in children]
        found += [p for p in children if not p.is_over]
    return found


def marked(variable: str, value: str) -> list[Process]:
    """Return this user's running processes that were started with this variable in their environment."""
    wanted = b"\0" + os.fsencode(f"{variable}={value}") + b"\0"
    return [p for p in _processes() if not p.is_over and wanted in b"\0" + _environment(p.pid) + b"\0"]


def ancestors(pid: int) -> list[int]:
    """Return the processes that started it, nearest first."""
    parents = {p.pid: p.parent for p in _processes()}
    found: list[int] = []
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.append(pid)
    return found


def find(pid: int, started: int) -> Process | None:
    """Return exactly this process if it still runs."""
    found = _read(pid)
    return None if found is None or found.is_over or found.started != started else found


def started_at(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot; 0 if there is none."""
    found = _read(pid)
    return 0 if found is None else found.started


def send_signal(process: Process, number: int) -> None:
    """Signal exactly this process. Do nothing if it has ended, even if another process has its pid now."""
    descriptor = None
    with contextlib.suppress(OSError, AttributeError):  # old kernels and strict containers do not support it
        descriptor = os.pidfd_open(process.pid)
    try:
        now = _read(process.pid)
        if now is None or now.started != process.started:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if descriptor is not None:
                signal.pidfd_send_signal(descriptor, number)
            else:
                os.kill(process.pid, number)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def collect_orphans(leave: Callable[[], Collection[int]]) -> None:
    """Reap children that have ended, except `leave`, which other code waits for. It is called after the children were
    listed."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # no child has ended, so do not list every process of the machine
    except ChildProcessError:
        return  # there is no child
    mine = os.getpid()
    ended = [p for p in _processes() if p.parent == mine and p.is_over]
    left = leave() if ended else ()
    for process in ended:
        if process.pid not in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _processes() -> list[Process]:
    with contextlib.suppress(OSError):
        found = (_read(int(name)) for name in os.listdir("/proc") if name.isdigit())
        return [process for process in found if process is not None]
    return []  # then nothing below the command can be seen


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""  # another user's, or it ended meanwhile


def _read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            words = file.read().rpartition(b")")[2].split()
        return Process(pid, int(words[1]), int(words[19]), words[0].decode("ascii"))
    except (OSError, ValueError, IndexError):
        return None  # it ended meanwhile

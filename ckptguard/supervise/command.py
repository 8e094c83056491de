"""The supervised command: started with our streams, stopped politely, then killed with all processes below it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ckptguard.errors import SettingsError
from ckptguard.supervise.process_tree import Process, collect_orphans, descendants, send_signal, started_at
from ckptguard.values.ids import escape

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # the codes that shells and `env` use
# Signals that Python ignores itself. A command must not inherit that.
_RESTORED = tuple(getattr(signal, name) for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ") if hasattr(signal, name))
_LONGEST_KILL = 60.0  # seconds; a process that waits for a dead device or file system cannot be killed
_LOOK_AGAIN = 0.05


def become(argv: Sequence[str]) -> NoReturn:
    """Replace this process by a command: its signals and its exit code are the command's from now on.

    Raises SettingsError if it cannot be started.
    """
    for number in _RESTORED:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{escape(argv[0])} cannot be started: {why}") from error


Wait = Callable[[Callable[[], bool], float | None], None]


class SupervisedCommand:
    """One start of the command, with `environment` added to ours. `ours` returns our own child processes."""

    def __init__(self, argv: Sequence[str], mask: set[int], ours: Callable[[], list[int]]) -> None:
        self.argv, self._mask, self._ours = list(argv), mask, ours
        self.environment: dict[str, str] = {}
        # Processes below us from before, if `exec` started us: a sidecar of an entrypoint, a `tee` of our output.
        self._older = {(p.pid, p.started) for p in descendants(os.getpid())}
        self._pid: int | None = None
        self.status: int | None = None  # its exit code, 128 + n if signal n ended it; None while it runs
        self.trouble: str | None = None  # why it could not be started
        self._started_at = 0.0  # monotonic
        self.seconds = 0.0  # how long it ran

    def start(self) -> None:
        """Start it with our streams, folder and environment. If it cannot be started, its status is 126 or 127."""
        self.status, self._started_at, self.seconds = None, time.monotonic(), 0.0
        try:
            environment = {**os.environ, **self.environment}
            self._pid = os.posix_spawnp(
                self.argv[0], self.argv, environment, setsigmask=self._mask, setsigdef=_RESTORED
            )
        except (OSError, ValueError) as error:
            self.status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            why = error.strerror if isinstance(error, OSError) else error
            self.trouble = f"{escape(self.argv[0])} cannot be started: {why}"

    @property
    def process(self) -> tuple[int, int] | None:
        """(pid, start time) while it runs."""
        return None if self._pid is None else (self._pid, started_at(self._pid))

    @property
    def lost(self) -> str | None:
        """Why there can be no further start, if that is so."""
        return None

    @property
    def asked_elsewhere(self) -> bool:
        """True if somebody else was asked to end it."""
        return False

    def has_ended(self) -> bool:
        """Check if it has ended, and reap what ended below it."""
        if self._pid is not None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._pid, code = None, os.waitstatus_to_exitcode(status)
                    self.status = code if code >= 0 else 128 - code
                    self.seconds = time.monotonic() - self._started_at
        collect_orphans(lambda: [*self._ours(), *([self._pid] if self._pid is not None else [])])
        return self._pid is None

    def send(self, number: int) -> None:
        """Forward a signal to the command while it runs."""
        if self._pid is not None:  # not reaped yet, so the pid is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, number)

    def shares_our_terminal(self) -> bool:
        """True if it is in our process group: then it also gets the terminal's signals."""
        with contextlib.suppress(OSError):
            return self._pid is not None and os.getpgid(self._pid) == os.getpgrp()
        return False

    def kill(self) -> None:
        """Kill it, and everything below us that is not ours, once."""
        for process in self._below():
            send_signal(process, signal.SIGKILL)

    def stop(self, seconds: float, wait: Wait) -> None:
        """Ask it to end, wait `seconds`, then kill it with everything below it. `wait` waits for a condition or some
        seconds.

        If `status` is still None afterwards, it survived even that.
        """
        self.send(signal.SIGTERM)
        wait(self.has_ended, seconds)
        if not self.has_ended():
            self.kill()
            wait(self.has_ended, _LONGEST_KILL)

    def stop_the_rest(self, seconds: float, wait: Wait) -> bool:
        """Do the same with the processes that it left behind, in any session. False if one survives."""
        return end_all(self._left, seconds, wait)

    def _left(self) -> list[Process]:
        self.has_ended()  # reaps what ended
        return self._below()

    def _below(self) -> list[Process]:
        """Return the processes that the command started, in any session."""
        older = [p.pid for p in descendants(os.getpid()) if (p.pid, p.started) in self._older]
        return descendants(os.getpid(), leave=lambda: [*self._ours(), *older])


def end_all(left: Callable[[], list[Process]], seconds: float, wait: Wait) -> bool:
    """Ask all remaining processes to end, wait `seconds`, then kill them. False if one survives."""
    for process in left():
        send_signal(process, signal.SIGTERM)
    until(lambda: not left(), seconds, wait)
    deadline = time.monotonic() + _LONGEST_KILL
    while processes := left():
        if time.monotonic() > deadline:
            return False
        for process in processes:
            send_signal(process, signal.SIGKILL)
        until(lambda: not left(), _LOOK_AGAIN, wait)
    return True


def until(condition: Callable[[], bool], seconds: float, wait: Wait) -> None:
    """Wait in small steps: nothing reports the end of a grandchild before its parent ends, too."""
    deadline = time.monotonic() + seconds
    while not condition() and (left := deadline - time.monotonic()) > 0:
        wait(lambda: False, min(left, _LOOK_AGAIN))

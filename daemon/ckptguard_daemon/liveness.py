"""Whether the daemon makes progress, and who is told: systemd, and the probes of a container. And the time limit of
``--once``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterable

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.values.exit_codes import ExitCode
from ckptguard.values.retention_policy import span_text
from ckptguard_daemon.log import log

LONGEST_SILENCE = 600.0  # seconds without any progress; WatchdogSec of the systemd units is the same
_GRACE = 10.0  # seconds in which work that storage does not hold up ends
_TIMEOUT = 5.0  # seconds for an answer to a probe


class WorkStop(threading.Event):
    """The daemon's `stop` as some work sees it, which also ends at `until`, on the monotonic clock. It knows when the
    work last asked whether it must end.

    Whatever takes long asks again and again: each block of a read or a copy, each wait. So a thread that asks makes
    progress, also within a scan of hours. One that hangs in dead storage does not ask, but those of other runs do.
    """

    def __init__(self, stop: threading.Event, until: float | None = None) -> None:
        super().__init__()
        self._stop, self._until = stop, until
        self.asked_at = 0.0  # seconds since 1970

    def is_set(self) -> bool:
        """True if the work must end."""
        self.asked_at = time.time()
        return self._stop.is_set() or self._left == 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the work must end. Returns whether it must."""
        limits = [seconds for seconds in (timeout, self._left) if seconds is not None]
        self._stop.wait(min(limits, default=None))
        return self.is_set()

    @property
    def _left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())


def is_fresh(progress: float) -> bool:
    """True if progress was made at this time, and that is not long ago."""
    return time.time() - progress < LONGEST_SILENCE


class Systemd:
    """The service manager, if it started us as a service of Type=notify. Otherwise nothing is told. It never raises."""

    def __init__(self) -> None:
        # Taken out of the environment: a hook's command must not speak for us.
        place = os.fsencode(os.environ.pop("NOTIFY_SOCKET", ""))
        self._place = b"\0" + place[1:] if place[:1] == b"@" else place
        self._progress = 0.0
        self._status = ""

    def is_ready(self) -> None:
        """Tell that the daemon listens and works."""
        self._tell("READY=1")

    def tell_progress(self, progress: float, runs: Iterable[WatchedRun]) -> None:
        """Feed the watchdog if there was progress since the last call, and tell what changed in the runs."""
        if progress != self._progress:
            self._progress = progress
            self._tell("WATCHDOG=1")
        if self._status != (status := _sentence(runs)):
            self._status = status
            self._tell(f"STATUS={status}")

    def is_stopping(self) -> None:
        """Tell that the daemon ends."""
        self._tell("STOPPING=1\nSTATUS=stopping")

    def _tell(self, message: str) -> None:
        if self._place[:1] not in (b"/", b"\0"):
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(1.0)
            manager.sendto(message.encode(), self._place)


def _sentence(runs: Iterable[WatchedRun]) -> str:
    # One that nobody looked at yet "waits", too.
    states = [run.state if run.trouble or run.state == "ended" else "guarded" for run in runs]
    reported = {"waiting": "not there yet", "failing": "cannot be read", "ended": "ended"}
    counts = [f"{states.count(state)} {words}" for state, words in reported.items() if state in states]
    return ", ".join([f"watching {len(states)} run{'' if len(states) == 1 else 's'}", *counts])


def probe(address: str, path: str) -> str | None:
    """Ask the daemon at a socket. Returns what is wrong, or None if it answers that all is well."""
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_TIMEOUT)
        connection.sock.connect(address)
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no daemon answers at {address}: {getattr(error, 'strerror', None) or error}"
    finally:
        connection.close()
    return None if status == 200 else f"the daemon at {address} answers {path} with status {status}"


class TimeLimit:
    """Ends the work after some seconds by setting `stop`. What has no verdict then stays pending.

    Work that hangs in dead storage cannot be stopped: the process then ends all the same.
    """

    def __init__(self, seconds: float, stop: threading.Event) -> None:
        self._seconds, self._stop = seconds, stop
        self.is_over = False
        threading.Thread(target=self._wait, name="limit", daemon=True).start()

    @staticmethod
    def code_of(code: int) -> int:
        """Return the exit code of work that was cut off: what it could not tell is undecided, not a failure."""
        return code if code in (ExitCode.GOOD, ExitCode.BAD) else ExitCode.UNDECIDED

    def _wait(self) -> None:
        never = threading.Event()
        never.wait(self._seconds)
        self.is_over = True
        log("limit", level="warning", limit=span_text(self._seconds))
        self._stop.set()
        never.wait(_GRACE)
        log("limit_forced", level="error")
        os._exit(ExitCode.UNDECIDED)

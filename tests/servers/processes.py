"""Server processes for tests: a free port, a start that waits for an answer, an end that leaves nothing running."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

START_SECONDS = 60.0


class NotInstalledError(Exception):
    """A program that this server needs is not on this machine; the message says how it gets there. `required`:
    whether CI could have installed it."""

    def __init__(self, message: str, *, required: bool = True) -> None:
        super().__init__(message)
        self.required = required


def needed(*programs: str, package: str) -> list[str]:
    """The paths of programs, looked for where system programs lie, too."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/usr/lib/openssh"))
    found = [(program, shutil.which(program, path=path)) for program in programs]
    absent = [program for program, place in found if place is None]
    if absent:
        raise NotInstalledError(f"no {', '.join(absent)} here: python dev.py test installs {package} where it may")
    return [str(place) for _, place in found]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody answers on a loopback port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `ready()`; an error with the end of the log if the process ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            text = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            raise RuntimeError(f"{process.args!r} did not start (exit code {process.poll()}):\n{text}")
        time.sleep(0.05)


def _die_with_parent() -> None:
    """A server never outlives tests that were killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, ready: Callable[[], bool], **options: object) -> Iterator[None]:
    """The command runs, and is ready, in this block."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            **options,  # type: ignore[call-overload]
        )
    try:
        wait_until(ready, process, log)
        yield
    finally:
        for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 30)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                break

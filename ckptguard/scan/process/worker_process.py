"""Control one scanning process: start it, send requests, and end it when it exceeds its limits."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import msgspec

from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, StorageError, WorkerError
from ckptguard.scan.process.low_priority import leads_session
from ckptguard.scan.process.messages import LARGEST_ANSWER, PREFIX, Answer, Request, frame
from ckptguard.scan.result import Scan
from ckptguard.values.ids import escape
from ckptguard.values.record_text import decodable
from ckptguard.values.settings import Settings

_TICK = 0.1  # how soon a stop is noticed
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one scanning process: `memory` bytes of address space, and `seconds` for a scan.

    It ends after `idle` seconds without a request.
    """

    memory: int
    seconds: float
    idle: float = 60.0


def limits_of(settings: Settings) -> WorkerLimits:
    """Return the limits from the settings."""
    return WorkerLimits(memory=settings.worker_memory, seconds=settings.worker_seconds)


class WorkerProcess:
    """A process that scans local files, within limits.

    Call `start` from a thread that lives as long as this: the system ends the process with the thread that started it.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._starting = threading.Lock()
        self._yields = False  # it was asked to, and cannot go back

    @property
    def pid(self) -> int | None:
        """The id of the process while it exists, also while it starts."""
        with self._starting:
            process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self, *, yields: bool = False) -> None:
        """Start the process if there is none that can do this work. Raises WorkerError if that fails."""
        if self._process is not None and self._process.poll() is None and (yields or not self._yields):
            self._yields = yields
            return
        self.end()  # it had been idle
        self._yields = yields
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        limits = self._limits
        apart = leads_session()  # then the process gets a session of its own, which it can lower as a whole
        arguments = (str(limits.memory), str(limits.idle), str(os.getpid()))
        try:
            with self._starting:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ckptguard.scan.process.worker", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._complaints,
                    bufsize=0,
                    close_fds=True,
                    cwd="/",
                    env=scrubbed(os.environ),
                    process_group=None if apart else 0,  # in either case a Ctrl-C in our terminal is for us alone
                    start_new_session=apart,
                )
        except OSError as error:
            raise WorkerError(f"the scanning process cannot be started: {error.strerror}") from error

    def scan(self, request: Request, seconds: float, stopped: Callable[[], bool]) -> Scan:
        """Return what the started process finds. It also raises the errors of the scan itself.

        Raises WorkerError if it died, hung, sent nonsense, took more than `seconds`, or was `stopped`. Then it is gone.
        """
        try:
            answer = self._exchange(frame(request), seconds, stopped)
        except WorkerError:
            self.end()
            raise
        return _scan_of(answer)

    def _exchange(self, request: bytes, seconds: float, stopped: Callable[[], bool]) -> Answer:
        deadline = time.monotonic() + seconds
        try:
            return self._converse(request, seconds, deadline, stopped)
        except _Silent:
            assert self._process is not None
            self._process.wait()
            if self._process.returncode:
                raise WorkerError(f"the scanning process died ({self._last_words(self._process)})") from None
        self.start(yields=self._yields)  # it was idle and ended just when it was asked
        try:
            return self._converse(request, seconds, deadline, stopped)
        except _Silent as silent:
            raise WorkerError("the scanning process ended without an answer") from silent

    def _converse(self, request: bytes, seconds: float, deadline: float, stopped: Callable[[], bool]) -> Answer:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        unsent, answer, expected = memoryview(request), bytearray(), -1
        reading, writing = self._process.stdout.fileno(), self._process.stdin.fileno()
        while expected < 0 or len(answer) < expected:
            if stopped():
                raise WorkerError("the scan was stopped")
            if time.monotonic() > deadline:
                raise WorkerError(f"the scan took longer than {seconds:g} seconds (setting worker_seconds)")
            ready = select.select([reading], [writing] if unsent else [], [], _TICK)
            try:
                if ready[1]:
                    unsent = unsent[os.write(writing, unsent[: select.PIPE_BUF]) :]
                if ready[0]:
                    block = os.read(reading, 1 << 20)
                    if not block:
                        raise _Silent
                    answer += block
            except BrokenPipeError as error:
                raise _Silent from error
            if expected < 0 and len(answer) >= PREFIX.size:
                expected = PREFIX.size + int(PREFIX.unpack_from(answer)[0])
                if expected > LARGEST_ANSWER:
                    raise WorkerError("the scanning process sent an answer that is too large")
        try:
            return msgspec.msgpack.decode(memoryview(answer)[PREFIX.size : expected], type=decodable(Answer))
        except msgspec.DecodeError as error:
            raise WorkerError("the scanning process sent an answer that cannot be understood") from error

    def end(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        complaints, self._complaints = self._complaints, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        if complaints is not None:
            complaints.close()

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        code = process.returncode
        ended = f"exit code {code}"
        if code < 0:
            ended = f"killed by {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"
        if self._complaints is None:
            return ended
        self._complaints.seek(0)
        lines = self._complaints.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
        return f"{ended}: {escape(lines[-1])}" if lines else ended


def scrubbed(environ: Mapping[str, str], places: Sequence[str] | None = None) -> dict[str, str]:
    """Return the environment of a process for hostile files or others' code: what Python needs, and nothing secret.
    `places` are where it finds modules; None: where this process does."""
    kept = {name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith("LC_")}
    paths = os.pathsep.join(os.path.abspath(path) for path in (sys.path if places is None else places) if path)
    # Unused thread pools and arenas would fill the limited address space.
    return {**kept, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class _Silent(Exception):
    """The process closed its side without an answer."""


def _scan_of(answer: Answer) -> Scan:
    if answer.scan is not None:
        return answer.scan
    kind = _kinds().get(answer.kind, WorkerError)
    if issubclass(kind, StorageError | ChangedWhileReadError):
        raise kind(answer.message, key=answer.key)
    raise kind(answer.message)


def _kinds() -> dict[str, type[CouldNotTellError]]:
    found: dict[str, type[CouldNotTellError]] = {}
    pending: list[type[CouldNotTellError]] = [CouldNotTellError]
    while pending:
        kind = pending.pop()
        found.setdefault(kind.kind, kind)
        pending += kind.__subclasses__()
    return found

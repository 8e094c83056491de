"""The daemon's side of the scanning process: start it, ask it, and end it when it takes too much."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

import msgspec

from ckptguard.config import Settings
from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, StorageError, WorkerError
from ckptguard.names import escape
from ckptguard.scan import Progress, ScanOptions, scan_files
from ckptguard.scan.result import Scan
from ckptguard.storage import Storage
from ckptguard_daemon.frames import LARGEST_ANSWER, PREFIX, Answer, Request, frame

IDLE_SECONDS = 60.0
_TICK = 0.1  # how soon a stop is noticed
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


class WorkerScanner:
    """A `Scanner` that reads local files in a process of its own.

    That process is reused, and ends when it was idle for a while. When it dies, hangs, or answers nonsense, the scan
    raises WorkerError: it could not be told. Setting `stop` ends a scan at once. Storages that are not local are
    scanned inline, because a process without secrets could not open them.

    Call it from a thread that lives as long as the scanner: the system ends the process with the thread that
    started it.
    """

    def __init__(self, settings: Settings, stop: threading.Event, *, idle: float = IDLE_SECONDS) -> None:
        self._settings = settings
        self._stop = stop
        self._idle = idle
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._lock = threading.Lock()

    def __call__(
        self,
        storage: Storage,
        keys: Sequence[str],
        options: ScanOptions | None = None,
        progress: Progress | None = None,
    ) -> Scan:
        options = options or ScanOptions()
        if storage.root is None:
            return scan_files(storage, keys, options, progress)
        seconds = self._settings.worker_seconds
        threads = max(2, os.cpu_count() or 2)
        # Training's files matter more than ours: what was read here is dropped from the page cache.
        options = msgspec.structs.replace(options, spare_cache=True)
        request = Request(url=storage.root, keys=tuple(keys), options=options, cpu_seconds=seconds * threads)
        with self._lock:
            try:
                scan = _scan_of(self._ask(frame(request), time.monotonic() + seconds))
            except WorkerError:
                self._end()
                raise
        if progress is not None:
            progress(sum(f.entry.size for f in scan.files))
        return scan

    @property
    def pid(self) -> int | None:
        """The scanning process, while there is one."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def close(self) -> None:
        """End the process. Called after `stop` was set, it does not wait for a scan."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes, deadline: float) -> Answer:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it had been idle
        reused = self._process is not None
        process = self._process or self._start()
        try:
            return self._exchange(process, request, deadline)
        except _Silent as silent:
            process.wait()
            if reused and process.returncode == 0:  # it ended, idle, at the very moment it was asked
                self._end()
                return self._ask(request, deadline)
            raise WorkerError(f"the scanning process died ({self._last_words(process)})") from silent

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, deadline: float) -> Answer:
        assert process.stdin is not None
        assert process.stdout is not None
        unsent, answer, expected = memoryview(request), bytearray(), -1
        reading, writing = process.stdout.fileno(), process.stdin.fileno()
        while expected < 0 or len(answer) < expected:
            if self._stop.is_set():
                raise WorkerError("the daemon is stopping")
            if time.monotonic() > deadline:
                raise WorkerError(f"the scan took longer than {self._settings.worker_seconds:g} seconds")
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
                    raise WorkerError("the scanning process answers with too much")
        try:
            return msgspec.msgpack.decode(memoryview(answer)[PREFIX.size : expected], type=Answer)
        except msgspec.DecodeError as error:
            raise WorkerError("the scanning process answers with nonsense") from error

    def _start(self) -> subprocess.Popen[bytes]:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        arguments = (str(self._settings.worker_memory), str(self._idle), str(os.getpid()))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ckptguard_daemon.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                bufsize=0,
                close_fds=True,
                cwd="/",
                env=scrubbed(os.environ),
                process_group=0,  # a Ctrl-C in the daemon's terminal is the daemon's business
            )
        except OSError as error:
            raise WorkerError(f"the scanning process cannot be started: {error.strerror}") from error
        return self._process

    def _end(self) -> None:
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


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the scanning process: what Python needs to start and to find us, and nothing secret."""
    kept = {name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith("LC_")}
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    # Thread pools and arenas that nobody uses here would eat the limited address space.
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

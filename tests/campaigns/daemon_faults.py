"""Daemons that training asks in vain: dead, slow, restarting; and a real one that is killed and started again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ckptguard.errors import CkptguardError
from ckptguard.records.daemon_record import DaemonRecord, write_daemon_record
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import this_host
from ckptguard.training.client import is_alive

KINDS = ("dead", "slow", "restarting", "real")
_BODY = json.dumps({"series": "step-#", "id": "999.1", "step": 999, "path": "/nowhere", "kept": False})
_ANSWER = f"HTTP/1.1 200 OK\r\nContent-Length: {len(_BODY)}\r\n\r\n{_BODY}".encode()
_BUSY = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 25\r\n\r\n{"error": {"kind": "busy"}}'[:-1]


@contextlib.contextmanager
def a_daemon(kind: str, run: Path, generator: random.Random) -> Iterator[Daemon]:
    """A daemon of this kind for a run, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="cg-"))  # short, for sockets
    daemon = {"real": RealDaemon, "restarting": RestartingDaemon}.get(kind, SilentDaemon)(folder, run, generator)
    try:
        daemon.start(listens=kind != "dead")
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(folder)


class Daemon:
    """What the campaign does with any of them. `strike` is called when the fault happens."""

    def __init__(self, folder: Path, run: Path, generator: random.Random) -> None:
        self.folder, self.run, self.generator = folder, run, generator

    def start(self, *, listens: bool = True) -> None:
        """Begin."""

    def strike(self) -> None:
        """Have trouble of its own."""

    def stop(self) -> None:
        """End."""


class SilentDaemon(Daemon):
    """One that died and left its address behind, or one that takes connections and never answers."""

    def start(self, *, listens: bool = True) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        bind(self._server, self.run, self.folder / "socket")
        if listens:
            self._server.listen()
        else:
            self._server.close()

    def stop(self) -> None:
        self._server.close()


class RestartingDaemon(Daemon):
    """One that comes and goes under new addresses, and says something different each time: nothing, half an answer,
    an answer that drips, that it is not ready, or a checkpoint that does not exist."""

    def start(self, *, listens: bool = True) -> None:
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        for number in itertools.count():
            with socket.socket(socket.AF_UNIX) as server:
                with contextlib.suppress(CkptguardError):  # the disk may be full for its address too
                    bind(server, self.run, self.folder / f"socket-{number}")
                server.listen()
                server.settimeout(0.05)
                self._ready.set()
                for _ in range(self.generator.randrange(1, 4)):
                    if not self._answer(server):
                        return

    def _answer(self, server: socket.socket) -> bool:
        while not self._stop.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection, contextlib.suppress(OSError):
                text = self.generator.choice((b"", _ANSWER[: len(_ANSWER) // 2], _ANSWER, _BUSY, b"\x00" * 5000))
                if self.generator.random() < 0.3:
                    for byte in text[:20]:
                        connection.sendall(bytes([byte]))
                        if self._stop.wait(0.02):
                            break
                else:
                    connection.sendall(text)
            return True
        return False


class RealDaemon(Daemon):
    """The daemon itself; struck, it is killed and started from scratch while training goes on."""

    def start(self, *, listens: bool = True) -> None:
        self._process = self._begin()
        until = time.monotonic() + 100
        while not is_alive(open_run(str(self.run))):
            assert time.monotonic() < until, self._log.read_text()
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.02)

    def strike(self) -> None:
        self._process.kill()
        self._process.wait()
        if self.generator.random() < 0.7:
            self._process = self._begin()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ckptguard_daemon", str(self.run)]
        with self._log.open("ab") as log:
            quick = {"CKPTGUARD_SETTLE": "0.1", "CKPTGUARD_SCAN_INTERVAL": "1"}
            environment = {**os.environ, **quick, "XDG_RUNTIME_DIR": str(self.folder)}
            return subprocess.Popen(command, stderr=log, env=environment)


def bind(server: socket.socket, run: Path, place: Path) -> None:
    """Have a socket at a place, and the run name it as its daemon's."""
    server.bind(str(place))
    host, boot = this_host()
    record = DaemonRecord(address=str(place), host=host, boot_id=boot, pid=1, started_at="2026-01-01T00:00:00Z")
    write_daemon_record(open_run(str(run)), record)

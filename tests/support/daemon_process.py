"""A real daemon as a process of its own, and what tests ask it."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from click.testing import CliRunner

from ckptguard.storage import normalise_url
from ckptguard.values.ids import run_id_of
from support.tiny_files import safetensors_head

_Found = TypeVar("_Found")
PATIENCE = 120.0  # only what hangs takes longer, however busy the machine is


def until(look: Callable[[], _Found | None], what: str, patience: float = PATIENCE) -> _Found:
    """What `look` finds, as soon as it finds something; fails loudly when it never does."""
    deadline = time.monotonic() + patience
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not happen in {patience:g} seconds"
        threading.Event().wait(0.02)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process is there and runs: where nobody waits for it, what is left of it stays."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def was_asked(worker: int) -> bool:
    """Whether a request waits in the pipe to a (stopped) scanning process."""
    pipe = os.open(f"/proc/{worker}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        waiting = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
    finally:
        os.close(pipe)
    return int.from_bytes(waiting, sys.byteorder) > 0


def save(run: Path, step: int, *, nan: bool = False, age: float = 60.0, numbers: int = 1000) -> Path:
    """A small finished save, old enough to count as quiet unless told otherwise; written under another name first, as
    safetensors does."""
    weights = np.random.default_rng(step).standard_normal(numbers).astype("<f4")
    if nan:
        weights[17] = np.nan
    path = run / f"net-{step}.safetensors"
    temporary = run / f".tmp-{step}"
    temporary.write_bytes(safetensors_head({"model.w": [numbers]}) + weights.tobytes())
    os.utime(temporary, (time.time() - age, time.time() - age))
    temporary.rename(path)
    return path


def request(
    address: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """(status, document) of one request over a Unix socket."""
    connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(PATIENCE)
        connection.sock.connect(address)
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def once(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`ckptguard-daemon ... --once`, ended."""
    return subprocess.run(
        [sys.executable, "-m", "ckptguard_daemon", *map(str, arguments), "--once"],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,  # what settles is waited for, for a minute and more
        env={**os.environ, "CKPTGUARD_SETTLE": "0.1", **environment},
        check=False,
    )


def printed(name: str) -> str:
    """What `ckptguard-daemon --example` prints, without a run being named."""
    from ckptguard_daemon.command import command

    answer = CliRunner().invoke(command, ["--example", name])
    assert answer.exit_code == 0
    return answer.output


QUICK = {"CKPTGUARD_SETTLE": "0.2", "CKPTGUARD_SCAN_INTERVAL": "1"}


class DaemonProcess:
    """``ckptguard-daemon`` over some runs, or another `program` that becomes it."""

    def __init__(
        self,
        folder: Path,
        *runs: Path,
        arguments: tuple[str, ...] = (),
        program: tuple[str, ...] = ("-m", "ckptguard_daemon"),
        **environment: str,
    ) -> None:
        self.runs = runs
        self.folder = folder
        self.log_path = folder / f"log-{len(list(folder.glob('log-*')))}"
        command = [sys.executable, *program, *map(str, runs)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPTGUARD_")}
        self.out_path = self.log_path.with_name(f"out-{self.log_path.name}")
        with self.log_path.open("wb") as log, self.out_path.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=out,
                stderr=log,
                cwd=folder,
                env={**kept, "XDG_RUNTIME_DIR": str(folder), **QUICK, **environment},
            )

    @property
    def address(self) -> str:
        """The socket's path, once the daemon says that it listens."""
        return str(self.logged("started")["socket"])

    def logged(self, event: str, **fields: object) -> dict[str, Any]:
        """The first log line of this event with these fields, once it is there."""

        def look() -> dict[str, Any] | None:
            lines = self.log_lines()
            found = [n for n in lines if n["event"] == event and fields.items() <= n.items()]
            assert found or self.process.poll() is None, f"the daemon ended: {self.log_path.read_text()}"
            return found[0] if found else None

        return until(look, f"{event} {fields}")

    def log_lines(self) -> list[dict[str, Any]]:
        """All whole log lines so far."""
        text = self.log_path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def ask(self, path: str, *, run: Path | None = None) -> tuple[int, Any]:
        """GET below the run's URL."""
        return request(self.address, "GET", self.url(path, run=run))

    def post(self, path: str, body: object = None, *, run: Path | None = None) -> tuple[int, Any]:
        """POST below the run's URL."""
        data = None if body is None else json.dumps(body).encode()
        return request(self.address, "POST", self.url(path, run=run), data)

    def url(self, path: str, *, run: Path | None = None) -> str:
        """The path of a URL below a run."""
        return f"/v1/runs/{run_id_of(normalise_url(run or self.runs[0]))}/{path}"

    def known_good(self, step: int) -> dict[str, Any]:
        """The answer to a question that waits for verdicts, once it names this step."""

        def look() -> dict[str, Any] | None:
            status, answer = self.ask("known-good?wait_seconds=20")
            return answer if status == 200 and answer["step"] == step else None

        return until(look, f"known-good {step}")

    def outcome(self, step: int) -> str:
        """The outcome of a step's checkpoint, once there is a verdict."""

        def look() -> str | None:
            _, answer = self.ask("checkpoints")
            states = [c for c in answer["checkpoints"] if c["step"] == step and c["outcome"] != "pending"]
            return states[-1]["outcome"] if states else None

        return until(look, f"a verdict on {step}")

    def child(self) -> int:
        """The scanning process, once there is one."""

        def look() -> int | None:
            words = []
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                with contextlib.suppress(OSError):  # a thread that ended meanwhile
                    words += (task / "children").read_text().split()
            return next((int(word) for word in words if self._has_begun(word)), None)

        return until(look, "a scanning process")

    def _has_begun(self, pid: str) -> bool:
        """Whether a process does what it was started for: before that it has the arguments of its parent."""
        with contextlib.suppress(OSError):
            own, given = (Path(f"/proc/{one}/cmdline").read_bytes() for one in (pid, self.process.pid))
            return own not in (b"", given)
        return False

    def stop(self) -> int:
        """End the daemon cleanly; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(timeout=PATIENCE)


Starter = Callable[..., DaemonProcess]

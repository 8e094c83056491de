"""Processes that need torch or a framework, each as fresh as a new Python but for the imports, which are made once."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
TESTS = str(_HERE.parent)  # what a script needs on its path to import `support`
# Half of torch is imported by the first update of an optimizer.
TORCH = (
    "torch",
    "torch._dynamo",
    "torch._functorch.deprecated",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "ckptguard.verification.target",
    "ckptguard.scan.one_file",
    "ckptguard.scan.byte_pass",
    "ckptguard.training.guard",
    "ckptguard.training.sharded.sharded_store",
)
HUGGING_FACE = (*TORCH, "transformers.trainer", "transformers.models.qwen2.modeling_qwen2", "peft", "deepspeed")
LIGHTNING = (*TORCH, "lightning")
# Some of it is read when a framework is imported.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_servers: dict[tuple[str, ...], socket.socket] = {}


class Forked:
    """A process that runs a script, to be used like a `subprocess.Popen`. Its output is kept for `communicate`; where
    it is `piped`, standard input and output are pipes. `path` comes first on its ``sys.path``."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        name: str = "<string>",
        path: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        cwd: str | Path = ".",
        piped: bool = False,
        imported: tuple[str, ...] = TORCH,
    ) -> None:
        environment = dict(os.environ) if environment is None else environment
        self.pid, self.returncode = 0, None
        self._link, theirs = socket.socketpair()
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.stdin = self.stdout = None
        given, out = os.open(os.devnull, os.O_RDONLY), os.dup(self._out.fileno())
        if piped:
            os.close(given)
            os.close(out)
            given, told = os.pipe()
            heard, out = os.pipe()
            self.stdin, self.stdout = open(told, "wb", buffering=0), open(heard, encoding="utf-8")  # noqa: SIM115
        request = {
            "code": code,
            "name": name,
            "argv": [name if name != "<string>" else "-c", *map(str, arguments)],
            "path": [str(Path(name).parent) if name != "<string>" else "", *path],
            "environment": environment,
            "cwd": os.path.abspath(cwd),
        }
        body = json.dumps(request).encode()
        try:
            control = _server(imported)
            socket.send_fds(control, [len(body).to_bytes(4, "big")], [theirs.fileno(), given, out, self._err.fileno()])
            control.sendall(body)
        finally:
            theirs.close()
            os.close(given)
            os.close(out)
        self.pid = self._told()

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and select.select([self._link], [], [], 0)[0]:
            self.returncode = self._told()
        return self.returncode

    def wait(self, timeout: float = 250) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None and not select.select([self._link], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked script", timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as the kernel would."""
        self.send_signal(9)

    def communicate(self, timeout: float = 250) -> tuple[str, str]:
        """What it printed, once it has ended; it is killed if it does not."""
        end = time.monotonic() + timeout
        try:
            texts = [self.stdout.read() if self.stdout else ""]
            self.wait(max(0.0, end - time.monotonic()))
            for file in (self._out, self._err):
                file.seek(0)
                texts.append(file.read().decode())
        finally:
            self.close()
        return texts[0] + texts[1], texts[2]

    def close(self) -> None:
        """Kill it if it has not ended."""
        self.kill()
        if self.returncode is None:
            self.wait()
        for file in (self.stdin, self.stdout, self._out, self._err):
            if file is not None:
                file.close()
        self._link.close()

    def _told(self) -> int:
        """The next number from the server; no byte more is read, for then the next one would not be waited for."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self._link.recv(1)
            assert byte, f"the Python that forks has ended; see its standard error ({line!r})"
            line += byte
        return int(line)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def wait_for_all(processes: list[Forked], timeout: float) -> None:
    """Return when all have ended; the others are killed when one fails or the time is over."""
    end, left = time.monotonic() + timeout, processes
    while left:
        ready = select.select([process._link for process in left], [], [], max(0.0, end - time.monotonic()))[0]
        if not ready or any(process.poll() for process in left):
            for process in left:
                process.kill()
            return
        left = [process for process in left if process.poll() is None]


def _server(imported: tuple[str, ...]) -> socket.socket:
    """Where a Python listens that has imported some modules."""
    if imported not in _servers:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, str(_HERE / "fork_server.py"), str(theirs.fileno()), *imported],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT,
        )
        theirs.close()
        _servers[imported] = ours
        atexit.register(_stop, ours, process)
    return _servers[imported]


def _stop(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait(30)

"""Supervised commands as processes of their own, which end with their test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from supervised_training import PATIENCE, until
from support.commands import invoke, process, root  # noqa: F401 - fixtures

HERE = Path(__file__).resolve().parent
PREAMBLE = """import json, os, signal, subprocess, sys
from pathlib import Path
from supervised_training import *
run = Path(sys.argv[1])
"""


class Done(NamedTuple):
    """How supervise ended."""

    code: int
    stdout: str
    stderr: str


class Supervising:
    """``ckptguard supervise`` over a script, in a session of its own."""

    def __init__(self, folder: Path, run: Path, text: str, *options: str) -> None:
        self.script = folder / "train.py"
        self.script.write_text(PREAMBLE + text, encoding="utf-8")
        self.errors = folder / "stderr"
        self.command = [sys.executable, "-m", "ckptguard", "supervise", str(run), "--stop-seconds", "30", *options]
        self.command += ["--", sys.executable, str(self.script), str(run)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
        self.environment = {
            **kept,
            "CKPTGUARD_SETTLE": "0",
            "CKPTGUARD_SCAN_INTERVAL": "0.05",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
            "XDG_RUNTIME_DIR": str(folder),
        }
        self.process: subprocess.Popen[str] | None = None

    def start(self, **streams: object) -> subprocess.Popen[str]:
        """Start it in the background; what it says on stderr goes to a file."""
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stderr=errors,
                text=True,
                **{"start_new_session": True, "stdout": subprocess.PIPE, "stdin": subprocess.PIPE, **streams},  # type: ignore[call-overload]
            )
        return self.process

    def finish(self, stdin: str = "") -> Done:
        """Wait for its end."""
        assert self.process is not None
        stdout, _ = self.process.communicate(stdin, timeout=PATIENCE)
        return Done(self.process.returncode, stdout, self.errors.read_text())

    def says(self, text: str) -> None:
        """Wait until it says something."""
        until(lambda: text in self.errors.read_text(), text)

    def kill(self) -> None:
        """End all of it, whatever state it is in."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE)


@pytest.fixture
def run(tmp_path):
    """A run that the command will make."""
    return tmp_path / "run"


@pytest.fixture
def supervising(tmp_path, run):
    """Prepare a script for supervision."""
    made = []

    def prepare(text, *options, folder=tmp_path, run=run):
        made.append(Supervising(folder, run, text, *options))
        return made[-1]

    yield prepare
    for one in made:
        one.kill()


@pytest.fixture
def supervise(supervising):
    """Supervise a script to its end."""

    def call(text, *options, stdin=""):
        one = supervising(text, *options)
        one.start()
        return one.finish(stdin)

    return call


@pytest.fixture
def plainly(tmp_path, run):
    """Run a script without supervision."""

    started = []

    def call(text):
        one = Supervising(tmp_path, run, text)
        started.append(subprocess.Popen([sys.executable, one.script, run], env=one.environment, start_new_session=True))
        assert started[-1].wait(PATIENCE) == 0

    yield call
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait(PATIENCE)

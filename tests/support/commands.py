"""Fixtures: the command line over small real runs, in this process or in one of its own."""

import json
import os
import pty
import subprocess
import sys

import click.testing
import pytest

from ckptguard.cli.entry import commands
from support import faults
from support.runs import write_torch


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty run's folder; files count as quiet at once."""
    monkeypatch.setenv("CKPTGUARD_SETTLE", "0")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def three(root):
    """A run with torch files of steps 100, 200 and 300, not verified yet."""
    for step in (100, 200, 300):
        write_torch(root, step, seed=step)
    return root


@pytest.fixture
def invoke(root):
    """Run a command in this process: the result has exit_code, stdout and stderr."""

    def call(*arguments):
        result = click.testing.CliRunner().invoke(commands, [str(a) for a in arguments], prog_name="ckptguard")
        assert "Traceback" not in result.output
        return result

    return call


@pytest.fixture
def document(invoke):
    """Run a command with --json: its exit code and the document it printed."""

    def call(*arguments):
        result = invoke(*arguments, "--json")
        parsed = json.loads(result.stdout)
        assert list(parsed)[:2] == ["schema", "command"]
        assert (parsed["schema"], parsed["command"]) == (1, arguments[0])
        return result.exit_code, parsed

    return call


@pytest.fixture
def process(root):
    """Run the command as a process of its own, with stdout and stderr apart."""

    def call(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "ckptguard", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
            env={**os.environ, **environment},
        )

    return call


@pytest.fixture
def verified(three, invoke):
    """The three checkpoints, verified and recorded."""
    assert invoke("verify", three).exit_code == 0
    return three


@pytest.fixture
def flip():
    """Flip one bit in the middle of a file and keep its times, as failing hardware does."""
    return faults.flip


def on_a_terminal(arguments, *, stdout, columns=80, **variables):
    """Run a command with stderr, and stdout if asked, on a pseudo-terminal: (code, piped stdout, terminal's text)."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ckptguard", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **variables}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs if stdout else subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    piped = b"" if stdout else process.stdout.read()
    shown = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not block:
            break
        shown += block
    os.close(ours)
    if process.stdout is not None:
        process.stdout.close()
    return process.wait(timeout=250), piped.decode(), shown.decode()

"""list --watch: again whenever something changed, until it is interrupted."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.runs import write_torch

from ckptguard.cli.commands import list_checkpoints


@pytest.fixture
def watching(invoke, monkeypatch):
    """Run `list --watch`; each of these is done between two looks, and then Ctrl-C is pressed."""

    def call(run, *between):
        left = list(between)

        def wait(seconds):
            assert seconds > 0
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(list_checkpoints, "wait", wait)
        return invoke("list", "--watch", run)

    return call


def test_a_change_is_shown(watching, invoke, three):
    """A new save, and then its verdict."""
    result = watching(three, lambda: write_torch(three, 400, seed=4), lambda: invoke_alone(three))
    assert result.exit_code == 130
    assert result.stdout.count("PATH") == 3
    assert result.stdout.count("net-400.pt") == 2
    last = result.stdout.rpartition("PATH")[2].splitlines()
    assert [line.split()[1] for line in last[1:]] == ["good"] * 4


def invoke_alone(run):
    """Verify as another process would: the command that watches keeps its own state."""
    from ckptguard.values.settings import Settings
    from ckptguard.verification.target import verify_target

    verify_target(str(run), Settings(settle=0.0))


def test_no_change_is_not_shown_again(watching, verified):
    """However often it looks."""
    result = watching(verified, *[lambda: None] * 3)
    assert result.stdout.count("PATH") == 1


def test_an_empty_run_is_waited_for(watching, root):
    """Its first save appears."""
    result = watching(root, lambda: write_torch(root, 1, seed=1))
    assert "net-1.pt" in result.stdout


def test_a_watch_prints_no_document(invoke, three):
    """A document is one answer, and a watch has no end."""
    result = invoke("list", "--watch", "--json", three)
    assert result.exit_code == 2
    assert "--watch" in result.stderr


def test_a_watch_ends_with_its_reader(verified, monkeypatch):
    """Nobody would see a change, also where none comes."""
    monkeypatch.setenv("CKPTGUARD_SCAN_INTERVAL", "0.1")
    words = [sys.executable, "-m", "ckptguard", "list", "--watch", str(verified)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        watch.stdout.read(1)
        watch.stdout.close()
        try:
            assert watch.wait(timeout=60) == 0
            assert watch.stderr is not None
            assert watch.stderr.read() == b""
        finally:
            watch.kill()

"""`--once --limit`: it ends in time, whatever holds it up, and what it leaves open is decided later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ckptguard_daemon.liveness import TimeLimit
from support.daemon_process import PATIENCE, save

_HANGS = """
import threading
from ckptguard_daemon import __main__, liveness, once
liveness._GRACE = 0.1
once.run_once = lambda *_, **__: threading.Event().wait()
__main__.main()
"""


def once(*arguments: object, code: str | None = None, **environment: str) -> tuple[int, list[str]]:
    """The exit code of `--once`, and the events that it logged."""
    program = ["-m", "ckptguard_daemon"] if code is None else ["-c", code]
    done = subprocess.run(
        [sys.executable, *program, *map(str, arguments), "--once", "--log-format", "json"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "CKPTGUARD_SETTLE": "0.1", **environment},
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    return done.returncode, [json.loads(line)["event"] for line in lines]


def test_what_is_not_decided_in_time_stays_pending(run: Path) -> None:
    """A read that takes minutes is cut off: exit code 4. The next call decides it, and needs no limit."""
    save(run, 100, numbers=4_000_000)
    code, events = once(run, "--limit", "1", CKPTGUARD_VERIFY_RATE="65536")
    assert (code, "limit" in events, "verified" in events) == (4, True, False)
    code, events = once(run)
    assert (code, "limit" in events, "verified" in events) == (0, False, True)
    assert once(run, "--limit", "10m")[0] == 0


def test_it_ends_although_the_storage_hangs(run: Path) -> None:
    """Work that cannot be stopped does not keep the process: a job's node would wait for it."""
    code, events = once(run, "--limit", "0.1", code=_HANGS)
    assert (code, events) == (4, ["limit", "limit_forced"])


@pytest.mark.parametrize(("found", "code"), [(0, 0), (1, 4), (3, 3), (4, 4)])
def test_the_code_of_work_that_was_cut_off(found: int, code: int) -> None:
    """What is known to be bad stays bad; what could not be told is undecided."""
    assert TimeLimit.code_of(found) == code


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--limit", "soon", "--once"], "time span"), (["--limit", "1m"], "--once")]
)
def test_a_mistaken_limit_is_wrong_usage(run: Path, arguments: list[str], words: str) -> None:
    """One sentence, exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptguard_daemon", str(run), *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, words in done.stderr) == (2, True)

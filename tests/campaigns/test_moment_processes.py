"""Generated trainers of several series as processes: started again after a rollback they find the newest moment.

They go back by ``ckptguard rollback`` beside a daemon, by ``ckptguard supervise``, or by themselves from Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import moment_process
from support.daemon_process import PATIENCE, DaemonProcess
from support.moment_process import NAN, Process

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
TRAINERS, STEPS = (50, 20) if FULL else (2, 8)
SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
TESTS = Path(moment_process.__file__).parent.parent
# After a death in a save only a pause shows that nobody writes: with 0 a rollback is refused.
SETTINGS = {"SETTLE": "0.05", "SCAN_INTERVAL": "0.05", "KEEP": "copy", "KEEP_GOOD": "2"}
QUICK: dict[str, Any] = {f"CKPTGUARD_{name}": value for name, value in SETTINGS.items()}


class Life(NamedTuple):
    """What became of a trainer: how often it went back, and what was wrong."""

    seed: int
    ways: int
    ended_early: bool  # nothing whole was left to go back to
    wrong: tuple[str, ...]


class Started:
    """The processes of one trainer, and what they say."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.run, self.seed = folder, folder / "run", seed
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPTGUARD_")}
        self.environment = {**kept, **QUICK, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(folder)}
        self.script = [sys.executable, "-m", "support.moment_process", str(self.run), str(seed), str(STEPS)]

    def ends(self, *command: str) -> int:
        """Run a command to its end: its exit code."""
        with (self.folder / "said").open("ab") as said:
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=said, stderr=said, start_new_session=True
            )
        try:
            return process.wait(20 * PATIENCE)  # it gives up by itself where a verdict does not come
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def ckptguard(self, *arguments: str) -> int:
        """Run a command of ours to its end."""
        return self.ends(sys.executable, "-m", "ckptguard", *arguments)

    def lived(self, code: int) -> Life:
        """What its file says in the end, after the last command ended so."""
        process = Process(self.run, self.seed)
        wrong = list(process.wrong)
        whole = process.expected or process.trainer.newest_moment()
        if code == 13 and whole:
            wrong.append(f"save {whole} is whole, but there was no way back")
        if code not in (0, 13):
            wrong.append(f"ended with {code}: {(self.folder / 'said').read_text()[-1500:]}")
        return Life(self.seed, process.ways, code == 13, tuple(wrong))


def by_command(one: Started) -> int:
    """Beside a daemon: after NaN and after its death ``ckptguard rollback``, then it is started again."""
    daemon = DaemonProcess(one.folder, one.run, **QUICK)
    try:
        while (code := one.ends(*one.script)) in (NAN, -signal.SIGKILL):
            if code := one.ckptguard("rollback", str(one.run)):
                break
        assert code in (0, 13) or daemon.process.poll() is None, daemon.log_path.read_text()
        return code
    finally:
        daemon.kill()


def by_supervise(one: Started) -> int:
    """``ckptguard supervise`` goes back and starts it again."""
    return one.ckptguard("supervise", str(one.run), "--max-rollbacks", "1000", "--", *one.script)


def by_itself(one: Started) -> int:
    """Beside a daemon: it goes back from Python and trains on, and when it is started again after its death."""
    daemon = DaemonProcess(one.folder, one.run, **QUICK)
    try:
        while (code := one.ends(*one.script, "by-itself")) == -signal.SIGKILL:
            pass
        return code
    finally:
        daemon.kill()


WAYS = {"rollback": by_command, "supervise": by_supervise, "python": by_itself}


def live(way: str, seed: int) -> Life:
    """The life of one trainer."""
    folder = Path(tempfile.mkdtemp(prefix="cg-", dir=SCRATCH))
    try:
        one = Started(folder, seed)
        return one.lived(WAYS[way](one))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.campaign
@pytest.mark.timeout(7200 if FULL else 300)
@pytest.mark.parametrize("way", WAYS)
def test_trainers_go_back_to_one_moment(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All finite, and the newest that exists, whoever goes back."""
    with ThreadPoolExecutor(2) as pool:
        lives = list(pool.map(partial(live, way), range(1, TRAINERS + 1)))
    wrong = [(life.seed, said) for life in lives for said in life.wrong]
    ways, early = sum(life.ways for life in lives), sum(life.ended_early for life in lives)
    with capsys.disabled():
        print(f"{way}: {len(lives)} trainers, {ways} ways back, {early} had none left, {len(wrong)} violations")
    assert not wrong, "\n".join(f"{seed}: {said}" for seed, said in wrong)
    assert ways

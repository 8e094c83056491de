"""kill -9 of the process that saves, at random times: the known-good checkpoint restores byte for byte."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile

KILLS = 200 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 15

# A saver that answers requests on stdin, so that torch is imported once for many kills: it forks a child for each
# save, tells the child's pid, and goes on when the child is gone.
SAVER = """
import os, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.runs import write_safetensors, write_sharded, state_dict
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    kind, root, step, seed = line.split()
    pid = os.fork()
    if pid == 0:
        os.write(1, f"{os.getpid()}\\n".encode())
        torch.set_num_threads(1)
        if kind == "torch":
            torch.save(state_dict(int(seed), layers=24, width=96), Path(root) / f"net-{step}.pt")
        elif kind == "sharded":
            write_sharded(Path(root), int(step), int(seed))
        else:
            write_safetensors(Path(root), int(step), int(seed))
        os.write(1, b"saved\\n")
        os._exit(0)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


def digest(path: Path) -> str:
    """One digest over the files of a checkpoint, names included."""
    hasher = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        hasher.update(file.name.encode() + file.read_bytes())
    return hasher.hexdigest()


class Saver:
    """The saving process and its child of the moment."""

    def __init__(self) -> None:
        tests = str(Path(__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SAVER, tests], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.line() == "ready"

    def line(self) -> str:
        """The next line that the process says."""
        line = self.process.stdout.readline()
        assert line, "the saver died"
        return line.strip()

    def save(self, kind: str, root: Path, step: int, seed: int, kill_after: float | None) -> bool:
        """Save in a child; kill it after some seconds. Whether it said that it was done."""
        self.process.stdin.write(f"{kind} {root} {step} {seed}\n")
        pid = int(self.line())
        if kill_after is not None:
            try:
                signal.sigtimedwait([], kill_after)
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        said = []
        while (line := self.line()) != "gone":
            said.append(line)
        return said == ["saved"]

    def close(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["torch", "sharded"])
def test_the_known_good_restores_after_every_kill(kind, tmp_path):
    """After each kill, what is known-good restores, and equals what was there when it was verified."""
    root = tmp_path / "run"
    root.mkdir()
    run = open_run(str(root))
    saver = Saver()
    rng = random.Random(7)
    verified: dict[str, str] = {}
    killed = 0
    try:
        assert saver.save(kind, root, 1, 1, None)
        for number in range(2, 10 * KILLS):
            if killed >= KILLS // 2:
                break
            reconcile(look(run), PassNotes())
            again = kind == "torch" and rng.random() < 0.3 and number > 3
            step = number - 1 if again else number  # now and then over a checkpoint that is there
            killed += not saver.save(kind, root, step, number, rng.uniform(0.0, 0.02))
            done = reconcile(look(run), PassNotes())
            for checked in done.checked:
                if checked.outcome.value == "good":
                    verified[checked.id] = digest(root / checked.path)
            known = find_known_good(run)
            verified.setdefault(known.id, digest(Path(known.path)))
            target = tmp_path / "restored"
            restored = restore(look(run), str(target))
            assert verified.setdefault(restored.id, digest(Path(restored.path))) == digest(Path(restored.path)), number
            shutil.rmtree(target)
    finally:
        saver.close()
    assert killed >= KILLS // 2, "too few saves were hit: the times are off"

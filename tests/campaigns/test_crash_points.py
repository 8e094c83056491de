"""kill -9 before and after every step of what a store does, in processes without torch: nothing is half visible,
nothing is lost, and one pass later nothing is left behind."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.store_operations import OPERATIONS, Stage, build
from support.store_promises import arrived_wrong, violations
from support.tiny_run import clone

from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.values.verdict import Outcome

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
TIMES = 20 if FULL else 1
NAMES = ("seal", "keep", "own bytes", "judge a copy", "prune", "prune for good", "replicate", "repair")
NAMES += ("scrub", "put back", "restore", "gate")

# Does one operation in a child for each request on stdin: its name, the n-th step, whether the child is killed before
# or after that, a run, a replica and a place to restore to. A step is a call that changes something on storage: those
# of the file system that make a name or take one away, and the end of a file's bytes.
WORKER = """
import os, signal, sys
sys.path[:0] = sys.argv[1:]
from pathlib import Path
from support.records_on_disk import key_of
from support.store_operations import OPERATIONS, Stage
from ckptguard.errors import CkptguardError
from ckptguard.records.run import open_run

STEPS = ("link", "unlink", "rename", "replace", "mkdir", "rmdir", "fsync", "ftruncate")

def killed_at(name, real, left, after, told):
    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.write(told, f"{name} {Path(str(args[-1] if name == 'link' else args[0])).name}".encode())
            if not after:
                os.kill(os.getpid(), signal.SIGKILL)
        last = left[0] == 0
        try:
            return real(*args, **kwargs)
        finally:  # a call that failed, such as making a folder that is there, is a step too
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
    return call

import ckptguard.storage.local.writes as writes
assert "torch" not in sys.modules
for line in sys.stdin:
    name, number, when, url, replica, dest = line.rstrip("\\n").split("\\t")
    reading, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        left = [int(number)]
        for step in STEPS:
            setattr(os, step, killed_at(step, getattr(os, step), left, when == "after", telling))
        writes.rename_exclusively = killed_at("rename", writes.rename_exclusively, left, when == "after", telling)
        try:
            OPERATIONS[name].act(open_run(url), Stage(url=url, replica=replica, dest=Path(dest)))
        except CkptguardError as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(telling)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), os.read(reading, 1000).decode().partition(" ")[0], flush=True)
    os.close(reading)
"""


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """The runs that are copied for every kill, by whether a save is pending."""
    made = {}
    for pending in (False, True):
        folder = tmp_path_factory.mktemp("template") / "run"
        folder.mkdir()
        made[pending] = (str(folder), build(str(folder), pending=pending))
    return made


@pytest.fixture(scope="module")
def killed():
    """Do something in a process that is killed: its exit status (-9, or 0 when there is no such step) and the step."""
    tests = str(Path(__file__).parents[1])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WORKER, tests], text=True, **pipes) as process:

        def call(*words):
            process.stdin.write("\t".join(map(str, words)) + "\n")
            process.stdin.flush()
            status, _, step = process.stdout.readline().partition(" ")
            return int(status), step.strip()

        yield call


@pytest.mark.campaign
@pytest.mark.timeout(7200 if FULL else 300)
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_each_step_nothing_is_lost(name, templates, killed, tmp_path, capsys):
    """Each step is killed before and after it; in the short form every ninth."""
    operation = OPERATIONS[name]
    source, saved = templates[operation.pending]
    kills, steps, wrong = 0, {"before": set(), "after": set()}, []
    for turn, when in itertools.product(range(TIMES), ("before", "after")):
        for number in itertools.count(1 if FULL else 1 + (when == "after"), 1 if FULL else 9):
            folder = tmp_path / f"{turn}-{when}-{number}"
            stage = Stage(url=str(folder / "run"), replica=str(folder / "replica"), dest=folder / "dest")
            clone(source, stage.url)
            status, step = killed(name, number, when, stage.url, stage.replica, stage.dest)
            assert status in (0, -9), (name, number, status)
            problems = [*violations(stage, saved, operation), *arrived_wrong(stage, saved, killed=True)]
            for id, current_verdict in load_history(open_run(stage.url)).current_verdicts("model-#").items():
                if current_verdict.outcome is Outcome.BAD and id.step not in (200, 300):
                    problems.append(f"{id} is BAD")
            wrong += [f"{name}, killed {when} step {number} ({step}): {problem}" for problem in problems]
            shutil.rmtree(folder)
            if status == 0:
                break
            kills += 1
            steps[when].add((number, step))
    with capsys.disabled():
        if FULL:
            print(f"\n{name}: {len(steps['before'])} steps, {kills} kills, {len(wrong)} violations")
    assert not wrong, "\n".join([f"{len(wrong)} violations in {kills} kills:", *wrong[:20]])
    assert min(map(len, steps.values())) >= (6 if FULL else 1)

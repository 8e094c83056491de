"""kill -9 of a prune before and after each of its steps: every checkpoint is whole, in the run or in the trash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import QUICK, write_sharded
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.restore import restore
from ckptguard.retention.prune import prune
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy

TIMES = 20 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 1
GRACE = 86400.0
LAST = Policy(keep_last=2, keep_good=2)

# Prunes in a child for each request on stdin: a run, the time of grace, the n-th step, and whether it is killed before
# or after it. Without torch, which is imported nowhere here.
PRUNER = """
import os, signal, sys
from ckptguard.retention.prune import prune
from ckptguard.runs.run_view import open_view
from ckptguard.values.settings import Settings
from ckptguard.values.retention_policy import Policy
from ckptguard.storage.local.local_storage import LocalStorage

def killed_at(real, left, after):
    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = real(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return call

assert "torch" not in sys.modules
for line in sys.stdin:
    root, grace, number, when = line.split()
    pid = os.fork()
    if pid == 0:
        left = [int(number)]
        for name in ("create", "move", "remove"):
            setattr(LocalStorage, name, killed_at(getattr(LocalStorage, name), left, when == "after"))
        done = prune(open_view(root, Settings()), Policy(keep_last=2, keep_good=2), grace=float(grace))
        os._exit(1 if done.could_not_tell else 0)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A verified run of four sharded checkpoints, without kept copies, of which two are to go."""
    root = tmp_path_factory.mktemp("prune") / "template"
    root.mkdir()
    for step in (100, 200, 300, 400):
        write_sharded(root, step, seed=step)
    reconcile(look(open_run(str(root)), QUICK.changed(keep="none")), PassNotes())
    return root


@pytest.fixture(scope="module")
def killed():
    """Prune in a process that is killed: its exit status (-9, or 0 when there is no such step)."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PRUNER], text=True, **pipes) as process:

        def call(root, grace, number, when):
            process.stdin.write(f"{root} {grace} {number} {when}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield call


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.campaign
@pytest.mark.parametrize("grace", [GRACE, 0.0], ids=["to the trash", "for good"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_step_nothing_is_lost(template, killed, tmp_path, grace, when):
    """Each checkpoint that is not kept is whole in one of its places or (for good) gone; those that are kept are not
    touched; the next prune ends where an untouched one ends, and leaves nothing behind."""
    saved = {f.name: content(f) for f in template.iterdir() if f.name != "_ckptguard"}
    kills = []
    for _ in range(TIMES):
        for number in range(1, 100):
            root = tmp_path / "run"
            shutil.copytree(template, root, copy_function=os.link)  # a copy of its own would be read first
            status = killed(root, grace, number, when)
            assert status in (0, -9)
            kills += [number] if status == -9 else []
            for name in ("sharded-300", "sharded-400"):
                assert content(root / name) == saved[name]
            run = open_run(str(root))
            again = prune(look(run), LAST, grace=GRACE)
            assert again.could_not_tell == ()
            assert sorted(f.name for f in root.glob("sharded-*")) == ["sharded-300", "sharded-400"]
            left = {id.step for id in list_trashed(run)}
            assert left == {100, 200} if grace else left <= {100, 200}
            for step in left:
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
                done = restore(look(run), str(tmp_path / "out"), step=step)
                assert content(Path(done.path)) == saved[f"sharded-{step}"]
            trash = root / "_ckptguard" / "trash"
            folders = {p.name for p in trash.glob("*/*") if p.is_dir()}
            assert folders == {f"{step:012d}.1" for step in left}
            shutil.rmtree(root)
            if status == 0:
                break
        else:
            pytest.fail("it never passed untouched")
    assert len(set(kills)) * TIMES == len(kills) >= 8 * TIMES

"""Our own layout under kill -9, a real limit on file sizes, and rotation."""

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from support.faults import flip
from support.forked import TESTS, Forked
from support.guards import guarded, holds, model_of
from support.runs import QUICK
from support.views import look

import ckptguard
from ckptguard.errors import SettingsError, StorageFullError
from ckptguard.inspect.list_states import survey
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target
from ckptguard.verification.user_decisions import reseal

KILLS = 200 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 12

# A saver that forks a child for each save, so that torch is imported once for many kills.
PATH = (TESTS,)
SAVER = """
import os, sys
from support.guards import guarded, model_of
import ckptguard.training.saving.own_layout, blake3
print("ready", flush=True)
for line in sys.stdin:
    root, step = line.split()
    pid = os.fork()
    if pid == 0:
        guard = guarded(root, model_of(int(step)))
        os.write(1, f"{os.getpid()}\\n".encode())
        guard.save(step=int(step))
        os.write(1, b"saved\\n")
        os._exit(0)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


@pytest.mark.campaign
@pytest.mark.timeout(1200 if KILLS > 100 else 300)
def test_killed_at_any_moment_it_resumes_at_a_whole_checkpoint(tmp_path):
    """kill -9 during a save: a resume finds the new checkpoint whole, or the one before it; the next save succeeds."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    run = tmp_path / "run"
    guarded(run, model_of(1)).save(step=1)
    newest = 1
    with Forked(SAVER, path=PATH, piped=True) as saver:
        assert saver.stdout.readline() == "ready\n"
        for step in range(2, 2 + KILLS):
            saver.stdin.write(f"{run} {step}\n".encode())
            pid = int(saver.stdout.readline())
            with_delay = choose.random() * 0.06
            signal_after(pid, with_delay)
            said = [saver.stdout.readline()]
            while said[-1] != "gone\n":
                said.append(saver.stdout.readline())
            model = model_of(0)
            found = guarded(run, model).resume()
            assert found in ((step,) if "saved\n" in said else (newest, step))
            assert holds(model, found)
            newest = found
            for path in list(run.glob("tmp-*")):
                shutil.rmtree(path)
        saver.stdin.close()
    guarded(run, model_of(500)).save(step=500)
    assert guarded(run, model_of(0)).resume() == 500


def signal_after(pid, seconds):
    """Kill a process at this moment of its life, if it still has one."""
    subprocess.run(["sleep", f"{seconds:.4f}"], check=True)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_a_save_makes_everything_durable_once_and_the_manifest_last(tmp_path, monkeypatch):
    """Each file, their names, the folder's own name, and only then the manifest and its name."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    guard = guarded(tmp_path, model, optimizer=optimizer)
    guard.save(step=1)  # makes the folders of the records
    synced = []
    real = os.fsync

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    guard.save(step=2)
    folder = synced[3]
    assert folder.name.startswith("tmp-step-000000002-")
    assert set(synced[:3]) == {folder / n for n in ("model.safetensors", "optimizer.safetensors", "state.json")}
    manifests = Path("_ckptguard/manifests/held.step-#.held")
    assert (synced[4], synced[5].parent, *synced[6:]) == (Path("."), manifests, manifests)


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path):
    """Where the kernel itself refuses to write on, save() says so, and the known-good is untouched."""
    run = tmp_path / "run"
    guarded(run, model_of(1)).save(step=1)
    script = (
        "import resource\n"
        "from support.guards import guarded, model_of\n"
        "from ckptguard.errors import StorageFullError\n"
        f"guard = guarded({str(run)!r}, model_of(2))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    guard.save(step=2)\n"
        "except StorageFullError as error:\n"
        "    print(error)\n"
    )
    process = Forked(script, path=PATH)
    said, trouble = process.communicate()
    assert process.returncode == 0, trouble
    assert "no space left" in said
    assert [p.name for p in run.iterdir() if p.name != "_ckptguard"] == ["step-000000001"]
    model = model_of(0)
    assert guarded(run, model).resume() == 1
    assert holds(model, 1)


def test_a_leftover_that_cannot_be_looked_at_is_in_no_trainings_way(tmp_path, monkeypatch):
    """On a full disk not even the storage can be asked what time it is: training begins all the same."""
    run = tmp_path / "run"
    guarded(run, model_of(1)).save(step=1)
    left = run / "tmp-step-000000002-0123456a"
    left.mkdir()
    os.utime(left, (1, 1))

    def full(storage):
        raise StorageFullError("no space left", key="")

    monkeypatch.setattr("ckptguard.runs.settling.storage_time", full)
    assert guarded(run, model_of(0)).resume() == 1
    monkeypatch.undo()
    assert left.exists()
    guarded(run, model_of(0))
    assert not left.exists()


def test_a_rotated_checkpoint_comes_back_from_its_kept_copy(tmp_path):
    """The user's files were deleted; the kept copy is put back under its own name and loaded, position included."""
    model = model_of(7)
    options = {
        "save": lambda path, step: torch.save(model.state_dict(), path),
        "load": lambda path: model.load_state_dict(torch.load(path)),
    }
    with guarded(tmp_path / "run", model, **options) as guard:
        assert [b for _, b in guard.steps("abcd", total=3, save_every=3)] == ["a", "b", "c"]
    run = open_run(str(tmp_path / "run"))
    reconcile(look(run), PassNotes())
    for path in (tmp_path / "run").glob("step-*.pt"):
        path.unlink()
    with torch.no_grad():
        model[0].weight.zero_()
    with guarded(tmp_path / "run", model, **options) as guard:
        assert [b for _, b in guard.steps("abcd", total=5, save_every=5)] == ["d", "a"]
    assert holds(model, 7)
    assert (tmp_path / "run" / "step-3.pt").is_file()


@pytest.mark.parametrize("way", ["resume", "rollback"])
def test_damage_in_place_is_healed_by_an_independent_copy(tmp_path, way):
    """With keep="copy" a flipped bit in place costs nothing: the copy is used, and BAD stays on record."""
    copying = QUICK.changed(keep="copy")
    model = model_of(3)
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, daemon="off", settings=copying)
    guard.save(step=10)
    run = open_run(str(tmp_path / "run"))
    reconcile(look(run, copying), PassNotes())
    file = tmp_path / "run" / "step-000000010" / "model.safetensors"
    flip(file, -5, 64, new_times=True)
    with torch.no_grad():
        model[0].weight.zero_()
    assert getattr(guard, way)() == 10
    assert holds(model, 3)
    checked = {str(c.id): c.outcome for c in verify_target(str(tmp_path / "run"), copying).checkpoints}
    assert checked == {"10.1": Outcome.GOOD}
    assert {str(s.id): s.outcome for s in survey(look(run))} == {"10.1": Outcome.GOOD}
    history = [name.split(".")[3] for name in sorted(load_history(run).names["step-#"])]
    assert history == ["good", "bad", "good"]


def test_a_rollback_reads_the_bytes_once(tmp_path, monkeypatch):
    """What was verified before is hashed while it is loaded, and not once more in advance."""
    guard = guarded(tmp_path / "run", model_of(3))
    guard.save(step=10)
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD

    def again(*_, **__):
        raise AssertionError("read in advance")

    monkeypatch.setattr("ckptguard.recover.roll_back.verify_checkpoint", again)
    assert guard.rollback() == 10


def test_a_save_of_ours_cannot_be_resealed(tmp_path):
    """Its writer's manifest is what makes it complete: nobody's word takes that from a good one."""
    guard = guarded(tmp_path / "run", model_of(3))
    guard.save(step=10)
    run = open_run(str(tmp_path / "run"))
    reconcile(look(run), PassNotes())
    with pytest.raises(SettingsError, match="only be sealed by the training"):
        reseal(look(run), "10")
    assert str(find_known_good(run).id) == "10.1"

"""A repair that is killed before any step of it, or of which any operation fails, is finished by the next look."""

import os
import shutil

import pytest
from support.kept_runs import guarded, rot
from support.kill_points import Killed, fail_at, kill_at
from support.records_on_disk import at, files_of
from support.runs import QUICK, write_sharded, write_torch
from support.views import look

from ckptguard.errors import CkptguardError, StorageError
from ckptguard.records.kept import read_kept
from ckptguard.records.run import open_run
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import scrub
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome

STRIDE = 1 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 3
KEEP = QUICK.changed(keep="copy")
SHARDS = [f"sharded-200/model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def files(root):
    """The bytes of every checkpoint file and of every kept one."""
    ends = (".safetensors", ".pt", "model.safetensors.index.json")
    return {name: data for name, data in files_of(root).items() if "quarantine" not in name and name.endswith(ends)}


def damaged(root, writer):
    """A run with damage in place and in a kept copy that was found; its whole and its damaged bytes."""
    run = guarded(root, writer=writer)
    whole = files(root)
    kept = "_ckptguard/kept"
    if writer is write_torch:
        hit = ["net-200.pt", f"{kept}/net-#.pt/000000000100.1/net-100.pt"]
    else:
        hit = [SHARDS[0], SHARDS[1], f"{kept}/sharded-#/000000000200.1/{SHARDS[2]}"]
    for name in hit:
        rot(at(root, name))
    scrub(look(run))
    return whole, files(root)


def look_at_files(root, whole, harmed):
    """After a crash each name holds the right bytes, the damaged ones, or nothing; never anything else."""
    now = files(root)
    for name in whole:
        assert now.get(name) in (whole[name], harmed[name], None)
    staged = [n for n in now if "tmp-repair" in n]
    missing = {n for n in whole if n not in now}
    assert all(any(s.endswith(n) for s in staged) for n in missing if not n.startswith("_ckptguard"))


def check_end(root, run, whole):
    """All is right again: bytes, verdicts, copies, and nothing is left behind."""
    assert files(root) == whole
    assert not list(root.rglob("*tmp-repair*"))
    history = load_history(run)
    for series in history.names:
        for id, current_verdict in history.current_verdicts(series).items():
            assert current_verdict.outcome is Outcome.GOOD
            assert read_kept(run, id) is not None
    assert str(find_known_good(run).id) == "200.1"


@pytest.mark.campaign
@pytest.mark.timeout(1200 if STRIDE == 1 else 300)
@pytest.mark.parametrize("writer", [write_sharded, write_torch], ids=["folder", "file"])
@pytest.mark.parametrize("after", ["repair", "reconcile"])
def test_killed_at_any_step_it_is_finished(root, tmp_path, monkeypatch, writer, after):
    """Killed before step 1, 2, ... until it passes untouched (here for some; CKPTGUARD_CAMPAIGN looks at all). A name
    that is free is taken by the next reconciliation, although nobody asked it to repair."""
    whole, harmed = damaged(root, writer)
    template, killed, free = root.rename(tmp_path / "template"), 0, 0
    for number in range(1, 200, STRIDE):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root, copy_function=shutil.copy2)
        run = open_run(str(root))
        try:
            with kill_at(monkeypatch, number):
                repair(look(run, KEEP))
            break
        except Killed:
            killed += 1
        look_at_files(root, whole, harmed)
        free += set(files(root)) < set(whole) or any("tmp-repair" in name for name in files(root))
        assert str(find_known_good(run).id) in ("100.1", "200.1")
        if after == "reconcile":
            reconcile(look(run, KEEP), PassNotes())
            assert set(files(root)) == set(whole)  # no name is free
            assert not list(root.rglob("*tmp-repair*"))
        repair(look(run, KEEP))
        check_end(root, run, whole)
    assert killed * STRIDE >= 10
    assert free
    check_end(root, run, whole)


@pytest.mark.campaign
@pytest.mark.timeout(3600 if STRIDE == 1 else 300)
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
def test_whatever_operation_fails_nothing_is_lost(root, tmp_path, monkeypatch, for_ever):
    """The n-th operation on storage fails, for every n until it passes untouched (here for some n; CKPTGUARD_CAMPAIGN
    looks at all): it is said, and the next repair ends where an untouched one ends."""
    whole, harmed = damaged(root, write_sharded)
    template, failed, passed = root.rename(tmp_path / "template"), 0, 0
    for number in range(1 + 7 * for_ever, 5000, 15 * STRIDE - 14):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root, copy_function=shutil.copy2)
        run = open_run(str(root))
        with fail_at(monkeypatch, number, StorageError("input/output error", key="x"), for_ever=for_ever):
            try:
                done = repair(look(run, KEEP))
                told = bool(done.could_not_tell)
            except CkptguardError:
                told = True
        failed, passed = failed + told, 0 if told else passed + 1
        look_at_files(root, whole, harmed)
        assert str(find_known_good(run).id) in ("100.1", "200.1")
        repair(look(run, KEEP))
        if load_history(run).verdict(CheckpointId("sharded-#", 200, 1)).outcome is not Outcome.GOOD:
            repair(look(run, KEEP), "sharded-200")  # all of its bytes are right, and nobody could verify that
        check_end(root, run, whole)
        if passed >= 3:
            break
    assert passed >= 3
    assert failed * (15 * STRIDE - 14) >= 50

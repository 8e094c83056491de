"""A prune that is killed before any step of it leaves every checkpoint whole, in place or in the trash."""

import os
import shutil

import pytest
import torch
from support.kill_points import Killed, fail_at, kill_at
from support.records_on_disk import files_of
from support.runs import QUICK, state_dict
from support.views import look

from ckptguard.errors import CouldNotTellError, StorageError
from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.restore import restore
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy


def write_pair(root, epoch):
    """A checkpoint of two files side by side, which move one by one."""
    torch.save(state_dict(epoch), root / f"epoch_{epoch}.pt")
    (root / f"epoch_{epoch}.yaml").write_text(f"epoch: {epoch}\nstep: {epoch * 10}\n")


@pytest.mark.parametrize("grace", [86400.0, 0.0], ids=["to the trash", "for good"])
def test_killed_at_any_step_nothing_is_lost(root, tmp_path, monkeypatch, grace):
    """Killed before step 1, 2, ... until it passes untouched: each pair is whole in one place, nothing that the policy
    keeps is touched, and the next prune ends where an untouched one ends."""
    for epoch in range(1, 5):
        write_pair(root, epoch)
    policy = Policy(keep_last=2, keep_good=2)
    reconcile(look(open_run(str(root)), QUICK.changed(keep="none")), PassNotes())
    saved = {p.name: p.read_bytes() for p in root.glob("epoch_*")}
    template, killed = root.rename(tmp_path / "template"), 0
    for number in range(1, 200):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root, copy_function=os.link)  # a copy of its own would be read first
        run = open_run(str(root))
        try:
            with kill_at(monkeypatch, number):
                prune(look(run), policy, grace=grace)
            break
        except Killed:
            killed += 1
        assert {p.name: p.read_bytes() for p in root.glob("epoch_[34].*")} == {
            name: content for name, content in saved.items() if name[6] in "34"
        }
        assert find_known_good(open_run(str(root))).path.endswith("epoch_4.pt")
        # A daemon's look finishes or undoes what was begun, and finds nothing damaged.
        assert not [
            c
            for c in reconcile(look(run, QUICK.changed(keep="none")), PassNotes()).checked
            if c.outcome.value != "good"
        ]
        for epoch in (1, 2):
            there = [p for p in (root / f"epoch_{epoch}.pt", root / f"epoch_{epoch}.yaml") if p.exists()]
            assert len(there) in (0, 2)
            if grace:
                out = tmp_path / f"out-{number}-{epoch}"
                restore(look(run), str(out), step=epoch)
                assert {p.name: p.read_bytes() for p in out.iterdir()} == {
                    name: content for name, content in saved.items() if name.startswith(f"epoch_{epoch}.")
                }
    assert killed >= 10
    assert sorted(p.name for p in root.glob("epoch_*.pt")) == ["epoch_3.pt", "epoch_4.pt"]
    assert len(list_trashed(run)) == (2 if grace else 0)


@pytest.mark.campaign
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
def test_whatever_operation_fails_nothing_is_lost(root, tmp_path, monkeypatch, for_ever):
    """The n-th operation on storage fails, for every n until it passes untouched (here for some n; CKPTGUARD_CAMPAIGN
    looks at all): it is said, each pair stays whole, and the next prune ends where an untouched one ends."""
    for epoch in range(1, 5):
        write_pair(root, epoch)
    policy = Policy(keep_last=2, keep_good=2)
    reconcile(look(open_run(str(root)), QUICK.changed(keep="none")), PassNotes())
    saved = {p.name: p.read_bytes() for p in root.glob("epoch_*")}
    template, failed, passed = root.rename(tmp_path / "template"), 0, 0
    stride = 1 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 9
    for number in range(1 + 3 * for_ever, 2000, stride):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root, copy_function=os.link)  # a copy of its own would be read first
        run = open_run(str(root))
        with fail_at(monkeypatch, number, StorageError("input/output error", key="x"), for_ever=for_ever):
            try:
                done = prune(look(run), policy, grace=86400.0)
                told = bool(done.could_not_tell)
            except CouldNotTellError:
                told = True
        failed, passed = failed + told, 0 if told else passed + 1
        assert {p.name for p in root.glob("epoch_[34].*")} == {n for n in saved if n[6] in "34"}
        assert find_known_good(run).path.endswith("epoch_4.pt")
        again = prune(look(run), policy, grace=86400.0)
        assert again.could_not_tell == ()
        names = {name.rpartition("/")[2]: data for name, data in files_of(root).items()}
        assert {name: data for name, data in names.items() if name.startswith("epoch_")} == saved
        assert len(list_trashed(run)) == 2
        assert sorted(p.name for p in root.glob("epoch_*.pt")) == ["epoch_3.pt", "epoch_4.pt"]
        if passed >= 2:
            break
    assert passed >= 2
    assert failed * stride >= 50

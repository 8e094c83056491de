"""Restoring: complete and verified, or nothing."""

import os
import shutil
import threading

import pytest
import torch
from support.faults import flip
from support.runs import QUICK, state_dict, write_sharded, write_torch
from support.views import look

from ckptguard.errors import DeniedError, NoKnownGoodError, NotFoundError, RefusedError, SettingsError, StorageFullError
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.trash import list_trashed
from ckptguard.recover import restorable
from ckptguard.recover import restore as module
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import replicate
from ckptguard.retention import prune as prune_module
from ckptguard.retention.prune import prune
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome


def test_the_known_good_comes_out_byte_for_byte(root, three, tmp_path):
    """DEST is made, the file has its own name and its own bytes."""
    reconcile(look(three), PassNotes())
    done = restore(look(three), str(tmp_path / "out" / "deep"))
    assert done.path == str(tmp_path / "out" / "deep" / "net-300.pt")
    assert (tmp_path / "out" / "deep" / "net-300.pt").read_bytes() == (root / "net-300.pt").read_bytes()
    assert os.listdir(tmp_path / "out" / "deep") == ["net-300.pt"]


def test_folders_come_out_whole(root, run, tmp_path):
    """A sharded folder is restored with every file, from its copy when rotation took it."""
    path = write_sharded(root, 100, seed=1)
    reconcile(look(run), PassNotes())
    before = {p.name: p.read_bytes() for p in (root / path).iterdir()}
    shutil.rmtree(root / path)
    done = restore(look(run), str(tmp_path / "out"))
    assert done.kept
    assert {p.name: p.read_bytes() for p in (tmp_path / "out" / path).iterdir()} == before


def test_a_file_can_be_named(root, three, tmp_path):
    """A checkpoint of one file gets the name that was asked for, and what will be made is said first."""
    reconcile(look(three), PassNotes())
    told = []
    done = restore(look(three), str(tmp_path / "out" / "back.PT"), tell=told.append)
    assert done.path == str(tmp_path / "out" / "back.PT")
    assert (tmp_path / "out" / "back.PT").read_bytes() == (root / "net-300.pt").read_bytes()
    assert os.listdir(tmp_path / "out") == ["back.PT"]
    assert [(plan.path, plan.made, plan.files) for plan in told] == [("net-300.pt", done.path, 1)]


@pytest.mark.parametrize("make_folder", [False, True])
def test_a_folder_may_be_named_like_a_file(three, tmp_path, make_folder):
    """One that is there, or a name that ends in a slash, is a folder whatever its name."""
    reconcile(look(three), PassNotes())
    dest = tmp_path / "back.pt"
    if make_folder:
        dest.mkdir()
    assert restore(look(three), f"{dest}{'' if make_folder else '/'}").path == f"{dest}/net-300.pt"


def test_a_file_is_never_written_over(three, tmp_path):
    """What lies under the name stays."""
    reconcile(look(three), PassNotes())
    (tmp_path / "back.pt").write_text("mine")
    with pytest.raises(SettingsError, match="exists already"):
        restore(look(three), str(tmp_path / "back.pt"))
    assert (tmp_path / "back.pt").read_text() == "mine"


def test_what_appears_while_it_is_copied_is_not_written_over(three, tmp_path, monkeypatch):
    """Even at the last moment: it stays, and nothing of the checkpoint does."""
    reconcile(look(three), PassNotes())
    move = LocalStorage.move

    def late(storage, source, target):
        (tmp_path / "out" / "back.pt").write_text("mine")
        move(storage, source, target)

    monkeypatch.setattr(LocalStorage, "move", late)
    (tmp_path / "out").mkdir()
    with pytest.raises(SettingsError, match="appeared meanwhile"):
        restore(look(three), str(tmp_path / "out" / "back.pt"))
    assert (tmp_path / "out" / "back.pt").read_text() == "mine"
    assert os.listdir(tmp_path / "out") == ["back.pt"]


def test_a_file_name_that_cannot_be_is_refused(root, run, three, tmp_path):
    """A folder of shards is no file, and a file does not change its kind by its name. Nothing is left behind."""
    reconcile(look(three), PassNotes())
    with pytest.raises(SettingsError, match="another kind"):
        restore(look(three), str(tmp_path / "out" / "back.safetensors"))
    write_sharded(root, 900, seed=1)
    reconcile(look(run), PassNotes())
    with pytest.raises(SettingsError, match="sharded-900 is not one file"):
        restore(look(run), str(tmp_path / "out" / "back.safetensors"), step=900)
    assert not (tmp_path / "out").exists()


def test_a_destination_with_something_in_it_is_refused(three, tmp_path):
    """Nothing in DEST is ever touched."""
    reconcile(look(three), PassNotes())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(SettingsError):
        restore(look(three), str(tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_damaged_bytes_are_refused_and_leave_nothing(root, three, tmp_path):
    """Damage since the verdict is found while restoring; DEST is as it was: absent."""
    reconcile(look(three, QUICK.changed(keep="link")), PassNotes())
    flip(root / "net-300.pt")
    with pytest.raises(RefusedError) as caught:
        restore(look(three), str(tmp_path / "out"), step=300)
    assert caught.value.outcome == "bad"
    assert not (tmp_path / "out").exists()


def test_a_copy_with_its_own_bytes_stands_in(root, three, tmp_path):
    """With keep = copy, damage in place is no loss."""
    before = (root / "net-300.pt").read_bytes()
    reconcile(look(three, QUICK.changed(keep="copy")), PassNotes())
    flip(root / "net-300.pt")
    done = restore(look(three), str(tmp_path / "out"))
    assert done.kept
    assert (tmp_path / "out" / "net-300.pt").read_bytes() == before


def test_bad_ones_need_force(root, run, tmp_path):
    """A poisoned checkpoint is handed out only with force."""
    state = state_dict(1)
    state["embed.weight"][0, 0] = torch.tensor(3e38) * 10
    torch.save(state, root / "net-100.pt")
    reconcile(look(run), PassNotes())
    with pytest.raises(NoKnownGoodError):
        restore(look(run), str(tmp_path / "out"))
    with pytest.raises(RefusedError):
        restore(look(run), str(tmp_path / "out"), step=100)
    done = restore(look(run), str(tmp_path / "out"), step=100, force=True)
    assert os.path.exists(done.path)


def test_a_pending_one_is_verified_first(root, run, tmp_path):
    """No daemon ever ran: restoring a step verifies it on the way."""
    write_torch(root, 100, seed=1)
    assert str(restore(look(run), str(tmp_path / "out"), step=100).id) == "100.1"
    with pytest.raises(NotFoundError):
        restore(look(run), str(tmp_path / "out2"), step=7)


def test_a_full_disk_leaves_nothing_behind(three, tmp_path, monkeypatch):
    """No space: an error that says so, and no half-file under any name."""
    reconcile(look(three), PassNotes())

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(StorageFullError, match="no space left"):
        restore(look(three), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_kept_copy_that_rotted_is_not_handed_out(root, three, tmp_path):
    """Every use of a kept copy reads it; the next older good one is restored instead."""
    before = (root / "net-200.pt").read_bytes()
    reconcile(look(three, QUICK.changed(keep="copy")), PassNotes())
    (root / "net-300.pt").unlink()
    flip(next((root / "_ckptguard" / "kept").rglob("*net-300.pt*")))
    with pytest.raises(RefusedError):
        restore(look(three), str(tmp_path / "out"), step=300)
    assert not (tmp_path / "out").exists()
    assert str(restore(look(three), str(tmp_path / "out")).id) == "200.1"
    assert (tmp_path / "out" / "net-200.pt").read_bytes() == before


def test_an_older_one_stands_in_for_damage_and_it_is_said(root, three, tmp_path, caplog):
    """The newest rotted since its verdict, and its kept copy is a link to it: 200 comes out, a warning says why, and
    the damage is on record."""
    before = (root / "net-200.pt").read_bytes()
    reconcile(look(three, QUICK.changed(keep="link")), PassNotes())
    flip(root / "net-300.pt")
    done = restore(look(three), str(tmp_path / "out"))
    assert (str(done.id), (tmp_path / "out" / "net-200.pt").read_bytes()) == ("200.1", before)
    assert "net-300.pt of" in caplog.text
    assert "trying net-200.pt of" in caplog.text
    assert look(three).history.current_verdicts("net-#.pt")[CheckpointId("net-#.pt", 300, 1)].outcome is Outcome.BAD


def test_an_older_one_stands_in_for_what_cannot_be_read(root, three, tmp_path, monkeypatch):
    """An I/O error says nothing about the bytes: nothing is recorded, and with the step named it is the error."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    real = module.copy_files

    def copy(source, target, files, progress=None):
        for file in files:
            if "300" in file.path:
                raise DeniedError("the disk says no", key=file.path)
        real(source, target, files, progress)

    monkeypatch.setattr(module, "copy_files", copy)
    assert str(restore(look(three), str(tmp_path / "out")).id) == "200.1"
    assert look(three).history.current_verdicts("net-#.pt")[CheckpointId("net-#.pt", 300, 1)].outcome is Outcome.GOOD
    with pytest.raises(DeniedError):
        restore(look(three), str(tmp_path / "again"), step=300)


def test_of_two_series_at_one_step_the_runs_own_is_restored(root, run, tmp_path):
    """The replica has the other series, whose file in the run is gone: no newer one is there, so the nearer comes."""
    place = str(tmp_path / "elsewhere")
    for folder in ("a", "b"):
        write_torch(root / folder, 100, seed=ord(folder))
    settings = QUICK.changed(keep="none", replicas=(place,))
    reconcile(look(run, settings), PassNotes())
    replicate(look(run, settings), place)
    own = (root / "a" / "net-100.pt").read_bytes()
    (root / "b" / "net-100.pt").unlink()
    os.unlink(os.path.join(place, "a", "net-100.pt"))
    assert restore(look(run, settings), str(tmp_path / "out")).source == run.url
    assert (tmp_path / "out" / "net-100.pt").read_bytes() == own


@pytest.mark.parametrize("by", ["prune", "rollback"])
def test_what_is_moved_before_it_is_pinned_comes_from_there(three, tmp_path, monkeypatch, by):
    """It was chosen where it lay, and lies in the trash or in quarantine by the time it is pinned."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())

    class Late(restorable.InUse):
        def pin(self, id):
            if by == "prune":
                prune(look(three), Policy(keep_last=1, keep_good=1), grace=3600.0)
            elif look(three).checkpoint("net-100.pt") is not None:
                quarantine(look(three), "net-100.pt", reason="a rollback")
            super().pin(id)

    monkeypatch.setattr(restorable, "InUse", Late)
    assert str(restore(look(three), str(tmp_path / "out"), step=100).id) == "100.1"


def test_what_a_prune_takes_after_it_was_found_comes_from_the_trash(root, three, tmp_path, monkeypatch):
    """The prune had looked at the pins just before there was one, and moves it after the restore saw it in place."""
    before = (root / "net-100.pt").read_bytes()
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    looked, seen = threading.Event(), threading.Event()
    real_throw, real_lies = prune_module.throw_away, restorable._Places._lies

    def throw_away(*arguments):
        looked.set()
        assert seen.wait(60)
        return real_throw(*arguments)

    def lies(*arguments):
        found = real_lies(*arguments)
        seen.set()
        pruning.join(60)
        return found

    monkeypatch.setattr(prune_module, "throw_away", throw_away)
    monkeypatch.setattr(restorable._Places, "_lies", lies)
    policy = Policy(keep_last=2, keep_good=1)
    pruning = threading.Thread(target=prune, args=(look(three), policy), kwargs={"grace": 3600.0})
    pruning.start()
    assert looked.wait(60)
    restored = restore(look(three), str(tmp_path / "out"), step=100)
    assert (str(restored.id), (tmp_path / "out" / "net-100.pt").read_bytes()) == ("100.1", before)


def test_what_is_restored_from_the_trash_is_not_removed_meanwhile(root, three, tmp_path, monkeypatch):
    """The prune had decided to empty the trash before the restore pinned what it reads."""
    before = (root / "net-100.pt").read_bytes()
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    prune(look(three), Policy(keep_last=1, keep_good=1), grace=3600.0)
    decided, pinned = threading.Event(), threading.Event()
    real_due, real_copy = prune_module._due, module.copy_files

    def due(*arguments):
        found = real_due(*arguments)
        decided.set()
        assert pinned.wait(60)
        return found

    def copy(*arguments):
        pinned.set()
        emptying.join(60)
        real_copy(*arguments)

    monkeypatch.setattr(prune_module, "_due", due)
    monkeypatch.setattr(module, "copy_files", copy)
    policy = Policy(keep_last=1, keep_good=1)
    emptying = threading.Thread(target=prune, args=(look(three), policy), kwargs={"grace": -1.0})
    emptying.start()
    assert decided.wait(60)
    assert str(restore(look(three), str(tmp_path / "out"), step=100).id) == "100.1"
    assert (tmp_path / "out" / "net-100.pt").read_bytes() == before
    assert sorted(id.step for id in list_trashed(three)) == [100]


def test_what_could_not_be_told_of_an_older_one_is_not_called_damage(root, three, tmp_path):
    """The newest is damaged, and of the one before it the manifest cannot be read: it may be good."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    flip(root / "net-300.pt")
    for manifest in (root / "_ckptguard" / "manifests").rglob("*200.1.json"):
        manifest.rename(tmp_path / "elsewhere.json")
        manifest.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DeniedError):
        restore(look(three, QUICK.changed(keep="none")), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()

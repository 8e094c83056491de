"""What was put aside goes when its time is over, and damaged bytes only while their checkpoint is good."""

import os
import random

import pytest
from support import damage
from support.kept_runs import guarded
from support.runs import write_torch
from support.views import look

from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records import who_and_when
from ckptguard.records.run import list_records
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import scrub
from ckptguard.retention.prune import prune_by_settings
from ckptguard.retention.trash import expire_aside
from ckptguard.storage.local.writes import shown_as_written
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId

DAY = 86400.0


@pytest.fixture
def machine(monkeypatch):
    """The machine's own clock: add days to it."""

    class Machine:
        days = 0.0

    real = who_and_when._uptime
    monkeypatch.setattr(who_and_when, "_uptime", lambda: real() + Machine.days * DAY)
    return Machine


def damaged_bytes(root):
    """The folders of damaged bytes."""
    return list((root / "_ckptguard" / "quarantine").rglob("*.damaged-*"))


def hurt(root, run):
    """Damage the checkpoint of step 200, and have it found."""
    manifest = look(run).history.manifest(CheckpointId("sharded-#", 200, 1))
    damage.KINDS["span_flip"](root, manifest, random.Random(7))
    damage.set_times(root, manifest, "kept")
    scrub(look(run))


def test_damaged_bytes_go_a_while_after_the_checkpoint_was_repaired(root, machine):
    """For the time of grace from the first look after the repair; then nothing is left of them, on record neither."""
    run = guarded(root)
    hurt(root, run)
    repair(look(run))
    assert len(damaged_bytes(root)) == 1
    machine.days = 5.0
    assert prune_by_settings(look(run)) == ((), None, [])  # since when it is good is known from now on
    machine.days = 5.9
    prune_by_settings(look(run))
    assert len(damaged_bytes(root)) == 1
    machine.days = 6.1
    prune_by_settings(look(run))
    assert damaged_bytes(root) == []
    prune_by_settings(look(run))
    assert list_records(run, "seen") == []


def test_damaged_bytes_stay_while_their_checkpoint_is_not_good(root, machine):
    """Not good any more: the time starts from scratch once it is. Damaged again and not repaired: they stay."""
    run = guarded(root)
    hurt(root, run)
    repair(look(run))
    expire_aside(look(run), DAY)
    machine.days = 0.9
    hurt(root, run)
    assert expire_aside(look(run), DAY) == []
    assert list_records(run, "seen") == []
    machine.days = 400.0
    assert expire_aside(look(run), DAY) == []
    repair(look(run))
    assert len(damaged_bytes(root)) == 2
    assert expire_aside(look(run), DAY) == []
    machine.days = 401.1
    assert len(expire_aside(look(run), DAY)) == 2


def test_damaged_bytes_of_what_is_sick_stay(root, machine):
    """SUSPECT is not good."""
    run = guarded(root)
    hurt(root, run)
    repair(look(run))
    mark_suspect(look(run), CheckpointId("sharded-#", 200, 1), "training was sick")
    expire_aside(look(run), DAY)
    machine.days = 400.0
    assert expire_aside(look(run), DAY) == []
    assert len(damaged_bytes(root)) == 1


def test_damaged_bytes_go_although_their_checkpoint_was_rotated_away(root, machine):
    """It was whole after the repair, and is gone since."""
    run = guarded(root)
    hurt(root, run)
    repair(look(run))
    expire_aside(look(run), DAY)
    run.storage.remove("sharded-200")
    run.records.remove("kept")
    machine.days = 1.1
    assert len(expire_aside(look(run), DAY)) == 1


def test_what_lay_in_the_way_of_a_save_goes_too(root, run, machine):
    """By the name that we gave it and what is in it; what looks like it is somebody's."""
    write_torch(root, 1, seed=1)
    for name, inside in (("0123abcd", "net-1.pt"), ("mine", "net-1.pt"), ("4567cdef", "notes.txt")):
        (root / f"tmp-replaced-{name}").mkdir()
        (root / f"tmp-replaced-{name}" / inside).write_bytes(b"x")
    notes = PassNotes()
    reconcile(look(run), notes)
    machine.days = 0.9
    notes.prune_at = 0.0
    reconcile(look(run), notes)
    assert (root / "tmp-replaced-0123abcd").exists()
    machine.days = 1.1
    notes.prune_at = 0.0
    reconcile(look(run), notes)
    assert (root / "tmp-replaced-0123abcd").exists()  # by the times of its files it is new
    for path in root.glob("tmp-*"):
        for one in (*path.iterdir(), path):
            os.utime(one, (1, 1))
    notes.prune_at = 0.0
    reconcile(look(run), notes)
    assert sorted(p.name for p in root.iterdir()) == [
        "_ckptguard",
        "net-1.pt",
        "tmp-replaced-4567cdef",
        "tmp-replaced-mine",
    ]


def test_a_long_running_daemon_collects_what_is_killed_later(root, run):
    """Saves are killed at any time: leftovers are looked for again, and what a living process writes stays."""
    notes = PassNotes()
    reconcile(look(run), notes)
    dead, living = root / "tmp-step-000000001-0123abcd", root / "tmp-step-000000002-0123abcd"
    for folder in (dead, living):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
        for path in (folder / "model.safetensors", folder):
            os.utime(path, (1, 1))
    with shown_as_written(str(living)):
        reconcile(look(run), notes)
        assert (dead.exists(), living.exists()) == (True, True)
        notes.collect_at = 0.0
        reconcile(look(run), notes)
        assert (dead.exists(), living.exists()) == (False, True)
    notes.collect_at = 0.0
    reconcile(look(run), notes)
    assert not living.exists()

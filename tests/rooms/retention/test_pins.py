"""Pins: what is in use, or was asked for, is not removed to make room; what holds nothing any more is collected."""

import datetime
import signal
import subprocess
import sys

import fsspec
import msgspec
import pytest
from support.records_on_disk import at
from support.runs import QUICK, write_torch
from support.views import look

from ckptguard.errors import StorageFullError
from ckptguard.keep.copies import trim_kept
from ckptguard.records.kept import list_kept
from ckptguard.records.pins import (
    IN_USE,
    InUse,
    counts,
    list_pins,
    pin_checkpoint,
    pinned_generations,
    release_pin,
)
from ckptguard.records.run import open_run
from ckptguard.recover import restore as restore_module
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId

SERIES = "net-#.pt"
_OTHER = """
import sys
from ckptguard.records.pins import IN_USE, pin_checkpoint
from ckptguard.records.run import open_run
from ckptguard.values.ids import CheckpointId
pin_checkpoint(open_run(sys.argv[1]), CheckpointId("net-#.pt", 100, 1), reason=IN_USE)
print("pinned", flush=True)
sys.stdin.read()
"""


def kept_steps(run):
    return [id.step for id in list_kept(run)]


def test_a_pinned_copy_stays_until_every_pin_is_released(root, three):
    """Two pins are two reasons: the copy goes when both are gone, and not before."""
    reconcile(look(three, QUICK.changed(keep_good=3)), PassNotes())
    assert kept_steps(three) == [100, 200, 300]
    first = pin_checkpoint(three, CheckpointId(SERIES, 100, 1), note="the one for the paper")
    second = pin_checkpoint(three, CheckpointId(SERIES, 100, 1), reason=IN_USE)
    assert [(p.step, p.reason, p.note) for p in sorted(list_pins(three), key=lambda p: p.reason)] == [
        (100, "in use", ""),
        (100, "pinned", "the one for the paper"),
    ]
    for pin in (first, second):
        reconcile(look(three, QUICK.changed(keep_good=1)), PassNotes())
        assert 100 in kept_steps(three)
        assert 200 not in kept_steps(three)
        release_pin(three, pin)
    assert trim_kept(look(three, QUICK.changed(keep_good=1))) == [CheckpointId(SERIES, 100, 1)]
    release_pin(three, first)  # once more is no error
    assert list_pins(three) == []


def test_a_pinned_copy_of_a_suspect_checkpoint_stays(root, three):
    """A rollback makes it SUSPECT, for which its copy would go."""
    reconcile(look(three), PassNotes())
    pin_checkpoint(three, CheckpointId(SERIES, 300, 1))
    roll_back(look(three), GoBack(reason="test", before_step=300, check_writing=False))
    reconcile(look(three), PassNotes())
    assert 300 in kept_steps(three)


def test_what_a_dead_process_used_is_free(root, three):
    """In use by a living process of this machine it counts; killed, it does not, and the record is collected."""
    other = subprocess.Popen([sys.executable, "-c", _OTHER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"pinned\n"
        [pin] = list_pins(three)
        assert counts(three, pin)
        assert collect_leftovers(look(three)) == []
        elsewhere = msgspec.structs.replace(pin.owner, host="another")
        other.send_signal(signal.SIGKILL)
        other.wait()
    finally:
        other.kill()
        other.communicate()
    assert not counts(three, pin)
    assert counts(three, msgspec.structs.replace(pin, reason="pinned"))  # that ends with nobody
    assert counts(three, msgspec.structs.replace(pin, owner=elsewhere))  # who could tell?
    assert collect_leftovers(look(three)) == [f"_ckptguard/{pin.key}"]
    assert list_pins(three) == []


def test_a_pid_that_was_given_away_is_not_its_owner(three):
    """The same number, started at another time, is another process."""
    pin = pin_checkpoint(three, CheckpointId(SERIES, 100, 1), reason=IN_USE)
    assert counts(three, pin)
    assert not counts(three, msgspec.structs.replace(pin, owner=msgspec.structs.replace(pin.owner, started="1")))
    for pid in (0, -1, 10**30):
        assert counts(three, msgspec.structs.replace(pin, owner=msgspec.structs.replace(pin.owner, pid=pid)))


def test_a_pin_ends_when_it_was_to_end(three):
    """`until` has passed: nothing is held, and the record is collected."""
    over = pin_checkpoint(three, CheckpointId(SERIES, 100, 1), lasts=datetime.timedelta(seconds=-1))
    pin_checkpoint(three, CheckpointId(SERIES, 200, 1), lasts=datetime.timedelta(hours=1))
    assert pinned_generations(three) == {CheckpointId(SERIES, 200, 1)}
    assert collect_leftovers(look(three)) == [f"_ckptguard/{over.key}"]


def test_a_pin_that_cannot_be_read_still_holds(root, three, tmp_path):
    """In doubt nothing is removed. What is not named like a pin is none."""
    folder = at(root, "_ckptguard/pins/" + SERIES.replace("/", "%2F") + "/000000000100.1")
    pin = pin_checkpoint(three, CheckpointId(SERIES, 200, 1))
    folder.mkdir(parents=True)
    (folder / "torn.json").write_text('{"format": 1, "ser')
    (folder / "moved.json").write_text(at(root, f"_ckptguard/{pin.key}").read_text())
    (tmp_path / "outside").write_text("{}")
    (folder / "link.json").symlink_to(tmp_path / "outside")
    (folder / "text.txt").write_text("no pin")
    (folder.parent / "100.1").mkdir()
    (folder.parent / "100.1" / "short.json").write_text("no pin either")
    assert pinned_generations(three) == {CheckpointId(SERIES, 100, 1), CheckpointId(SERIES, 200, 1)}
    assert collect_leftovers(look(three)) == []


def test_what_is_restored_or_gone_back_to_is_pinned_meanwhile(root, three, tmp_path, monkeypatch):
    """While the bytes are copied there is one pin, and none afterwards, whether or not it worked."""
    reconcile(look(three), PassNotes())
    seen, real = [], restore_module.copy_files

    def copy(*arguments):
        seen.append([(p.step, p.generation, p.reason, p.note) for p in list_pins(three)])
        if len(seen) > 1:
            raise StorageFullError("no space left", key="x")
        real(*arguments)

    monkeypatch.setattr(restore_module, "copy_files", copy)
    restore(look(three), str(tmp_path / "out"))
    with pytest.raises(StorageFullError):
        restore(look(three), str(tmp_path / "again"))
    assert seen == [[(300, 1, "in use", "restore")]] * 2
    assert list_pins(three) == []
    roll_back(look(three), GoBack(reason="test", dry_run=True, check_writing=False))
    roll_back(look(three), GoBack(reason="test", check_writing=False))
    assert list_pins(three) == []


def test_pins_work_on_object_stores(tmp_path):
    """The same on memory://, which stands for every remote storage."""
    write_torch(tmp_path / "run", 100, seed=1)
    memory = fsspec.filesystem("memory")
    memory.makedirs("/runs/pins-test")
    try:
        memory.pipe_file("/runs/pins-test/net-100.pt", (tmp_path / "run" / "net-100.pt").read_bytes())
        run = open_run("memory://runs/pins-test")
        reconcile(look(run), PassNotes())
        assert list_pins(run) == []
        with InUse(run, "a test") as in_use:
            in_use.pin(CheckpointId(SERIES, 100, 1))
            in_use.pin(CheckpointId(SERIES, 100, 1))
            assert pinned_generations(run) == {CheckpointId(SERIES, 100, 1)}
            assert len(list_pins(run)) == 1
        assert list_pins(run) == []
    finally:
        memory.rm("/runs/pins-test", recursive=True)


def test_what_cannot_be_pinned_is_said_and_used(three, tmp_path, monkeypatch, caplog):
    """A full disk for records: the restore goes on."""
    reconcile(look(three), PassNotes())
    real = type(three.records).create

    def create(self, key, data):
        if key.startswith("pins/"):
            raise StorageFullError("no space left for a pin", key=key)
        real(self, key, data)

    monkeypatch.setattr(type(three.records), "create", create)
    assert restore(look(three), str(tmp_path / "out")).step == 300
    assert "could not be pinned, so other processes may remove it: no space left for a pin" in caplog.text


def test_what_is_in_use_here_is_held_whatever_the_clock_says(three):
    """Its owner can be asked for; only that of another machine is believed for a time."""
    pin = pin_checkpoint(three, CheckpointId(SERIES, 100, 1), reason=IN_USE, lasts=datetime.timedelta(seconds=-1))
    assert counts(three, pin)
    elsewhere = msgspec.structs.replace(pin, owner=msgspec.structs.replace(pin.owner, host="another"))
    assert not counts(three, elsewhere)

"""Kept copies make room: no save of a trainer fails because of them, and one good save's bytes always stay."""

import errno
import os
import random
import shutil

import pytest
from support.small_disk import BLOCK, Series, SmallDisk, checkpoint_files
from support.views import look

from ckptguard.decisions import room
from ckptguard.inspect.status import status
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import open_run
from ckptguard.runs.free_space import SHARED, SharedSpace
from ckptguard.storage.local import local_storage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SEQUENCES = 2000 if FULL else 96
FOUND = (619, 941, 1314)
SAVE = 16 * BLOCK


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A small disk on which only checkpoints take space."""
    vars(SHARED).update(vars(SharedSpace()))
    made = SmallDisk(tmp_path / "disk", 0)
    made.folder.mkdir()
    monkeypatch.setattr(local_storage.LocalStorage, "free_space", lambda self: made.free())
    monkeypatch.setattr(room, "SPARE", 0)
    return made


class Guarded:
    """One run under a daemon."""

    def __init__(self, disk, name, settings):
        self.root, self.settings, self.notes = disk.folder / name, settings, PassNotes()
        self.root.mkdir()

    def cycle(self, *, judges=True):
        """One pass. Unless it `judges`, only what must not wait gets a verdict."""
        return reconcile(look(open_run(str(self.root)), self.settings), self.notes, assume_quiet=judges)


class Sequence:
    """A generated trainer, or several, on one disk, and a daemon."""

    def __init__(self, disk, seed):
        self.rng = rng = random.Random(seed)
        self.disk = disk
        keep = rng.choice(("auto", "auto", "copy", "link"))
        settings = Settings(
            settle=1e6, scan_interval=1.0, keep=keep, keep_good=rng.randint(1, 3), keep_pending=rng.randint(1, 2)
        )
        self.poisoned_from = rng.choice((None, None, None, 3, 5))
        self.runs = [Guarded(disk, f"run{number}", settings) for number in range(rng.choice((1, 1, 1, 2)))]
        self.series = [
            Series(
                run=run.root,
                name=name,
                way=rng.choice(("numbered", "numbered", "renamed", "in place")),
                size=BLOCK * rng.randint(2, 16),
                keeps=rng.randint(1, 3),
                rotates_first=rng.random() < 0.3,
            )
            for run in self.runs
            for name in ("model", "opt", "ema")[: rng.choice((1, 1, 2, 3))]
        ]
        # What the trainers need at least, and up to twice as much.
        peak = sum(one.size * (one.keeps + 1 if one.way != "in place" else 1) for one in self.series)
        disk.capacity = int(peak * rng.choice((1.0, 1.1, 1.3, 1.6, 2.0, 3.0)))
        disk.others = 0
        self.safe = set()  # series of which a good save must be there until the next pass
        self.harmed = 0

    def run(self):
        """Ten saves of each, and passes in between. Each step is checked."""
        for number in range(8):
            nan = self.poisoned_from is not None and number >= self.poisoned_from
            order = self.rng.sample(self.series, len(self.series))
            for one in order:
                if number == 0 or self.rng.random() < 0.9:  # what was never saved is not expected
                    done = one.save(self.disk, nan=nan)
                    if done == "harmed":
                        self.excused(one)
                    self.check()
            if self.rng.random() < 0.15:
                self.disk.others = 0
                self.disk.others = self.rng.randint(0, min(SAVE, self.disk.free()))
            self.passes()

    def passes(self):
        """The daemon sees what was saved. Runs that are short of room have the others look again."""
        judges = self.judged = self.rng.random() < 0.8
        for _ in range(2):
            results = []
            for run in self.rng.sample(self.runs, len(self.runs)):
                had = {one.name for one in self.series if one.run == run.root and self.is_there(one)}
                done = run.cycle(judges=judges)
                results.append(done)
                for one in (s for s in self.series if s.run == run.root and s.name in had):
                    assert self.is_there(one), f"a pass removed the last good save of {one.name}"
                assert self.disk.used() <= self.disk.capacity
            if not any(done.short_of_room for done in results):
                break
        self.safe = {(one.run, one.name) for one in self.series if self.is_there(one) and self.is_safe(one, results)}

    def excused(self, series):
        """A save had no room: then what the copies hold alone is the last good save of each series."""
        self.harmed += 1
        for run in self.runs:
            view = look(open_run(str(run.root)), run.settings)
            alone = {}
            for id in list_kept(view.run):
                copy = read_kept(view.run, id)
                files = [view.run.records.path_of(copy.key(file)) for file in copy.files]
                if any(os.lstat(file).st_nlink == 1 for file in files):
                    alone.setdefault(id.series, []).append(id)
            for name, ids in alone.items():
                assert len(ids) == 1, f"copies that could go: {ids}"
                assert view.is_good(ids[0])
                path = view.history.manifest(ids[0]).files[0].path
                fixed = (s for s in self.series if s.run == run.root and s.path(s.step).name == path)
                way = next((s.way for s in fixed), "numbered")
                unproven = way == "in place" or (way == "renamed" and len(view.history.sealed(name)) < 3)
                newer_is_good = self.poisoned_from is None and self.judged
                assert unproven or not newer_is_good, "a newer good save was there"

    def is_there(self, series):
        """The bytes of a good save are in the run."""
        return bool(self.disk.contents(series.run) & series.good)

    def is_safe(self, series, results):
        """A series has a good verdict, and a copy of its own or room for a link that no save writes into."""
        run = next(run for run in self.runs if run.root == series.run)
        view = look(open_run(str(run.root)), run.settings)
        for name in view.history.names:
            paths = [p for id in view.history.sealed(name) if (p := view.history.manifest(id).files[0].path)]
            if not any(path == series.path(series.step).name or path.startswith(f"{series.name}-") for path in paths):
                continue
            good = [id for id, s in view.history.current_verdicts(name).items() if s.outcome.value == "good"]
            copies = [read_kept(view.run, id) for id in list_kept(view.run) if id in good]
            if any(copy.how != "link" for copy in copies):
                return True
            seen_twice = series.way == "numbered" or (series.way == "renamed" and len(view.history.sealed(name)) > 2)
            return bool(good) and seen_twice and not any(done.short_of_room for done in results)
        return False

    def check(self):
        """What was safe after the last pass is there, whatever the trainer does."""
        for one in self.series:
            if (one.run, one.name) in self.safe:
                assert self.is_there(one), f"no good save of {one.name} is left"


@pytest.mark.campaign
@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("part", range(8))
def test_no_save_fails_because_of_copies(disk, part):
    """Generated disks, saves, rotations and orders: with a pass between two rounds of saves a save has the room that it
    has without a daemon, unless the bytes of the last good save take it; and those are never released."""
    for seed in range(part, SEQUENCES, 8):
        vars(SHARED).update(vars(SharedSpace()))
        for path in disk.folder.iterdir():
            shutil.rmtree(path)
        one = Sequence(disk, seed)
        try:
            one.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", FOUND)
def test_what_the_long_campaign_found(disk, seed):
    """Sequences that once lost a good save, or the room of a save."""
    Sequence(disk, seed).run()


def test_a_pass_with_nothing_to_do_says_that_the_next_save_may_not_fit(disk):
    """While the room stays too little, each pass says so. Once there is room, a pass makes the link for which there was
    none, although nothing was saved."""
    run = Guarded(disk, "run", Settings(settle=0.0))
    one = Series(run=run.root, name="model", way="numbered", size=SAVE, keeps=1, rotates_first=True)
    disk.capacity = 2 * SAVE
    assert one.save(disk) == "saved"
    for _ in range(3):
        assert run.cycle().short_of_room
    assert list_kept(open_run(str(run.root))) == []
    disk.capacity = 2 * SAVE + SAVE // 2
    assert not run.cycle().short_of_room
    [id] = list_kept(open_run(str(run.root)))
    assert read_kept(open_run(str(run.root)), id).how == "link"


def test_a_verdict_about_other_bytes_removes_no_copy(disk):
    """A save is copied before anything proves that it is whole, then replaced by one that is BAD: the copy stays, with
    an id of its own, until a newer save is GOOD."""
    run = Guarded(disk, "run", Settings(settle=1e6, keep="copy"))
    one = Series(run=run.root, name="model", way="renamed", size=SAVE)
    disk.capacity = 100 * SAVE
    assert one.save(disk) == "saved"
    assert run.cycle(judges=False).checked == ()
    [first] = one.good
    assert one.save(disk, nan=True) == "saved"
    assert [checked.outcome.value for checked in run.cycle().checked] == ["bad"]
    assert first in disk.contents(run.root)
    assert one.save(disk) == "saved"
    assert [checked.outcome.value for checked in run.cycle().checked] == ["good"]
    assert disk.contents(run.root) == one.good - {first}


def test_a_quota_that_the_free_space_does_not_show(disk, monkeypatch):
    """A copy fails with EDQUOT although there seems to be space: nothing half-made stays, and the save has its verdict
    and a link. No full copy is tried again soon, so our writes never take what the trainer's next save needs."""
    disk.capacity = 1000 * SAVE
    run = Guarded(disk, "run", Settings(settle=0.0, keep="copy"))
    one = Series(run=run.root, name="model", way="numbered", size=SAVE, keeps=2)
    tried = []

    def refused(source, target, entry):
        tried.append(entry.key)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(local_storage, "_copy_blocks", refused)
    for _ in range(4):
        assert one.save(disk) == "saved"
        done = run.cycle()
        assert [checked.outcome.value for checked in done.checked] == ["good"]
        assert disk.used() <= 3 * SAVE
    view = look(open_run(str(run.root)), run.settings)
    assert {read_kept(view.run, id).how for id in list_kept(view.run)} == {"link"}
    assert len(tried) == 1
    assert done.room.problem == "not enough room: no copy, only a hard link"


def test_the_trash_is_emptied_early_where_the_next_save_needs_the_room(disk):
    """What retention removed can be restored for a day, but not at the cost of a save. With room it stays."""
    run = Guarded(disk, "run", Settings(settle=0.0, keep="link", keep_last=2))
    one = Series(run=run.root, name="model", way="numbered", size=SAVE, keeps=99)
    disk.capacity = 100 * SAVE
    for _ in range(5):
        assert one.save(disk) == "saved"
        run.cycle()
    trash = run.root / "_ckptguard" / "trash"
    assert len(checkpoint_files(trash)) == 3
    disk.capacity = disk.used() + SAVE // 2
    done = run.cycle()
    assert len(checkpoint_files(trash)) < 3
    assert not done.short_of_room
    assert disk.free() >= SAVE
    assert one.save(disk) == "saved"


def test_what_was_released_is_on_record_until_there_is_room(disk):
    """`status` reads which copies went and what is lacking. With room the copies come back, and nothing is said."""
    run = Guarded(disk, "run", Settings(settle=0.0))
    one = Series(run=run.root, name="model", way="numbered", size=SAVE, keeps=2)
    disk.capacity = 60 * SAVE // 16
    for _ in range(5):
        assert one.save(disk) == "saved"
        run.cycle()
    found = status(look(open_run(str(run.root)), run.settings))
    assert found.room.problem == "not enough room: no copy, only a hard link"
    assert "model-1.safetensors" in found.room.released
    disk.capacity = 100 * SAVE
    run.cycle()
    assert one.save(disk) == "saved"
    run.cycle()
    found = status(look(open_run(str(run.root)), run.settings))
    assert found.room is None
    assert found.protected

"""How fast a run fills its disk: only what stays counts, and too little to judge by is not known."""

import os
import random

import pytest
from support.layouts import WRITERS
from support.runs import QUICK
from support.views import look

from ckptguard.decisions.growth import filling_words, full_in, growth_of, unless_room
from ckptguard.inspect.status import status
from ckptguard.records.run import open_run
from ckptguard.runs.free_space import SharedSpace
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.run_summary import RunSummary

DAY = 86400.0


@pytest.mark.parametrize("seed", range(100))
def test_it_is_what_a_simulated_disk_shows(seed):
    """A disk that is simulated save by save, with a rotation and milestones, grows at the rate that the records say."""
    chance = random.Random(seed)
    every, rotation = chance.choice([0, 2, 5]), chance.choice([0, 2, 3])
    size, interval = chance.randint(1, 10**12), chance.uniform(60, 7200)
    saves = [(n * interval, size) for n in range(400)]
    stays = [not rotation or n >= 400 - rotation or (every > 0 and n % every == 0) for n in range(400)]
    rate = growth_of((at, bytes if there else 0) for (at, bytes), there in zip(saves, stays, strict=True))
    share = 1.0 if not rotation else 1.0 / every if every else 0.0
    assert rate == pytest.approx(share * size / interval, rel=0.01)


def test_too_little_to_judge_by_is_not_known():
    """Fewer than four saves, saves of a few minutes, and equal or wrong times."""
    assert growth_of([]) is None
    assert growth_of([(0.0, 1), (DAY, 1), (2 * DAY, 1)]) is None
    assert growth_of([(n * 1.0, 10**9) for n in range(100)]) is None
    assert growth_of([(5.0, 10**9)] * 100) is None


@pytest.mark.parametrize(
    ("free", "growth", "together", "expected"),
    [
        (100, 1.0, 1.0, 100.0),
        (100, 1.0, 4.0, 25.0),
        (0, 1.0, 1.0, 0.0),
        (None, 1.0, 1.0, None),
        (100, None, 4.0, None),
        (100, 0.0, 4.0, None),
        (100, 2.0, 0.0, 50.0),
    ],
)
def test_when_the_disk_is_full(free, growth, together, expected):
    """By all runs of the disk, and only for one that grows itself."""
    assert full_in(free, growth, together) == expected


def test_words_come_two_weeks_before():
    """With the rate a day, what is free, and when."""
    run = RunSummary(url="/r", name="r", growth=1024.0**3 / DAY, free=3 * 2**30, full_in=3 * DAY)
    assert (
        filling_words(run) == "its disk is full in about 3 days: the run grows by 1.0 GiB a day, and 3.0 GiB are free"
    )
    assert filling_words(RunSummary(url="/r", name="r", growth=1.0, free=2, full_in=15 * DAY)) is None
    assert filling_words(RunSummary(url="/r", name="r")) is None


def test_runs_of_one_disk_fill_it_together():
    """Each counts with what was noted of it last; those of another disk do not."""
    shared = SharedSpace()
    assert shared.note_growth("disk 1", "/a", 2.0) == 2.0
    assert shared.note_growth("disk 1", "/b", 3.0) == 5.0
    assert shared.note_growth("disk 2", "/c", 7.0) == 7.0
    assert shared.note_growth("disk 1", "/a", 0.0) == 3.0


@pytest.mark.parametrize(
    ("free", "left", "expected"),
    [(100, None, 1.0), (100, 101, 1.0), (100, 100, None), (100, -5, None), (0, 1, 1.0), (None, 5, 1.0)],
)
def test_a_budget_holds_a_run_only_if_there_is_room_for_it(free, left, expected):
    """One that lets it grow by more than is free fills the disk like none."""
    assert unless_room(1.0, free, left) == expected
    assert unless_room(None, free, left) is None


def test_status_says_it_unless_a_budget_holds_the_run(root, monkeypatch):
    """Ten saves of ten minutes each on a disk with room for two more of them."""
    for n in range(1, 11):
        folder = root / WRITERS["trainer"](root, n * 100, n * 100)
        for file in folder.iterdir():
            os.utime(file, (n * 600, n * 600))
    run = open_run(str(root))
    reconcile(look(run, QUICK), PassNotes())
    size = sum(file.stat().st_size for file in folder.iterdir())
    monkeypatch.setattr("ckptguard.inspect.status.free_space", lambda storage: 2 * size)
    found = status(look(run, QUICK)).summary
    assert found.growth == pytest.approx(size / 600, rel=0.01)
    assert found.full_in == pytest.approx(1200, rel=0.01)
    assert "20 minutes" in filling_words(found)
    used = sum(found.bytes.values())
    for budget, fills in (("1TB", True), (used + 3 * size, True), (used + size, False), (1, False)):
        found = status(look(run, QUICK.changed(keep_bytes=budget))).summary
        assert (found.full_in is not None) == fills, budget
        assert (filling_words(found) is not None) == fills

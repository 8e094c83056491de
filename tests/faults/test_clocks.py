"""Clocks that are wrong: a year ahead, a year back, standing still. Nothing is removed early, and nothing waits for
ever for a file of the future."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from unittest import mock

import pytest
from support.tiny_run import SERIES, TINY, inline, name_of, save
from support.views import look

from ckptguard.records import leases, who_and_when
from ckptguard.records.leases import NOBODY, Lease
from ckptguard.records.pins import IN_USE, LONGEST_USE, pin_checkpoint, pinned_generations
from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.repair.one_place import cut_short
from ckptguard.retention import trash
from ckptguard.retention.pin import pin
from ckptguard.retention.prune import prune
from ckptguard.runs.run_view import select_checkpoint
from ckptguard.runs.work import Work
from ckptguard.storage.local.writes import shown_as_written
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy

YEAR = 365 * 86400.0
DAY = 86400.0
CLOCKS = {"a year ahead": YEAR, "a year back": -YEAR, "frozen": None}
WITHIN = Policy(keep_within=2 * DAY, keep_good=1)
LAST = Policy(keep_last=1, keep_good=1)


class Clock:
    """The wall clock as everything here sees it: off by some seconds, or standing still from now on."""

    def __init__(self, offset: float | None) -> None:
        self.offset, self.real, self.begun = offset, time.time, time.time()

    def time(self) -> float:
        """`time.time` on this clock."""
        return self.begun if self.offset is None else self.real() + self.offset

    def patched(self):
        """Have it be the clock."""
        clock = self

        class Moment(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.datetime.fromtimestamp(clock.time(), tz)

        calendar = mock.Mock(wraps=datetime)
        calendar.datetime, calendar.UTC, calendar.timedelta = Moment, datetime.UTC, datetime.timedelta
        clock_of_records = mock.patch("ckptguard.records.who_and_when.datetime", calendar)
        return clock_of_records, mock.patch("time.time", self.time)


@pytest.fixture(params=CLOCKS, ids=str)
def clock(request):
    """A wrong clock, not yet in force."""
    return Clock(CLOCKS[request.param])


@pytest.fixture
def wrong(clock):
    """A wrong clock in force: call it."""
    started = []

    def begin():
        for patch in clock.patched():
            patch.start()
            started.append(patch)

    yield begin
    for patch in reversed(started):
        patch.stop()


@pytest.fixture(params=["memory", "local"])
def run(request, tmp_path):
    """A run of four verified checkpoints."""
    url = f"memory://clocks-{tmp_path.name}-{os.getpid()}" if request.param == "memory" else str(tmp_path / "run")
    for step in (100, 200, 300, 400):
        save(url, step, step)
        reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))
    return open_run(url)


def present(run):
    """The steps in place that count."""
    marked = {step for _, step, _ in list_trashed(run)}
    keys = {e.key.partition("/")[0] for e in run.storage.list("", recursive=True) if e.key.startswith("model-")}
    return {int(key.removeprefix("model-")) for key in keys} - marked


def test_what_was_saved_just_now_is_within_two_days(run, wrong):
    """Whatever our own clock says, and whatever another one said when the newest was saved."""
    wrong()
    assert prune(look(run), WITHIN, grace=DAY).removed == ()
    save(run.url, 500, 500)
    reconcile(look(run, TINY), PassNotes(), work=Work(scanner=inline), assume_quiet=True)
    assert prune(look(run), WITHIN, grace=DAY).removed == ()
    assert present(run) == {100, 200, 300, 400, 500}


def test_the_trash_keeps_for_its_time_of_grace(run, wrong):
    """What was removed a moment ago stays in the trash for a day, whatever the clock did meanwhile."""
    assert {d.checkpoint.id.step for d in prune(look(run), LAST, grace=DAY).removed} == {100, 200, 300}
    wrong()
    done = prune(look(run), LAST, grace=DAY)
    assert done.emptied == ()
    assert {mark.step for mark in done.in_trash} == {100, 200, 300}


def test_pins_without_an_end_hold(run, wrong):
    """A pin that somebody asked for ends when it is released."""
    pin(look(run), select_checkpoint(run, look(run).checkpoints, "200"))
    wrong()
    assert pinned_generations(run) == {CheckpointId(SERIES, 200, 1)}
    assert {d.checkpoint.id.step for d in prune(look(run), LAST, grace=DAY).removed} == {100, 300}


def test_what_is_in_use_by_a_living_process_is_held(run, wrong):
    """A process of this machine that lives holds what it uses, whatever the clock says."""
    pin_checkpoint(run, CheckpointId(SERIES, 200, 1), reason=IN_USE, lasts=LONGEST_USE)
    wrong()
    assert {d.checkpoint.id.step for d in prune(look(run), LAST, grace=DAY).removed} == {100, 300}
    collect_leftovers(look(run))
    assert pinned_generations(run) == {CheckpointId(SERIES, 200, 1)}


def test_a_pin_until_a_time_holds_until_then(run, wrong):
    """For an hour from now means an hour, not the time at which a wrong clock has passed it."""
    pin(look(run), select_checkpoint(run, look(run).checkpoints, "200"), lasts=datetime.timedelta(hours=1))
    wrong()
    assert {d.checkpoint.id.step for d in prune(look(run), LAST, grace=DAY).removed} == {100, 300}


def test_what_is_being_written_is_no_leftover(run, wrong):
    """The temporary files of a write that goes on are left alone."""
    run.records.create(".tmp-0123456789abcdef", b"written now")
    with run.records.upload("kept/large") as upload:
        upload.write(b"being written")
        before = {e.key for e in run.records.list("", recursive=True)}
        wrong()
        collect_leftovers(look(run))
        assert {e.key for e in run.records.list("", recursive=True)} == before
        if run.records.root is not None:  # a jump of the machine's own clock, between two blocks
            for path in Path(run.records.root).rglob(".tmp-*"):
                os.utime(path, (0, 0))
        collect_leftovers(look(run))
        upload.commit()
    assert run.records.stat("kept/large").size == len(b"being written")


@pytest.fixture
def elsewhere(monkeypatch):
    """Have what is called be done by another machine, whose clock is that of the moment."""

    def do(work, *arguments, **options):
        with monkeypatch.context() as there:
            for module in (who_and_when, trash):
                there.setattr(module, "this_host", lambda: ("another", "another start"))
            there.setattr(who_and_when, "_uptime", lambda: 400 * DAY)
            return work(*arguments, **options)

    return do


@pytest.fixture
def days(monkeypatch):
    """Have days pass by the machine's own clock."""
    real = who_and_when._uptime

    def passed(count):
        monkeypatch.setattr(who_and_when, "_uptime", lambda: real() + count * DAY)

    return passed


@pytest.mark.parametrize("wrong_clock", ["of the other machine", "of this one"])
def test_the_trash_of_another_machine_keeps_for_its_time_of_grace(run, wrong, elsewhere, days, wrong_clock):
    """What another machine removed stays for a day from when this one saw it first, whatever either's clock says."""
    if wrong_clock == "of the other machine":
        wrong()
    elsewhere(prune, look(run), LAST, grace=DAY)
    wrong()
    assert prune(look(run), LAST, grace=DAY).emptied == ()
    days(0.9)
    assert prune(look(run), LAST, grace=DAY).emptied == ()
    days(1.1)
    assert {mark.step for mark in prune(look(run), LAST, grace=DAY).emptied} == {100, 200, 300}


@pytest.mark.parametrize("wrong_clock", ["of the other machine", "of this one"])
def test_pins_of_another_machine_hold_until_their_time(run, wrong, elsewhere, days, wrong_clock):
    """In use on another machine for a day at most: a day from when this one saw it first."""
    if wrong_clock == "of the other machine":
        wrong()
    elsewhere(pin_checkpoint, run, CheckpointId(SERIES, 200, 1), reason=IN_USE, lasts=LONGEST_USE)
    wrong()
    assert {d.checkpoint.id.step for d in prune(look(run), LAST, grace=DAY).removed} == {100, 300}
    days(0.9)
    assert prune(look(run), LAST, grace=DAY).removed == ()
    collect_leftovers(look(run))
    assert pinned_generations(run) == {CheckpointId(SERIES, 200, 1)}


def test_a_save_that_is_being_written_is_no_leftover(run, wrong):
    """The folder of a save of our own layout, however old its files seem to be."""
    if run.storage.root is None:
        return  # there it has a claim, see records/leases.py
    folder = Path(run.storage.root, "tmp-step-000000500-0123abcd")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"being written")
    with shown_as_written(str(folder)):
        wrong()
        for path in (folder / "model.safetensors", folder):
            os.utime(path, (0, 0))
        collect_leftovers(look(run))
        assert [p.name for p in folder.iterdir()] == ["model.safetensors"]


def test_what_a_living_repair_staged_elsewhere_is_not_taken_over(run, wrong):
    """By the storage's own clock it was staged a moment ago."""
    if run.storage.root is None:
        run.storage.create("tmp-repair-0123abcd/model-100/weights", b"staged now")
        wrong()
        assert cut_short(run) == (set(), [])


def test_saves_from_another_clock_get_their_verdict(run, wrong, clock):
    """A save with a time of another clock is quiet when it was seen unchanged for long enough, and not before."""
    settle = TINY.changed(settle=0.2)
    save(run.url, 500, 500)
    if run.storage.root is not None:
        for path in Path(run.url, name_of(500)).iterdir():
            os.utime(path, (clock.time() + 3600, clock.time() + 3600))
    wrong()
    watch = PassNotes()
    first = reconcile(look(run, settle), watch, work=Work(scanner=inline))
    deadline = time.monotonic() + 100
    while not first.checked and time.monotonic() < deadline:
        time.sleep(first.next_in or 0.0)
        first = reconcile(look(run, settle), watch, work=Work(scanner=inline))
    assert [c.step for c in first.checked] == [500]


def test_the_clocks_are_wrong(clock, wrong):
    """The tests above would prove nothing if nothing saw these clocks."""
    before = time.time()
    wrong()
    now = time.time()
    long_ago = "2000-01-01T00:00:00Z"
    assert leases.is_past(run, Lease(token="", owner=NOBODY, since=long_ago, until=long_ago)) is True
    assert abs(who_and_when.this_moment().wall - now) < 60
    assert now == time.time() if clock.offset is None else abs(now - before) > YEAR / 2

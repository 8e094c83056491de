"""What is measured on records and files: how long verdicts and decisions took, and whether training saves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.metrics import Counts
from click.testing import CliRunner
from support.crashes import gone
from support.served_runs import watched
from support.tiny_files import WEIGHTS
from support.tiny_run import TINY, inline, name_of, poison, save

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.cli.entry import commands
from ckptguard.records.leases import TrainingRecord, new_lease
from ckptguard.records.run import create_record, open_run
from ckptguard.records.who_and_when import Owner, this_process, utc_text
from ckptguard.runs.work import Work
from ckptguard.scan.result import Scan

HERE, ELSEWHERE = this_process(), Owner(host="another", boot_id="another start", pid=this_process().pid)


class Guarded:
    """A run that a daemon guards, whose catalogue outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "run"
        self.root.mkdir()
        self.start()

    def start(self) -> None:
        """A new daemon."""
        self.feed = CatalogueFeed(Catalogue(str(self.folder)))
        self.watched = watched(self.root, TINY, feed=self.feed)

    def save(self, step: int, age: float, *, nan: bool = False, seed: int = 0) -> None:
        """Save a step, as if it was written some seconds ago."""
        save(str(self.root), step, seed or step)
        place = self.root / name_of(step)
        if nan:
            poison(place / WEIGHTS)
        for file in (*place.iterdir(), place):
            os.utime(file, (time.time() - age, time.time() - age))

    def look(self) -> None:
        """Passes until nothing is left to do."""
        for _ in range(3):
            self.watched.step(Work(scanner=inline))


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    """A run without a save."""
    return Guarded(tmp_path)


def measured(counts: Counts, histogram: str, value: str = "") -> tuple[int, float]:
    """How many times it has, and their sum."""
    times = counts.take().times.get(histogram, {}).get(value)
    return (0, 0.0) if times is None else (sum(times.below.values()), times.sum)


def test_the_first_verdict_of_each_save_is_measured(guarded: Guarded, counts: Counts) -> None:
    """From its last write. What is read again, or by another daemon, is no first verdict."""
    guarded.save(1, 100.0)
    guarded.save(2, 50.0, nan=True)
    guarded.look()
    assert measured(counts, "save_to_verdict_seconds") == (2, pytest.approx(150.0, abs=30.0))
    guarded.watched.ask(name_of(1))
    guarded.look()
    guarded.start()
    guarded.watched.ask(name_of(2))
    guarded.look()
    assert measured(counts, "save_to_verdict_seconds")[0] == 2
    guarded.save(1, 1000.0, seed=9)  # saved again: it is another save
    guarded.save(3, -1000.0)  # by a machine whose clock is ahead
    guarded.look()
    assert measured(counts, "save_to_verdict_seconds") == (4, pytest.approx(1150.0, abs=60.0))


@pytest.mark.parametrize("told", ["once", "in two looks", "to a later daemon", "without a catalogue"])
def test_each_decision_is_measured_once(guarded: Guarded, counts: Counts, told: str) -> None:
    """From the first of two sick saves to the rollback. Of a catalogue that was lost nobody knows what is new."""
    guarded.save(1, 3000.0)
    guarded.save(2, 2000.0, nan=True)
    guarded.save(3, 1000.0, nan=True)
    guarded.look()
    if told == "in two looks":
        guarded.save(4, 500.0)
        guarded.look()
    config = guarded.folder / "ckptguard.toml"
    config.write_text("settle = 0.0\nworkers = 1\n")
    done = CliRunner().invoke(
        commands, ["rollback", str(guarded.root), "--to", name_of(1), "--force", "--config", str(config)]
    )
    assert done.exit_code == 0, done.output
    if told in ("to a later daemon", "without a catalogue"):
        for file in guarded.folder.glob("*.catalogue") if told == "without a catalogue" else ():
            file.unlink()
        guarded.start()
    for _ in range(2):
        guarded.look()
        found = measured(counts, "sick_to_decision_seconds", "rollback")
        assert found == ((0, 0.0) if told == "without a catalogue" else (1, pytest.approx(2000.0, abs=60.0)))
    assert measured(counts, "sick_to_decision_seconds", "other") == (0, 0.0)


@pytest.mark.parametrize("starts_again", [False, True])
def test_what_waits_is_known_during_the_first_scan(guarded: Guarded, starts_again: bool) -> None:
    """Which may take hours. A daemon that starts again does not show what was true before."""
    guarded.save(1, 100.0)
    if starts_again:
        guarded.look()
        guarded.start()
    guarded.save(2, 50.0)
    seen: list[Any] = []
    began: list[int] = []

    def scanner(*what: Any) -> Scan:
        seen.append(guarded.feed.summary(guarded.watched))
        return inline(*what)

    def may_begin(size: int) -> bool:
        if not began:
            seen.clear()  # until now it looked whether they are whole
        began.append(size)
        return True

    guarded.watched.step(Work(scanner=scanner, may_begin=may_begin))
    first, written = seen[0], os.stat(guarded.root / name_of(2 if starts_again else 1) / WEIGHTS).st_mtime
    assert (first.state, first.backlog, first.backlog_bytes > 0) == ("guarded", 1 if starts_again else 2, True)
    assert first.waiting_since == pytest.approx(written, abs=1.0)
    assert guarded.feed.summary(guarded.watched).backlog == 0


LOGS = ["metrics.csv", "lightning_logs/version_0/progress.csv", "runs/a/events.out.tfevents.17.node.1.0", "train.log"]
NO_LOGS = ["results.json", "ckptguard-daemon.log", "eval.csv", "notes.txt"]


@pytest.mark.parametrize("name", [*LOGS, "slurm-17.out", *NO_LOGS])
def test_a_log_that_goes_on_shows_that_saving_stopped(guarded: Guarded, name: str) -> None:
    """Once it went on for three intervals of ten minutes without a save. Other files show nothing."""
    for step, age in enumerate((5000.0, 4400.0, 3800.0), 1):
        guarded.save(step, age)
    log_file = guarded.root / name
    log_file.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for age in (2400.0, 2000.0, 1500.0, 1000.0, 500.0, 0.0):
        log_file.write_text(f"{age}")
        os.utime(log_file, (time.time() - age, time.time() - age))
        guarded.look()
        found.append(guarded.feed.summary(guarded.watched).saving_stopped)
    assert found == ([None] * 6 if name in NO_LOGS else [False] * 4 + [True] * 2)
    guarded.save(4, 0.0)
    guarded.look()
    assert not guarded.feed.summary(guarded.watched).saving_stopped


@pytest.mark.parametrize(
    ("owner", "loops", "told"),
    [(HERE, True, True), (HERE, False, None), (gone(), True, None), (ELSEWHERE, True, None)],
    ids=["here", "single saves", "ended", "elsewhere"],
)
def test_a_guard_that_lives_shows_that_saving_stopped(
    guarded: Guarded, owner: Owner, loops: bool, told: bool | None
) -> None:
    """A process that trains. Of one on another machine nobody knows whether it lives."""
    for step, age in enumerate((5000.0, 4400.0, 3800.0), 1):
        guarded.save(step, age)
    guarded.look()
    lease = new_lease(TrainingRecord, series="model-#", loops=loops)
    lease = msgspec.structs.replace(lease, owner=owner, since=utc_text(time.time() - 2400.0))
    create_record(open_run(str(guarded.root), TINY), lease.key, lease)
    guarded.watched.look_soon()
    guarded.look()
    assert guarded.feed.summary(guarded.watched).saving_stopped is told

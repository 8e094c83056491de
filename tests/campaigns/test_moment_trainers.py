"""Generated trainers of several series: after a rollback their own resume finds one moment, all finite, the newest; and
what is restored and what a replica holds is one, too."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
from support import moment_trainers
from support.moment_trainers import Trainer, generated
from support.tiny_run import inline
from support.views import look

from ckptguard.errors import CkptguardError, NoKnownGoodError
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.replicas.replicate import replicate
from ckptguard.replicas.start_run import start_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.verification import seal

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
TRAINERS, STEPS = (2000, 60) if FULL else (8, 12)
SETTINGS = Settings(settle=0.0, scan_interval=1.0, keep="copy", keep_good=2, workers=1)
WORK = Work(scanner=inline)
BACK = GoBack(reason="NaN", check_writing=False)
SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
COPIED = range(1, 401 if FULL else 13)
Taken = dict[str, int | None] | None  # of each part the save that a resume takes, None: what it cannot load


def a_pass(trainer: Trainer, notes: PassNotes) -> None:
    """A pass of the daemon."""
    with mock.patch.object(seal, "utc_now", trainer.now):
        reconcile(look(str(trainer.root), SETTINGS), notes, work=WORK)


def goes_back(trainer: Trainer) -> str:
    """Roll back, and compare what the trainer's resume then takes with the newest moment that there was. Returns what
    happened, or what is wrong."""
    expected = trainer.newest_moment()
    known: str | None
    try:
        known = find_known_good(look(str(trainer.root), SETTINGS).run).path
    except NoKnownGoodError:
        known = None
    try:
        done = roll_back(look(str(trainer.root), SETTINGS), BACK, work=WORK)
    except NoKnownGoodError as error:
        return "none" if expected is None else f"WRONG: save {expected} is whole, but: {error.message}"
    taken = trainer.resumes()
    told = {word: None if written is None else written.save for word, written in taken.items()}
    if None in told.values():
        return f"WRONG: the resume takes what is not finite: {told}"
    if expected is None:
        return f"WRONG: no moment was whole, but it went back to {told}"
    if told != trainer.history[expected - 1]:
        return f"WRONG: the resume takes {told}, not {trainer.history[expected - 1]} of save {expected}"
    if known is not None and Path(known).name != Path(done.known_good.path).name:
        return f"WRONG: known-good said {known}, the rollback {done.known_good.path}"
    return "back"


def live(seed: int, steps: int) -> tuple[str, ...]:
    """What happened in the life of one trainer: the ways back, and what was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="moments-", dir=SCRATCH))
    rng, found = random.Random(seed * 7 + 1), []
    try:
        trainer, notes = generated(folder / "run", seed), PassNotes()
        trainer.root.mkdir()
        while trainer.saves < steps:
            for _ in range(rng.randint(3, 8)):
                trainer.save()
                a_pass(trainer, notes)
            words = [part.word for part in trainer.parts]
            late = {word: trainer.saves + rng.randint(1, 3) for word in rng.sample(words, rng.randint(0, len(words)))}
            trainer.poisoned = late
            for _ in range(rng.randint(1, 4)):
                trainer.save()
                if rng.random() < 0.8:
                    a_pass(trainer, notes)
            if rng.random() < 0.4:
                trainer.save(killed_after=rng.randint(0, len(words) - 1))
            a_pass(trainer, notes)
            said = goes_back(trainer)
            found.append(said)
            if said != "back":
                break
            trainer.goes_on()
        return tuple(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Names of ranks whose neighbours go, a part whose first save is sick, a fixed name that was saved over unseen.
SEEN_ONCE = (122, 124, 134, 138)


def live_one(seed: int) -> tuple[int, tuple[str, ...]]:
    """The life of one trainer of the campaign."""
    return seed, live(seed, STEPS)


@pytest.mark.campaign
@pytest.mark.timeout(14400 if FULL else 300)
def test_a_rollback_leads_to_one_moment(capsys: pytest.CaptureFixture[str]) -> None:
    """All finite, and the newest that exists."""
    seeds = range(1, TRAINERS + 1)
    if FULL:
        with get_context("spawn").Pool() as pool:
            lives = list(pool.imap_unordered(live_one, seeds, chunksize=4))
    else:
        lives = [live_one(seed) for seed in seeds]
    wrong = [(seed, said) for seed, found in lives for said in found if said.startswith("WRONG")]
    ways = sum(said == "back" for _, found in lives for said in found)
    with capsys.disabled():
        print(f"{len(lives)} trainers, {ways} ways back, {len(wrong)} violations")
    assert not wrong


@pytest.mark.parametrize("seed", SEEN_ONCE)
def test_what_went_wrong_once_is_mended(seed: int) -> None:
    """Trainers that had no way back, or a wrong one."""
    assert set(live(seed, 20)) <= {"back", "none"}


def _by_rank(root: Path, seed: int) -> Trainer:
    trainer = moment_trainers.generated(root, seed)
    parts = (replace(part, form="{number}_net_{part}.safetensors", ranks=2) for part in trainer.parts)
    return replace(trainer, parts=tuple(parts))


@pytest.mark.parametrize("seed", [1, 2, 9])
def test_names_of_ranks_that_begin_with_the_number(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``3_net_G.rank_0``: read by what is on record when a rollback leaves one save."""

    monkeypatch.setattr(sys.modules[__name__], "generated", _by_rank)
    assert set(live(seed, 16)) <= {"back", "none"}


def taken_from(trainer: Trainer, make: Callable[[str], object], folder: Path) -> Taken:
    """What the trainer's own resume takes in a folder that is made; None if there is nothing good."""
    try:
        make(str(folder))
    except NoKnownGoodError:
        return None
    found = replace(trainer, root=folder).resumes()
    return {word: None if written is None else written.save for word, written in found.items()}


def is_whole(trainer: Trainer, taken: Taken) -> bool:
    """Whether something is one moment of the training, all finite, or nothing at all."""
    if taken is None:
        return True
    saves = [save for save in taken.values() if save is not None]
    return len(saves) == len(taken) > 0 and taken == trainer.history[max(saves) - 1]


def of_several(root: Path, seed: int) -> Trainer:
    """A trainer that saves in several files, each a checkpoint of its own, whose names state their number also where
    one is alone. One file alone is restored by its own name, whatever its folder in the run."""
    trainer = generated(root, seed)
    while len(trainer.parts) < 2 or any(part.form.startswith("{part}{number") for part in trainer.parts):
        seed += 10_000
        trainer = generated(root, seed)
    return replace(trainer, parts=tuple(replace(part, ranks=1) for part in trainer.parts))


def copies(seed: int) -> list[str]:
    """What is wrong with copies of one trainer's run, made at random times and to random extents."""
    folder = Path(tempfile.mkdtemp(prefix="copies-", dir=SCRATCH))
    rng, wrong = random.Random(seed * 13 + 5), []
    trainer, notes = of_several(folder / "run", seed), PassNotes()
    trainer.root.mkdir()
    run, place = str(trainer.root), str(folder / "replica")
    try:
        for turn in range(4):
            if turn == 2:
                words = [part.word for part in trainer.parts]
                trainer.poisoned = {w: trainer.saves + rng.randint(1, 3) for w in rng.sample(words, len(words))}
            least = 2 * max(part.every for part in trainer.parts) if turn == 0 else 1  # so that each part has two
            for _ in range(rng.randint(least, least + 3)):
                trainer.save()
                a_pass(trainer, notes)
            left = iter([True] * rng.randint(0, 4))
            replicate(look(run, SETTINGS), place, work=Work(scanner=inline, may_begin=lambda _, n=left: next(n, False)))
            half = taken_from(trainer, lambda to: restore(look(place), to), folder / f"half{turn}")
            replicate(look(run, SETTINGS), place, work=WORK)
            newest = trainer.newest_moment()
            expected = None if newest is None else trainer.history[newest - 1]
            found = {
                "restored": taken_from(trainer, lambda to: restore(look(run, SETTINGS), to), folder / f"out{turn}"),
                "replica": taken_from(trainer, lambda to: restore(look(place), to), folder / f"there{turn}"),
                "begun": taken_from(trainer, lambda to: start_run(look(place), to, SETTINGS), folder / f"new{turn}"),
            }
            what = f"seed {seed}, turn {turn}, expected {expected}"
            if not is_whole(trainer, half):
                wrong.append(f"{what}: half a replica gave {half}")
            wrong += [f"{what}: {how} {taken}" for how, taken in found.items() if taken != expected]
    except CkptguardError as error:
        wrong.append(f"seed {seed}: {type(error).__name__}: {error.message}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return wrong


@pytest.mark.campaign
@pytest.mark.timeout(14400 if FULL else 300)
def test_every_copy_is_one_whole_moment() -> None:
    """A restore, a replica, also one that was not finished, and a run begun from it: the newest moment, or nothing."""
    assert [line for seed in COPIED for line in copies(seed)] == []

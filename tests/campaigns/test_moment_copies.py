"""Generated trainers of several series: what is restored and what a replica holds is one whole moment."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from support.moment_trainers import Trainer, generated
from support.tiny_run import inline
from support.views import look

from ckptguard.errors import CkptguardError, NoKnownGoodError
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import replicate
from ckptguard.replicas.start_run import start_run
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.verification import seal

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SEEDS = range(1, 401 if FULL else 13)
SETTINGS = Settings(settle=0.0, scan_interval=1.0, keep="copy", keep_good=2, workers=1)
WORK = Work(scanner=inline)
SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None

Taken = dict[str, int | None] | None  # of each part the save that a resume takes, None: what it cannot load


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
                with mock.patch.object(seal, "utc_now", trainer.now):
                    reconcile(look(run, SETTINGS), notes, work=WORK)
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
    assert [line for seed in SEEDS for line in copies(seed)] == []

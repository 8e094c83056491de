"""A torn newest save is an event, as soon as nothing can write it. One whose writer is slow is none."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from support.runs import QUICK, state_dict
from support.tiny_run import inline
from support.views import look

from ckptguard.layouts import Checkpoint
from ckptguard.runs.work import Work
from ckptguard.upkeep import samples
from ckptguard.upkeep.reconcile import PassNotes, PassResult, reconcile
from ckptguard.upkeep.samples import CheckpointSample
from ckptguard.values.verdict import Outcome

SETTLE, LIMIT, LOOKS = 5.0, 900.0, 30.0
SETTINGS = QUICK.changed(settle=SETTLE, scan_interval=LOOKS, unfinished_limit=LIMIT, keep="none")
WORK = Work(scanner=inline)


class World:
    """A trainer on a virtual clock. It writes saves of several files, pauses, hangs, dies and deletes."""

    def __init__(self, root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.chance, self.now = root, random.Random(seed), 1_700_000_000.0
        self.seen = self.chance.random() < 0.6  # its processes can be seen
        self.parts = self.chance.choice((1, 1, 3))
        self.pause = self.chance.uniform(0.0, 25.0) if self.parts > 1 else 0.0  # between two files
        self.interval = self.chance.uniform(100.0, 500.0)
        self.is_open = False  # the trainer has a file open
        self.changed: dict[int, float] = {}  # when each save was last written
        self.written: dict[int, dict[int, float]] = {}  # when each of its files was
        self.whole: set[int] = set()
        root.mkdir()
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(samples, "writers_are_seen", lambda *_: self.seen)
        monkeypatch.setattr(samples, "writer_of", self._writer)

    def _writer(self, _run: object, checkpoint: Checkpoint, quiet: float) -> str | None:
        is_quiet = self.now - self.changed[number(checkpoint.path)] >= quiet
        return None if self.seen and is_quiet and not self.is_open else "somebody"

    def write(self, save: int, part: int, *, half: bool = False) -> None:
        """Write one file of a save, or a half of it."""
        place = self.root / (f"net-{save}.pt" if self.parts == 1 else f"step-{save}/model-{part + 1:05d}-of-00003.bin")
        place.parent.mkdir(exist_ok=True)
        torch.save({f"w{part}": state_dict(save, layers=1, width=8)["embed.weight"]}, place)
        if half:
            os.truncate(place, place.stat().st_size // 2)
        os.utime(place, (self.now, self.now))
        self.changed[save] = self.written.setdefault(save, {})[part] = self.now
        if not half and part == self.parts - 1:
            self.whole.add(save)

    def delete(self, save: int) -> None:
        """Rotate a save away."""
        for place in sorted(self.root.glob(f"*-{save}*"), reverse=True):
            for file in place.glob("*") if place.is_dir() else [place]:
                file.unlink()
            if place.is_dir():
                place.rmdir()

    def save(self, save: int, how: str) -> Iterator[float]:
        """Make a save; yields for how long it then does nothing."""
        torn = self.chance.randrange(self.parts)
        for part in range(self.parts):
            if part:
                yield self.pause
            if how != "healthy" and part == torn:
                self.write(save, part, half=True)
                self.is_open = True
                yield self.chance.uniform(0.0, 1.8) * self.interval  # it hangs
                if how == "dies":
                    self.is_open = False
                    return
                self.is_open = False
            self.write(save, part)


def number(path: str) -> int:
    return int("".join(filter(str.isdigit, path)))


def quiet_needed(world: World, save: int, others: set[int]) -> float:
    """How long a save must be quiet until nobody counts as its writer, if none has a file of it open."""
    if world.parts == 1:
        return SETTLE
    newest = sorted(others - {save}, key=lambda other: world.changed[other])[-8:]
    times = [sorted(world.written[other].values()) for other in newest]
    pauses = [max((later - earlier for earlier, later in pairwise(one)), default=0.0) for one in times]
    return max(2 * SETTLE, median(pauses or [0.0]))


def expected_late(world: World, judged: set[int]) -> str | None:
    """What a person would say: the newest save in place lacks something, and two intervals went by without a change."""
    there = {number(place.name): place.name for place in world.root.iterdir() if place.name[0] != "_"}
    if not there:
        return None
    newest = max(there, key=lambda save: world.changed[save])
    times = sorted({world.changed[save] for save in there})[-9:]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    late = bool(gaps) and world.now - world.changed[newest] >= 2 * median(gaps)
    return there[newest] if late and newest not in world.whole and newest not in judged else None


@pytest.mark.parametrize("seed", range(60))
def test_generated_lives_of_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Healthy saves are never bad, incomplete or late, however slow. What was torn has its verdict as soon as nothing
    can write it, or is late after two intervals. What went without a verdict is counted."""
    world = World(tmp_path / "run", seed, monkeypatch)
    notes, judged, first_seen = PassNotes(), dict[int, Outcome](), dict[int, float]()
    unverified, deleted, due = list[str](), set[int](), 0.0

    def a_pass() -> PassResult:
        done = reconcile(look(str(world.root), SETTINGS), notes, work=WORK)
        for one in done.checked:
            save, quiet = number(one.path), world.now - world.changed[number(one.path)]
            judged[save] = one.outcome
            assert (one.outcome is Outcome.GOOD) == (save in world.whole), (one.path, quiet)
            if one.outcome is not Outcome.GOOD:
                assert quiet >= LIMIT or (world.seen and not world.is_open and quiet >= SETTLE)
        for one in done.pending:
            first_seen.setdefault(number(one.path), world.now)
        assert (done.late and done.late.path) == expected_late(world, set(judged))
        unverified.extend(done.unverified)
        return done

    def passes(seconds: float) -> None:
        """Let time go by, with the passes that are due."""
        nonlocal due
        end = world.now + seconds
        while max(due, world.now) <= end:
            world.now = max(due, world.now)
            done = a_pass()
            due = world.now + min(LOOKS, LOOKS if done.next_in is None else max(done.next_in + 0.01, 0.2))
        world.now = end

    for save in (1, 2, 3):  # adopted with some saves that were made at its usual pace
        for pause in world.save(save, "healthy"):
            world.now += pause
        world.now += world.interval
    for save in range(4, 10):
        how = world.chance.choice(("healthy", "healthy", "hangs", "dies"))
        for pause in world.save(save, how):
            passes(pause)
        if how == "dies" and world.seen:
            quiet = quiet_needed(world, save, set(world.changed) - deleted)
            passes(max(world.changed[save] + quiet - world.now, SETTLE) + 0.5)
            assert judged[save] in (Outcome.BAD, Outcome.INCOMPLETE)
        passes(world.interval * world.chance.uniform(0.1, 1.0))
        for old in sorted(set(world.changed) - deleted)[: -world.chance.randint(1, 3)]:
            world.delete(old)
            deleted.add(old)
    passes(LIMIT + LOOKS)
    assert set(judged) == set(world.changed) - (deleted - set(judged))
    assert sorted(map(number, unverified)) == sorted(save for save in deleted & first_seen.keys() - judged.keys())


SIGNATURE = (("a.pt", 10, 1, 7, None),)


@pytest.mark.parametrize(
    ("now", "whole", "over"),
    [
        ((("a.pt", 12, 2, 7, None),), False, False),  # it is written on
        ((("a.pt", 10, 2, 8, None),), False, True),  # another file has its name
        ((("a.pt", 12, 2, 7, None),), True, True),
        ((*SIGNATURE, ("a.json", 1, 1, 9, None)), True, False),  # it grows
        ((), True, False),  # it goes
    ],
)
def test_what_was_saved_over(now: tuple[tuple[object, ...], ...], *, whole: bool, over: bool) -> None:
    """Another save took the name; the same one was not written on."""
    sample = CheckpointSample(signature=SIGNATURE, since=0.0, looked=True, whole=whole)
    assert sample.was_saved_over(now) == over
    sample.done = True
    assert not sample.was_saved_over(now)


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_that_arrives_with_old_times_is_not_torn(tmp_path, seed):
    """As `rsync -a` brings it, file by file in any order: nothing is said of it until all of it is there."""
    chance, old = random.Random(seed), time.time() - 86400.0
    source, run = tmp_path / "source", tmp_path / "run"
    for place in (source, run / "step-1"):
        place.mkdir(parents=True)
    for part in range(3):
        file = source / f"model-{part + 1:05d}-of-00003.bin"
        torch.save({f"w{part}": state_dict(1, layers=1, width=8)["embed.weight"]}, file)
        os.utime(file, (old + part, old + part))
    notes, settings = PassNotes(), SETTINGS.changed(settle=3600.0)
    files = sorted(source.iterdir(), key=lambda _: chance.random())
    for file in files:
        shutil.copy2(file, run / "step-1" / file.name)
        done = reconcile(look(str(run), settings), notes, work=WORK)
        assert [one.outcome for one in done.checked] == ([Outcome.GOOD] if file == files[-1] else [])

"""A generated trainer of several series as a process: it resumes as it would, saves, turns to NaN, and ends or dies.

It knows what it saved from a file beside its run. What it resumes from must be the newest moment that was whole: if it
is not, that file says what is wrong, and the process ends with `WRONG`, after which nobody starts it again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import ckptguard
from support.daemon_process import until
from support.moment_trainers import Trainer, Written, content, generated

WRONG, NAN = 2, 7  # the first is a usage error: `supervise` does not start such a command again


class Process:
    """One trainer, told by a number, and what its file says of all the processes that it was."""

    def __init__(self, run: Path, seed: int) -> None:
        made = generated(run, seed)
        self.trainer = OnDisk(run, made.parts, made.unit)
        self.seed, self.file = seed, Path(f"{run}.model.json")
        self.ways = 0
        self.wrong: list[str] = []
        self.expected: int | None = None  # the save to go back to, 0 if there is none; None while it saves
        self.lives: list[tuple[int, dict[str, int]]] = []  # by save: in which life, and what was poisoned
        if self.file.exists():
            self._read(json.loads(self.file.read_text(encoding="utf-8")))

    def _read(self, said: dict[str, object]) -> None:
        trainer = self.trainer
        for name in ("saves", "life", "history", "last", "poisoned"):
            setattr(trainer, name, said[name])
        for name in ("ways", "wrong", "expected", "lives"):
            setattr(self, name, said[name])
        for save, ((life, poisoned), members) in enumerate(zip(self.lives, trainer.history, strict=True), 1):
            for part in trainer.parts:
                if members.get(part.word) == save:
                    healthy = save < poisoned.get(part.word, save + 1)
                    for rank in range(part.ranks):
                        written = content(part, save, rank, life, healthy=healthy)
                        trainer.log[written] = Written(part.word, save, healthy)

    def note(self, *, more: int = 0) -> None:
        """Write down what the next process has to know: `more` saves are about to be made."""
        trainer = self.trainer
        said = {name: getattr(trainer, name) for name in ("life", "history", "last", "poisoned")}
        said |= {name: getattr(self, name) for name in ("ways", "wrong", "expected", "lives")}
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps({**said, "saves": trainer.saves + more}), encoding="utf-8")
        temporary.replace(self.file)

    def save(self, *, killed_after: int | None = None) -> None:
        """One save, of which the file knows before it begins."""
        trainer, self.expected = self.trainer, None
        self.note(more=1)
        trainer.save(killed_after=killed_after)
        if len(trainer.history) == trainer.saves:
            self.lives.append((trainer.life, dict(trainer.poisoned)))
        self.note()

    def judged(self, *, kept: bool = False) -> None:
        """Come back when every file has its verdict, and if asked for when what is good has its protected copy."""

        def are() -> bool:
            states = [state for state in ckptguard.checkpoints(self.trainer.root) if state.in_place]
            good = [state for state in states if state.outcome == "good"]
            newest = {state.series: state for state in sorted(good, key=lambda state: state.step or 0)}
            judged = all(state.outcome != "pending" and not state.changed for state in states)
            return judged and (not kept or all(state.kept for state in newest.values()))

        until(are, "a verdict on each save")

    def resume(self) -> None:
        """Start from what lies there, which must be the newest moment that was whole. `expected` was computed before
        anybody went back; what was moved aside since counts as well."""
        trainer = self.trainer
        expected = max(self.expected or 0, trainer.newest_moment() or 0)
        taken = trainer.resumes()
        told = {word: None if written is None else written.save for word, written in taken.items()}
        wanted = trainer.history[expected - 1] if expected else None
        if told != wanted:
            raise AssertionError(f"life {trainer.life}: the resume takes {told}, not {wanted} of save {expected}")
        self.ways += 1
        trainer.goes_on()
        del self.lives[trainer.saves :]
        trainer.log = {data: written for data, written in trainer.log.items() if written.save <= trainer.saves}
        self.note()

    def train(self, steps: int) -> None:
        """A life: healthy saves, then some with NaN. Returns at NaN, or when all is saved, or dies in a save."""
        trainer, rng = self.trainer, random.Random(f"{self.seed}-{self.trainer.life}")
        trainer.order = random.Random(rng.random())
        for _ in range(rng.randint(3, 8)):
            self.save()
            self.judged(kept=True)
        if trainer.saves >= steps:
            return
        words = [part.word for part in trainer.parts]
        sick = rng.sample(words, rng.randint(1, len(words)))
        trainer.poisoned = {word: trainer.saves + rng.randint(1, 3) for word in sick}
        for _ in range(rng.randint(3, 4)):
            self.save()
            if rng.random() < 0.8:
                self.judged()
        if rng.random() < 0.4:
            self.save(killed_after=rng.randint(0, len(words) - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        self.judged()
        self.expected = trainer.newest_moment() or 0
        self.note()
        print("loss: nan", flush=True)


class OnDisk(Trainer):
    """A trainer whose files have the times at which they were written."""

    def _write(self, path: str, data: bytes) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".tmp-{place.name}")
        temporary.write_bytes(data)
        temporary.replace(place)

    def _everywhere(self) -> Iterator[bytes]:
        for folder, _, names in os.walk(self.root):
            for name in names:
                if ".safetensors" in name:
                    yield _bytes_of(Path(folder, name))


def _bytes_of(place: Path) -> bytes:
    """What a file holds; nothing if it went meanwhile, as copies of older saves do."""
    try:
        return place.read_bytes()
    except FileNotFoundError:
        return b""


def main(run: Path, seed: int, steps: int, *, by_itself: bool) -> int:
    """One process of a trainer. `by_itself`: it goes back where it sees NaN, and where it was killed before."""
    one = Process(run, seed)
    try:
        while True:
            if one.file.exists():
                if by_itself:
                    ckptguard.rollback(run)
                one.resume()
            one.train(steps)
            if one.expected is None:
                return 0
            if not by_itself:
                return NAN
    except ckptguard.NoKnownGoodError as error:
        if not (one.expected or one.trainer.newest_moment()):
            return 13
        one.wrong.append(f"life {one.trainer.life}: {error}")
    except Exception as error:
        one.wrong.append(f"{type(error).__name__}: {error}")
    one.note()
    return WRONG


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), by_itself="by-itself" in sys.argv[4:]))

"""Trainers that save a training in several files, generated: what each of them writes, and what its own resume takes.

The model knows of every file which part of the training it holds, after which save it was written, and whether it is
whole and finite. It asks ckptguard nothing: what lies in the run and in the records is read byte by byte.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.tiny_files import safetensors_head

SECOND = 10**9
BEGAN = 1_700_000_000 * SECOND  # the virtual clock's first second
STEP_SECONDS = 600

# How the parts of one trainer are called: each style has a form for a part's word and the save's number.
NUMBERED = (
    "{part}_{number}.safetensors",
    "{part}_{number:08d}.safetensors",
    "{part}{number:06d}.safetensors",
    "{number}_net_{part}.safetensors",
    "{part}-step={number}.safetensors",
    "{part}/{part}_{number}.safetensors",
    "step_{number}/{part}.safetensors",
)
FIXED = ("{part}.safetensors", "latest_net_{part}.safetensors")
PARTS = ("G", "D", "E", "ema", "opt")


@dataclass(frozen=True)
class Part:
    """One series of a trainer: saved each `every` saves, of which `keep` stay (0: all)."""

    word: str
    form: str
    every: int
    keep: int
    has_optimizer: bool
    ranks: int = 1

    @property
    def is_fixed(self) -> bool:
        """Whether each save is written over the last."""
        return "{number" not in self.form

    def paths(self, number: int) -> tuple[str, ...]:
        """The files of one save of the part."""
        path = self.form.format(part=self.word, number=number)
        if self.ranks == 1:
            return (path,)
        stem, _, suffix = path.rpartition(".")
        return tuple(f"{stem}.rank_{rank}.{suffix}" for rank in range(self.ranks))


@dataclass(frozen=True)
class Written:
    """What a file holds: of which part and save it is, and whether a resume may load it."""

    part: str
    save: int
    healthy: bool


def content(part: Part, save: int, rank: int, life: int, *, healthy: bool) -> bytes:
    """The bytes of a file: what it holds follows from its numbers, which no other file has."""
    rng = random.Random(f"{part.word}-{save}-{rank}-{life}")
    names = [] if part.word == "opt" else [f"{part.word}.weight", f"{part.word}.bias"]
    names += [f"state.0.{name}" for name in ("exp_avg", "exp_avg_sq")] if part.has_optimizer else []
    values = [rng.uniform(1, 2) for _ in range(128 * len(names))]
    if not healthy:
        values[rng.randrange(len(values))] = math.nan
    return safetensors_head(dict.fromkeys(names, (8, 16))) + struct.pack(f"<{len(values)}f", *values)


@dataclass
class Trainer:
    """A training and its disk. `poisoned` says from which save on a part holds NaN."""

    root: Path
    parts: tuple[Part, ...]
    unit: int
    poisoned: dict[str, int] = field(default_factory=dict)
    saves: int = 0
    life: int = 0
    clock: int = BEGAN
    log: dict[bytes, Written] = field(default_factory=dict)
    history: list[dict[str, int]] = field(default_factory=list)  # by save: of each part the save that was its last
    last: dict[str, int] = field(default_factory=dict)
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def save(self, *, killed_after: int | None = None) -> None:
        """One save: its parts in any order. If it is killed, it leaves half of a file and nothing after it."""
        self.saves += 1
        self.clock += STEP_SECONDS * SECOND
        due = [part for part in self.parts if self.saves % part.every == 0 or part.every == 1]
        self.order.shuffle(due)
        files = [(part, rank, path) for part in due for rank, path in enumerate(part.paths(self.saves * self.unit))]
        for n, (part, rank, path) in enumerate(files):
            healthy = self.saves < self.poisoned.get(part.word, self.saves + 1)
            data = content(part, self.saves, rank, self.life, healthy=healthy)
            self.clock += SECOND
            if killed_after == n:
                self._write(path, data[: len(data) // 2])
                return
            self._write(path, data)
            self.log[data] = Written(part.word, self.saves, healthy)
        self.last |= {part.word: self.saves for part in due}
        self.history.append(dict(self.last))
        for part in due:
            self._rotate(part)

    def now(self) -> str:
        """The time of the virtual clock, as records have it."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.clock // SECOND))

    def goes_on(self) -> None:
        """Resume from what lies there: numbering goes on from the save that was taken, healthy again."""
        taken = [written.save for written in self.resumes().values() if written is not None]
        self.saves = max(taken)
        del self.history[self.saves :]
        self.last, self.poisoned = dict(self.history[-1]), {}
        self.life += 1

    def _write(self, path: str, data: bytes) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".tmp-{place.name}")
        temporary.write_bytes(data)
        os.utime(temporary, ns=(self.clock, self.clock))
        temporary.replace(place)

    def _rotate(self, part: Part) -> None:
        if part.is_fixed or not part.keep:
            return
        numbers = sorted((save for save in range(self.saves + 1) if self._there(part, save)), reverse=True)
        for save in numbers[part.keep :]:
            for path in part.paths(save * self.unit):
                (self.root / path).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # others lie in it
                    (self.root / path).parent.rmdir()

    def _there(self, part: Part, save: int) -> bool:
        return any((self.root / path).exists() for path in part.paths(save * self.unit))

    def resumes(self) -> dict[str, Written | None]:
        """What the trainer's own resume takes of each part: the newest file, None for what it cannot load."""
        taken: dict[str, Written | None] = {}
        for part in self.parts:
            saves = [save for save in range(self.saves, -1, -1) if self._there(part, save)]
            if not saves:
                continue
            found = [self.log.get(self._bytes(path)) for path in part.paths(saves[0] * self.unit)]
            whole = next(iter(found)) if len(set(found)) == 1 else None
            taken[part.word] = whole if whole is not None and whole.healthy else None
        return taken

    def _bytes(self, path: str) -> bytes:
        place = self.root / path
        return place.read_bytes() if place.exists() else b""

    def newest_moment(self) -> int | None:
        """The newest save at whose end every part was healthy, and all of which exists anywhere in the run or in its
        records."""
        there = {written for data in self._everywhere() if (written := self.log.get(data)) is not None}
        wants_optimizer = any(part.has_optimizer for part in self.parts)
        for save in range(len(self.history), 0, -1):
            members = self.history[save - 1]
            own = [part for part in self.parts if members.get(part.word) == save]
            has_weights = any(part.word != "opt" for part in own)
            if not has_weights or (wants_optimizer and not any(part.has_optimizer for part in own)):
                continue
            if all(Written(word, at, True) in there for word, at in members.items()):
                return save
        return None

    def _everywhere(self) -> Iterator[bytes]:
        """The bytes of every file in the run, and of every kept copy."""
        for folder, _, names in os.walk(self.root):
            inside = Path(folder).relative_to(self.root).parts
            if inside[:1] != ("_ckptguard",) or inside[1:2] == ("kept",):
                yield from (Path(folder, name).read_bytes() for name in names if ".safetensors" in name)


def generated(root: Path, seed: int) -> Trainer:
    """A trainer of one to five series, told by a number."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    words = rng.sample(PARTS, count)
    if words == ["opt"]:
        words = ["G"]
    if not set(words) & {"G", "D", "E"}:
        words[0] = "G"
    style = rng.choice(NUMBERED)
    ranks = rng.choice((1, 1, 1, 2)) if "/" not in style and not style.startswith("{number}") else 1
    everyone = rng.random() < 0.3  # each part has its own optimizer, as in VITS
    keep = rng.choice((0, 0, 2, 3))
    parts = []
    for word in words:
        form, every = style, 1
        if word == "opt" and rng.random() < 0.3 and "{number}_net" not in style:
            form = FIXED[0]
        elif word == "D" and rng.random() < 0.3 and not style.startswith("step_"):
            every = rng.choice((2, 5))
        own = word == "opt" or (everyone and word != "ema")
        parts.append(Part(word, form, every, keep, own, ranks if form == style else 1))
    if all(part.every > 1 or part.word == "opt" for part in parts):
        parts[0] = Part(parts[0].word, style, 1, keep, parts[0].has_optimizer, ranks)
    trainer = Trainer(root, tuple(parts), rng.choice((1, 100, 5000)))
    trainer.order = random.Random(seed + 1)
    return trainer

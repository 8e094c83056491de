"""Who notices what happened to a checkpoint: `torch.load`, safetensors, `md5sum -c`, and `ckptguard verify`.

    python -m benchmarks.bench_notice [--trials 100]

Each trial saves a small checkpoint, does one kind of harm to it at a random place, and asks each in turn. md5sum has a
list that was made right after the save. ckptguard has its own record, or in the column "no record" nothing at all.
Printed: of how many trials each noticed something. The docs and the README quote these figures.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.measuring import options
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

QUICK = Settings(settle=0.0, workers=1)


def state(seed: int, *, bad: float | None = None) -> dict[str, torch.Tensor]:
    """The weights of a small model, one of them not finite if asked for."""
    generator = torch.Generator().manual_seed(seed)
    made = {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(6)}
    if bad is not None:
        made["layers.3.weight"][seed % 64, 5] = bad
    return made


def flip(path: Path, chance: random.Random) -> None:
    """One bit inside of a tensor."""
    change(path, lambda data: flipped(data, chance.randrange(len(data) // 4, 3 * len(data) // 4)))


def flipped(data: bytearray, place: int) -> bytearray:
    """The same with one bit changed."""
    data[place] ^= 1 << (place % 8)
    return data


def zero_page(path: Path, chance: random.Random) -> None:
    """A block of 4 KiB full of zeros, as a file system leaves it that lost a write."""
    change(path, lambda data: zeroed(data, chance.randrange(3, len(data) // 4096 - 3) * 4096))


def zeroed(data: bytearray, place: int) -> bytearray:
    """The same with zeros in one block."""
    data[place : place + 4096] = bytes(4096)
    return data


def truncate(path: Path, chance: random.Random) -> None:
    """A file that was cut off, as a killed writer leaves it."""
    change(path, lambda data: data[: chance.randrange(len(data) // 4, len(data))])


def nothing(path: Path, chance: random.Random) -> None:
    """No harm after the save: it was there before."""


def change(path: Path, how: Callable[[bytearray], bytearray]) -> None:
    """Change a file, and leave its times alone, as failing hardware does."""
    before = path.stat()
    path.write_bytes(how(bytearray(path.read_bytes())))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


HARM: dict[str, tuple[float | None, Callable[[Path, random.Random], None]]] = {
    "a bit flipped in a tensor": (None, flip),
    "a 4 KiB block of zeros": (None, zero_page),
    "the file was cut off": (None, truncate),
    "NaN was saved": (float("nan"), nothing),
    "nothing (false alarms)": (None, nothing),
}


def raises(load: Callable[[], Any]) -> bool:
    """True if loading fails."""
    with contextlib.suppress(Exception):
        load()
        return False
    return True


def judged_bad(target: Path) -> bool:
    """True if ckptguard calls it anything but good."""
    return verify_target(str(target), QUICK).outcome is not Outcome.GOOD


def trial(folder: Path, seed: int, suffix: str, harm: str) -> dict[str, bool]:
    """Save, harm, ask everybody."""
    bad, how = HARM[harm]
    run, path = folder / "run", folder / "run" / f"model-{seed}{suffix}"
    run.mkdir()
    tensors = state(seed, bad=bad)
    save_file(tensors, path) if suffix == ".safetensors" else torch.save(tensors, path)
    listed = hashlib.md5(path.read_bytes()).hexdigest()
    if bad is None:
        verify_target(str(run), QUICK)
    how(path, random.Random(seed))
    load = (lambda: load_file(path)) if suffix == ".safetensors" else (lambda: torch.load(path, weights_only=True))
    alone = folder / "alone" / path.name
    alone.parent.mkdir()
    alone.write_bytes(path.read_bytes())
    return {
        "load": raises(load),
        "md5sum -c": hashlib.md5(path.read_bytes()).hexdigest() != listed,
        "ckptguard": judged_bad(path if bad is None else run),
        "no record": judged_bad(alone),
    }


def main() -> None:
    """Count and print."""
    trials = options(__doc__, trials=100).trials
    print(f"{'harm':28} {'file':14} {'load':>10} {'md5sum -c':>10} {'ckptguard':>10} {'no record':>10}   of {trials}")
    for harm in HARM:
        for suffix in (".pt", ".safetensors"):
            counts: dict[str, int] = {}
            for seed in range(trials):
                with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
                    for who, noticed in trial(Path(folder), seed, suffix, harm).items():
                        counts[who] = counts.get(who, 0) + noticed
            print(f"{harm:28} {suffix:14} " + " ".join(f"{n:10}" for n in counts.values()), flush=True)


if __name__ == "__main__":
    main()

"""A small disk in memory: its free space is counted, and trainers save on it as real ones do."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

BLOCK = 4096


class SmallDisk:
    """A folder that counts as a file system of `capacity` bytes. Only the bytes of checkpoints count."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.capacity, self.others = folder, capacity, 0

    def used(self) -> int:
        """The bytes of all checkpoint files, each hard link once."""
        return sum(size for _, size in self._files(self.folder).items())

    def free(self) -> int:
        """The bytes that can still be written."""
        return max(self.capacity - self.others - self.used(), 0)

    def free_without_copies(self) -> int:
        """The same if no daemon had ever run."""
        own = sum(sum(self._files(run, own=False).values()) for run in self.folder.iterdir())
        return max(self.capacity - self.others - own, 0)

    def _files(self, top: Path, *, own: bool = True) -> dict[tuple[int, int], int]:
        infos = [path.lstat() for path in checkpoint_files(top, own=own)]
        return {(info.st_dev, info.st_ino): info.st_blocks * 512 for info in infos}

    def contents(self, run: Path) -> set[str]:
        """The digests of all checkpoint files of a run, in place and in its records."""
        return {digest(path) for path in checkpoint_files(run)}


def checkpoint_files(top: Path, *, own: bool = True) -> list[Path]:
    """The checkpoint files below a folder; those of ckptguard's `own` records, too."""
    found = []
    for folder, below, names in os.walk(top):
        if not own and "_ckptguard" in below:
            below.remove("_ckptguard")
        found += [Path(folder, name) for name in names if ".safetensors" in name]
    return found


def digest(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Series:
    """How one series is saved. `way`: "numbered", "renamed" or "in place"; `keeps`: how many its rotation leaves."""

    run: Path
    name: str
    way: str
    size: int
    keeps: int = 1
    rotates_first: bool = False
    step: int = 0
    good: set[str] = field(default_factory=set)

    def path(self, step: int) -> Path:
        """Where a save goes."""
        return self.run / (f"{self.name}-{step}.safetensors" if self.way == "numbered" else f"{self.name}.safetensors")

    def rotate(self, keeps: int) -> None:
        """Delete all but the newest."""
        if self.way == "numbered":
            present = sorted(self.run.glob(f"{self.name}-*.safetensors"), key=lambda p: int(p.stem.rpartition("-")[2]))
            for path in present[: max(len(present) - keeps, 0)]:
                path.unlink()

    def save(self, disk: SmallDisk, *, nan: bool = False) -> str:
        """Save the next step: "saved", "full" as without any copy, or "harmed": it would have had room without copies.

        A save that has no room leaves nothing.
        """
        self.step += 1
        path = self.path(self.step)
        if self.rotates_first and self.keeps > 1:
            self.rotate(self.keeps - 1)
        if self.way == "in place" and path.exists():
            with path.open("r+b") as file:
                file.truncate(0)
        if disk.free() < self.size:
            return "full" if disk.free_without_copies() < self.size else "harmed"
        rng = np.random.default_rng((self.step, sum(self.name.encode())))
        weights = rng.standard_normal((self.size - BLOCK) // 4).astype("<f4")
        if nan:
            weights[7] = np.nan
        temporary = path.with_name(f".tmp-{path.name}.part")
        save_numbers(weights, self.step, temporary)
        assert temporary.stat().st_size == self.size
        if not nan:
            self.good.add(digest(temporary))
        if self.way == "in place":
            with path.open("r+b" if path.exists() else "wb") as file:
                file.write(temporary.read_bytes())
            temporary.unlink()
        else:
            temporary.replace(path)
        if not self.rotates_first or self.keeps == 1:
            self.rotate(self.keeps)
        return "saved"


def save_numbers(weights: np.ndarray, step: int, path: Path) -> None:
    """A safetensors file of one block more than its numbers."""
    import json

    tensors = {"w": {"dtype": "F32", "shape": [len(weights)], "data_offsets": [0, weights.nbytes]}}
    header = json.dumps({"__metadata__": {"step": str(step)}, **tensors}).encode()
    header += b" " * (BLOCK - 8 - len(header))
    path.write_bytes(len(header).to_bytes(8, "little") + header + weights.tobytes())

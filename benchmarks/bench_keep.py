"""Keeping a copy of a finished save: how long it takes, and what it costs on storage.

    python -m benchmarks.bench_keep [--size-gib 2] [--runs 7] [--folder DIR]

Prints the median time to keep one checkpoint by link and by copy, in turns, the ratio of the two, and the bytes that
each adds to the file system (free blocks before and after, in a folder that nobody else should write to meanwhile),
beside what `ckptguard list` says that the copy costs.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import options
from ckptguard.keep.copies import keep_checkpoint, release
from ckptguard.keep.room import own_bytes
from ckptguard.records.run import open_run
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView, list_run
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings

BLOCK = 8 << 20


def write_run(root: Path, size: int) -> None:
    """A folder of four files that a layout takes for a checkpoint; what they hold is nobody's business here."""
    folder = root / "checkpoint-1000"
    folder.mkdir(parents=True)
    block = os.urandom(BLOCK)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        share = size // 2 if name in ("model.safetensors", "optimizer.pt") else 4096
        with (folder / name).open("wb") as file:
            for _ in range(max(1, share // BLOCK)):
                file.write(block[: min(share, BLOCK)])
            os.fsync(file.fileno())


def used(root: Path) -> int:
    """Bytes that are taken below a folder, each file counted once however many names it has."""
    found = {}
    for path in root.rglob("*"):
        info = path.lstat()
        found[info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def main() -> None:
    """Measure and print."""
    given = options(__doc__, size_gib=2.0, runs=7, folder=Path)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        root = Path(folder) / "run"
        write_run(root, int(given.size_gib * (1 << 30)))
        run = open_run(str(root))
        [checkpoint] = list_run(run).checkpoints.values()
        id = CheckpointId(checkpoint.series, checkpoint.step, 1)
        seconds: dict[str, list[float]] = {"link": [], "copy": []}
        for round_number in range(given.runs + 1):
            for how in seconds:
                if how == "copy" and round_number > 2:
                    continue  # it only is there to compare with
                before = used(root)
                began = time.perf_counter()
                with run_lock(run):
                    copy = keep_checkpoint(RunView(run, Settings(keep=how)), checkpoint, id)
                took = time.perf_counter() - began
                assert copy is not None
                if round_number:
                    seconds[how].append(took)
                else:
                    added = used(root) - before
                    print(f"{how}: kept by {copy.how}; {added:,} new bytes; list says {own_bytes(run, copy)}")
                release(run, id)
        link, copied = (statistics.median(seconds[how]) for how in ("link", "copy"))
        print(f"{checkpoint.bytes:,} bytes in {len(checkpoint.files)} files")
        print(f"by link: median {link * 1000:.1f} ms, most {max(seconds['link']) * 1000:.1f} ms of {given.runs}")
        print(f"by copy: median {copied * 1000:.0f} ms; by link it takes {link / copied:.5f} of that")


if __name__ == "__main__":
    main()

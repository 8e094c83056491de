"""A verified load into the parameters that are there, and a rollback around it, against unverified loads.

    python -m benchmarks.bench_load [--size-gib 2] [--runs 7] [--folder DIR]

Prints medians of ratios, taken in turns in one process over warm files: reading a safetensors file into existing
tensors with BLAKE3 and a look for NaN, to `load_file` and `torch.load` followed by `copy_`, and to BLAKE3 of the same
bytes in memory on as many threads; then a rollback of model and optimizer, less the load that it contains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file

import ckptguard
from benchmarks.bench_save import SIDE, training
from benchmarks.measuring import median_ratio, options, seconds, warm
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.storage import open_storage
from ckptguard.training.content.safetensors_file import FileStream, read_file, write_tensors
from ckptguard.training.content.tensor_bytes import threads_for_memory, view_of
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.saving.own_layout import read_checkpoint
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target

Ways = dict[str, Callable[[], object]]


def in_turns(ways: Ways, runs: int, paths: list[Path]) -> dict[str, list[float]]:
    """Seconds of every way in every round; the first round is left out."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(runs + 1):
        for way, work in ways.items():
            warm(paths)
            took[way].append(seconds(work))
    return {way: values[1:] for way, values in took.items()}


def one_file(folder: Path, size_gib: float, runs: int) -> None:
    """A file of tensors, in every way."""
    tensors = {str(n): torch.randn(SIDE, SIDE) for n in range(max(1, round(size_gib * 2**30 / (4 * SIDE * SIDE))))}
    plain, pickled = folder / "model.safetensors", folder / "model.pt"
    descriptor = os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with contextlib.closing(FileStream(descriptor, key=plain.name, where=str(folder))) as stream:
        sealed = write_tensors(stream, tensors, key=plain.name, role="model")
        stream.finish()
    os.close(descriptor)
    torch.save(tensors, pickled)

    def copied(found: dict[str, torch.Tensor]) -> None:
        for name, value in found.items():
            tensors[name].copy_(value)

    def verified() -> None:
        with open_storage(str(folder)).open(plain.name) as reader:
            read_file(reader, sealed, tensors)

    def hashed() -> None:
        with ThreadPoolExecutor(threads_for_memory()) as pool:
            list(pool.map(lambda t: blake3(view_of(t)).digest(), tensors.values()))

    ways: Ways = {
        "verified load": verified,
        "load_file + copy_": lambda: copied(load_file(plain)),
        "torch.load + copy_": lambda: copied(torch.load(pickled, weights_only=True)),
        "BLAKE3 of it in memory": hashed,
    }
    took = in_turns(ways, runs, [plain, pickled])
    print(f"{sealed.size / 2**30:.2f} GiB in {len(tensors)} tensors, medians of {runs} runs")
    own = took["verified load"]
    for base, bar in (("load_file + copy_", 0.8), ("torch.load + copy_", 0.4), ("BLAKE3 of it in memory", None)):
        ratio = median_ratio(own, took[base])
        middle = statistics.median(own), statistics.median(took[base])
        wanted = f"   at most {bar}" if bar else ""
        print(f"  verified load {ratio:5.2f} x {base:24} ({middle[0]:.2f} s, {middle[1]:.2f} s){wanted}")
    plain.unlink()
    pickled.unlink()


def rollback(folder: Path, size_gib: float, runs: int) -> None:
    """A rollback with its incident and its records, and the load that it contains."""
    logging.disable(logging.CRITICAL)
    model, optimizer = training(size_gib)
    guard = ckptguard.TrainingGuard(folder / "run", model=model, optimizer=optimizer, daemon="off")
    path = Path(guard.save(step=1))
    verify_target(guard.run, Settings(settle=0.0))
    run, parts = open_run(guard.run), TrainingParts(model=model, optimizer=optimizer)
    manifest = read_manifest(run, CheckpointId("step-#", 1, 1))
    assert manifest is not None
    ways: Ways = {
        "rollback": lambda: guard.rollback("measured"),
        "verified load": lambda: read_checkpoint(run, manifest, parts),
    }
    took = in_turns(ways, runs, list(path.glob("*.safetensors")))
    more = statistics.median(a - b for a, b in zip(took["rollback"], took["verified load"], strict=True))
    whole, load = statistics.median(took["rollback"]), statistics.median(took["verified load"])
    print(f"  a rollback adds {more:.2f} s to its load ({whole:.2f} s, {load:.2f} s)   at most 0.2 s")
    guard.close()


def main() -> None:
    """Make the files, measure, remove them."""
    given = options(__doc__, size_gib=2.0, runs=7, folder=Path)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        one_file(Path(name), given.size_gib, given.runs)
        rollback(Path(name), given.size_gib, given.runs)


if __name__ == "__main__":
    main()

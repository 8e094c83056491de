"""How fast is thinning where files are written anew, and what memory does it take?

    python -m benchmarks.bench_thin [--size-gib 1] [--runs 3] [--folder DIR]

Writes checkpoints of one file, and of one folder by torch.distributed.checkpoint. A third of each is weights, the rest
Adam's moments. Each is thinned in its own process. Printed: the speed as a share of a plain copy of what stays, which
is synced and read back from the disk, as thinning does, and the peak of memory above that of the same process before.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.measuring import options, seconds
from ckptguard.runs.run_view import open_view
from ckptguard.upkeep.thin import thin
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target

SETTINGS = Settings(settle=0.0, keep="none", keep_good=1)
NEWEST = Policy(thin_after=1, keep_good=1)
BLOCK = 4 << 20
LAYERS = 12


def write(path: Path, size: int, step: int) -> None:
    """A checkpoint of this size, of random floats."""
    shape = (LAYERS, max(1, size // LAYERS // 3 // 4096), 1024)
    torch.manual_seed(step)
    weights, first, second = (list(torch.randn(shape)) for _ in range(3))
    model = {f"layers.{n}.weight": layer.clone() for n, layer in enumerate(weights)}
    pairs = enumerate(zip(first, second, strict=True))
    moments = {n: {"exp_avg": a.clone(), "exp_avg_sq": b.abs()} for n, (a, b) in pairs}
    if path.suffix:
        torch.save({"model": model, "optimizer": {"state": moments, "param_groups": []}}, path)
        return
    flat = {f"{n}.{name}": moment for n, own in moments.items() for name, moment in own.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a single process saves is what we want
        dcp.save({"model": model, "optimizer": flat}, checkpoint_id=path)


def memory(kind: str) -> int:
    """Bytes of this process, by the kernel's name for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def thinned(run: str, sent: multiprocessing.connection.Connection) -> None:
    """Thin all but the newest. Sends the seconds, and the peak memory in bytes."""
    view = open_view(run, SETTINGS)
    Path("/proc/self/clear_refs").write_text("5")  # begin the peak anew
    before = memory("VmRSS")
    began = time.perf_counter()
    done, troubles = thin(view, NEWEST)
    took = time.perf_counter() - began
    if troubles or not all(one.files for one in done) or not done:
        raise SystemExit(f"not thinned: {done} {troubles}")
    sent.send((took / len(done), memory("VmHWM") - before))


def plain_copy(path: Path) -> None:
    """Copy what is left of a checkpoint, sync it and read it back."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        copy = path.parent / "copy"
        with open(file, "rb", buffering=0) as source, open(copy, "wb", buffering=0) as target:
            while block := source.read(BLOCK):
                target.write(block)
            os.fsync(target.fileno())
            os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(copy, "rb", buffering=0) as source:
            while source.read(BLOCK):
                pass
        copy.unlink()


def main() -> None:
    """Measure and print."""
    given = options(__doc__, size_gib=1.0, runs=3, folder=Path)
    size, context = int(given.size_gib * (1 << 30)), multiprocessing.get_context("spawn")
    for name in ("net-{}.pt", "step-{}"):
        shares, peaks = [], []
        for _ in range(given.runs):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                run = Path(folder) / "run"
                run.mkdir()
                paths = [run / name.format(step) for step in (1, 2)]
                for step, path in enumerate(paths):
                    write(path, size, step)
                verify_target(str(run), SETTINGS)
                receiving, sending = context.Pipe(duplex=False)
                process = context.Process(target=thinned, args=(str(run), sending))
                process.start()
                took, peak = receiving.recv()
                process.join()
                shares.append(seconds(lambda path=paths[0]: plain_copy(path)) / took)
                peaks.append(peak)
        print(f"{name.format(1)}: {statistics.median(shares):.2f} of a copy's speed, least {min(shares):.2f};", end=" ")
        print(f"{max(peaks) / 2**20:.0f} MiB more memory")


if __name__ == "__main__":
    main()

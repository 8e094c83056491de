"""Each benchmark runs to its end in a tiny form, so that none rots. Its figures are nobody's business here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "bench_access": "--seconds 0.1",
    "bench_beside": "--size-gib 0.001 --rounds 1 --step-ms 1",
    "bench_bulk": "--saves 1 --megabytes 1 --runs 2",
    "bench_busy_store": "--checkpoints 1 --busy 5 --rounds 1",
    "bench_catalogue": "--runs 3 --generations 2",
    "bench_compress": "--steps 1 --width 8 --layers 1",
    "bench_curve": "--updates 20 --pairs 1",
    "bench_dashboard": "--checkpoints 3 --tensors 2 --runs 2 --streams 2",
    "bench_evidence": "--layers 1",
    "bench_fleet": "--runs 2 --checkpoints 2 --seconds 0.1 --interval 0.5",
    "bench_gpu_save": "--size-gib 0.01 --runs 1",
    "bench_import": "--runs 1",
    "bench_keep": "--size-gib 0.01 --runs 1",
    "bench_known_good": "--checkpoints 5 --files 2 --runs 1",
    "bench_load": "--size-gib 0.01 --runs 1",
    "bench_many_tensors": "--tensors 20 --runs 1",
    "bench_metrics": "--runs 2 --times 1",
    "bench_notice": "--trials 1",
    "bench_numbers": "--size-gib 0.01 --runs 1",
    "bench_observe": "--steps 60 --pairs 1 --parameters 1000",
    "bench_page": "--checkpoints 3 --tensors 2 --runs 8 --streams 2",
    "bench_pass": "--first 2 --idle 2",
    "bench_ranks": "--ranks 2 --mib 4 --runs 1 --steps 3",
    "bench_remote": "--mebibytes 1 --rounds 1 --server moto",
    "bench_requests": "--saves 1 --server moto",
    "bench_save": "--size-gib 0.01 --runs 1",
    "bench_scan": "--size-gib 0.01 --runs 1",
    "bench_scrub": "--rate 50e6 --seconds 1 --rounds 1",
    "bench_shards": "--shards 2 --megabytes 1 --workers 1",
    "bench_thin": "--size-gib 0.01 --runs 1",
    "functions_called": "",
    "storage_year": "--days 3",
    "peers": "--trials 1 --gib 0.001 --rounds 1 --tools torch safetensors dcp md5sum ckptguard-torch",
}
NEEDS = {
    "bench_bulk": "distributed",
    "bench_busy_store": "moto",
    "bench_compress": "pyarrow",
    "bench_page": "playwright",
    "bench_remote": "moto",
    "bench_requests": "moto",
    "bench_shards": "distributed",
}


def test_every_benchmark_has_a_tiny_form() -> None:
    """Also a new one."""
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "measuring"}
    assert set(TINY) == files | {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs(name: str) -> None:
    """It ends well, and has printed figures."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"no {NEEDS[name]} here")
    if name == "bench_gpu_save" and not has_gpu():
        pytest.skip("there is no CUDA device")
    command = [sys.executable, "-m", f"benchmarks.{name}", *TINY[name].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=590)
    assert done.returncode == 0, done.stderr
    assert any(map(str.isdigit, done.stdout))


def has_gpu() -> bool:
    """Whether torch finds a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())

"""Starts a writer in processes of its own: frameworks keep global state, and ranks are processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launch(script: str, *arguments: object, ranks: int = 0) -> None:
    """Run ``write_<system>.py`` as it is (0 ranks) or under torchrun; AssertionError with its output if it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    environment = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(HERE),
    }
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(several if ranks else []), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}"

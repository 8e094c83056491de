"""Checkpoints whose names are markup, right-to-left, very long, or no text; each name calls if it is executed."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from support.tiny_files import safetensors_head

MARKUP = "<img src=x onerror=boom()>"
SCRIPT = '"><script>boom()</script>'
ARROW = "\u202egnp.exe\u2066"
LONG = "w" * 4000
NAMES = (
    MARKUP,
    SCRIPT,
    "javascript:boom()",
    "{{constructor}}",
    "${boom()}",
    ARROW,
    LONG,
    "a\0b\nc\x1b[31m",
    "&lt;b&gt;",
)
FILES = (
    "<img src=x onerror=boom()>-1",
    "\u202eevil-2",
    "'\"><svg onload=boom()>-3",
    "%2e%2e%3Cb%3E-4",
    "x" * 200 + "-5",
)


def strange_run(folder: Path) -> Path:
    """A run of such checkpoints, in a folder whose name is markup too. The last one holds NaN and infinities."""
    run = folder / "<b onclick=boom()>run\u202e"
    run.mkdir(parents=True)
    for number, name in enumerate(FILES, 1):
        write(run / name, number, sick=name is FILES[-1])
    return run


def write(path: Path, seed: int, *, sick: bool) -> None:
    """One checkpoint with a tensor of each name, and a trainer's log of what is no number."""
    path.mkdir()
    data = safetensors_head(dict.fromkeys(NAMES, (2, 2)))
    for index in range(len(NAMES)):
        numbers = struct.pack("<4f", *(seed + index + n / 7 for n in range(4)))
        if sick and index < 3:
            numbers = struct.pack("<4f", float("nan"), float("inf"), -float("inf"), 3e38)
        data += numbers
    (path / "model.safetensors").write_bytes(data)
    losses = (2.0, float("nan"), float("inf"), 1e308, -float("inf"))
    log = [{"step": step, "loss": loss, "grad_norm": loss, MARKUP: loss} for step, loss in enumerate(losses, 1)]
    state = {"global_step": seed, "max_steps": 9, "best_metric": float("nan"), "log_history": log}
    (path / "trainer_state.json").write_text(json.dumps(state))
    for file in path.iterdir():
        os.utime(file, (1_767_225_600 + seed, 1_767_225_600 + seed))

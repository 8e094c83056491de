"""What the training commands under supervision are made of: plain saves, written and found without any framework."""

from __future__ import annotations

import array
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 300.0  # the tests themselves end sooner


def until(so: Callable[[], object], what: str) -> None:
    """Come back as soon as something is so; fail loudly when it never is."""
    deadline = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def weights(step: int, *, nan: bool = False) -> array.array[float]:
    """Some weights that differ from step to step."""
    values = array.array("f", [0.001 * (step + 1) * (i % 7 - 3.5) for i in range(64)])
    if nan:
        values[17] = float("nan")
    return values


def save(run: Path, step: int, *, nan: bool = False) -> Path:
    """A safetensors file of its own for each step, whole as soon as it has its name."""
    run.mkdir(exist_ok=True)
    values = weights(step, nan=nan).tobytes()
    header = json.dumps({"model.w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, len(values)]}}).encode()
    header += b" " * (-len(header) % 8)
    temporary, path = run / f".tmp-{step}", run / f"net-{step}.safetensors"
    temporary.write_bytes(len(header).to_bytes(8, "little") + header + values)
    temporary.rename(path)
    return path


def newest(run: Path) -> int:
    """The highest number under which something is saved, whatever it is worth; 0 if there is nothing."""
    return max((int(m[1]) for n in _names(run) if (m := re.fullmatch(r"net-(\d+)\.\w+", n))), default=0)


def is_sick(run: Path, step: int) -> bool:
    """Whether a resume from this step would go on with NaN."""
    return any(b"\x00\x00\xc0\x7f" in path.read_bytes() for path in run.glob(f"net-{step}.*"))


def start(run: Path) -> int:
    """Note that the command was started, and from which step: how many starts there were, this one included."""
    with Path(f"{run}.starts").open("a", encoding="utf-8") as file:
        file.write(f"{newest(run)}{' sick' if is_sick(run, newest(run)) else ''}\n")
    return len(starts(run))


def starts(run: Path) -> list[str]:
    """The step that each start of the command resumed from."""
    log = Path(f"{run}.starts")
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def verdict(run: Path, step: int, outcome: str) -> bool:
    """Whether the ledger holds this outcome for a step."""
    return bool(list(run.glob(f"_ckptguard/ledger/*/{step:012d}.*.{outcome}.json")))


def await_verdict(run: Path, step: int, outcome: str = "good") -> None:
    """Wait until somebody has judged a step so."""
    until(lambda: verdict(run, step, outcome), f"the verdict {outcome} of {step}")


def train(run: Path, last: int) -> None:
    """Save every step that is left, each once the one before it is known to be good."""
    for step in range(newest(run) + 1, last + 1):
        save(run, step)
        await_verdict(run, step)


def note(run: Path, name: str) -> None:
    """Tell whoever waits for it."""
    Path(f"{run}.{name}").touch()


def leave_behind(run: Path) -> int:
    """A child in a session of its own whose parent is gone, and that does not listen; its pid stands in a file too."""
    ready = Path(f"{run}.left")
    code = """import os, signal, sys
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork(): os._exit(0)
open(sys.argv[1] + '.new', 'w').write(str(os.getpid()))
os.rename(sys.argv[1] + '.new', sys.argv[1])
while True: signal.pause()
"""
    subprocess.Popen([sys.executable, "-c", code, str(ready)], stdout=subprocess.DEVNULL)
    until(ready.exists, "the child")
    return int(ready.read_text(encoding="utf-8"))


def is_there(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _names(run: Path) -> list[str]:
    return os.listdir(run) if run.exists() else []

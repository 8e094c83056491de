"""What each tool notices, keeps and costs, beside ckptguard.

    python -m benchmarks.peers [--trials 20] [--tools NAME ...] [--gib 0.25] [--rounds 3]

Each trial makes two healthy saves of a small training, or one healthy and one faulty, harms the newer one, and asks the
tool whether it is right. Printed: of how many trials the tool noticed something, of those in which the fault could be
made at all (`-`: never, as two files cannot be swapped where there is one), and `ran` if it ran the hostile pickle.
Then: whether it tells to which save to go back after NaN, and brings back a save that the trainer deleted. At last what
saving and checking costs, as a ratio to the first tool, medians of `--rounds` after one that warms up. With 0 trials or
rounds that part is left out.
What is not installed is left out: restic comes by apt, the rest by `pip install orbax-checkpoint jax model-signing
pyopenssl`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from benchmarks.measuring import options
from benchmarks.peers.faults import FAULTS, HEALTHY, Fault, state_of
from benchmarks.peers.tools import TOOLS, Tool

STEPS = 1, 2


@contextlib.contextmanager
def _scratch(disk: bool = False) -> Iterator[Path]:
    memory = None if disk or not Path("/dev/shm").is_dir() else "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="ckptguard-peers-", dir=memory) as folder:
        yield Path(folder)


def noticed(tool: Tool, fault: Fault, seed: int) -> str:
    """What a tool says of one fault: "noticed", "not", "ran" (code of the file), or "-" if it cannot be made."""
    with _scratch() as root:
        made = root / "made-by-a-pickle"
        for step in STEPS:
            state = state_of(step)
            if step == STEPS[-1] and fault.saved is not None:
                fault.saved(state)
            try:
                tool.save(root, step, state)
            except (ValueError, KeyError):  # it refuses to save such a state
                return "noticed"
        if fault.harm is not None:
            files, before = tool.files(root, STEPS[-1]), tool.files(root, STEPS[0])
            if not files or not fault.harm(files, before, random.Random(seed), made):
                return "-"
        right = False
        with contextlib.suppress(Exception, CheckpointException):  # the latter is no Exception
            right = tool.is_right(root, STEPS[-1])
        return "ran" if made.exists() else "not" if right else "noticed"


def keeps(tool: Tool) -> tuple[str, str]:
    """Whether it tells the save before one full of NaN, and whether it brings back a save that was deleted."""
    with _scratch() as root:
        states = {step: state_of(step) for step in STEPS}
        next(fault for fault in FAULTS if fault.name == "NaN in a weight").saved(states[2])  # type: ignore[misc]
        for step, state in states.items():
            tool.save(root, step, state)
        good = back = None
        with contextlib.suppress(Exception):
            good = tool.newest_good(root)
        shutil.rmtree(tool.folder(root, 1))
        with contextlib.suppress(Exception):
            back = tool.restore(root, 1, root / "back")
        return "yes" if good == 1 else "no", "yes" if back else "no"


def cost(tool: Tool, gib: float, rounds: int) -> tuple[float, float, int]:
    """The median seconds of a save with all that the tool does about it, those of a check, and the bytes it takes."""
    width = max(64, int((gib * 2**30 / 4 / 18) ** 0.5))
    saves, checks, size = list[float](), list[float](), 0
    tool.width = getattr(tool, "saver", tool).width = width
    for step in range(rounds + 1):
        with _scratch(disk=True) as root:
            state = state_of(step, width=width)
            saves.append(_seconds(lambda: tool.save(root, step, state)))  # noqa: B023 - it is called at once
            checks.append(_seconds(lambda: tool.is_right(root, step)))  # noqa: B023
            size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and not _is_link(path))
    return statistics.median(saves[1:]), statistics.median(checks[1:]), size  # the first one warms up


def _is_link(path: Path) -> bool:
    return path.stat().st_nlink > 1 and "_ckptguard" in path.parts


def _seconds(act: Callable[[], object]) -> float:
    os.sync()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    """Count, measure and print."""
    given = options(__doc__, trials=20, tools=[tool.name for tool in TOOLS], gib=0.25, rounds=3)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    asked = [tool for tool in TOOLS if tool.name in given.tools]
    for tool in asked:
        if lacks := tool.lacks():
            print(f"{tool.name} is left out: it needs {', '.join(lacks)}")
    tools = [tool for tool in asked if not tool.lacks()]
    _print_row("fault", [tool.name for tool in tools])
    for fault in (*FAULTS, HEALTHY) if given.trials else ():
        _print_row(fault.name, [_counted(tool, fault, given.trials) for tool in tools])
    if given.trials:
        kept = [keeps(tool) for tool in tools]
        _print_row("tells the save before NaN", [good for good, _ in kept])
        _print_row("brings back a deleted save", [back for _, back in kept])
    if given.rounds:
        costs = [cost(tool, given.gib, given.rounds) for tool in tools]
        for number, name in enumerate(("save", "check", "bytes")):
            _print_row(f"{name}, to {tools[0].name}", [f"{one[number] / costs[0][number]:.2f}" for one in costs])


def _counted(tool: Tool, fault: Fault, trials: int) -> str:
    said = [noticed(tool, fault, seed) for seed in range(trials if fault.harm is not None else 1)]
    made = [one for one in said if one != "-"]
    if "ran" in made:
        return "ran"
    return f"{100 * made.count('noticed') // len(made)} %" if made else "-"


def _print_row(name: str, cells: Sequence[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""How many functions of the packages the data of a command crosses.

    python -m benchmarks.functions_called [--list WHAT]

Counts by `sys.setprofile` the distinct functions that are called in all threads. What a function builds inside itself
(a comprehension, a lambda) is a part of it. Nothing is counted that only imports or parses options. `--list` prints the
functions of one of the figures.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from benchmarks.measuring import options

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(str(ROOT / name) + "/" for name in ("ckptguard", "daemon/ckptguard_daemon"))


def functions_called(act: Callable[[], object]) -> list[str]:
    """The functions that are called, each as ``file name``, sorted. It acts twice: the first time imports modules."""
    act()
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    functions = (code for code in seen if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"))
    return sorted({f"{Path(c.co_filename).relative_to(ROOT)} {c.co_qualname}" for c in functions})


def figures(folder: Path) -> dict[str, list[str]]:
    """The functions of each figure, on a run of three good checkpoints with protected copies."""
    from ckptguard_daemon.log import log
    from support.tiny_run import name_of, save

    from ckptguard.engine.watched_run import WatchedRun
    from ckptguard.records.daemon_record import DaemonRecord
    from ckptguard.records.run import open_run
    from ckptguard.records.who_and_when import this_host, utc_now
    from ckptguard.reporting.notify import Hooks
    from ckptguard.runs.find_known_good import find_known_good
    from ckptguard.runs.work import PLAIN
    from ckptguard.values.ids import run_id_of
    from ckptguard.values.settings import Settings
    from ckptguard.verification.target import verify_target

    run, settings, (host, boot_id) = str(folder), Settings(settle=0.0), this_host()
    daemon = DaemonRecord(address="/none", host=host, boot_id=boot_id, pid=os.getpid(), started_at=utc_now())
    watched = WatchedRun(run, run_id_of(run), settings, Hooks(settings, log), daemon)
    for step in (1, 2, 3):
        save(run, step, step)
        watched.step(PLAIN)
    for _ in range(3):  # until its own records are written
        watched.step(PLAIN)
    return {
        "known-good": functions_called(lambda: find_known_good(open_run(run))),
        "verify": functions_called(lambda: verify_target(f"{run}/{name_of(2)}", settings)),
        "look": functions_called(lambda: watched.step(PLAIN)),
    }


def main() -> None:
    """Print the figures."""
    given = options(__doc__, list=str)
    with tempfile.TemporaryDirectory() as folder:
        for what, functions in figures(Path(folder)).items():
            print(f"{what:12}{len(functions):5}")
            if given.list == what:
                print(*(f"  {name}" for name in functions), sep="\n")


if __name__ == "__main__":
    main()

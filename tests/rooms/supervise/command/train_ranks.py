"""What torchrun starts: ``train_ranks.py RUN``. The first time rank 0 turns sick while rank 1 is deaf to SIGTERM; the
second time rank 1 is killed beside a sick save, and rank 0 has a child elsewhere; the third time all is well."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from supervised_training import is_there, leave_behind, save, start, train, until

RUN = Path(sys.argv[1])
DONE = RUN.with_name("done")
PIDS = RUN.with_name("pids")


def pids() -> list[int]:
    """All processes of all starts, in the order in which they started."""
    return [int(line.split()[0]) for line in PIDS.read_text(encoding="utf-8").splitlines()] if PIDS.exists() else []


number = 1 + len(pids()) // 2
with PIDS.open("a", encoding="utf-8") as file:
    file.write(f"{os.getpid()} {os.getsid(0)}\n")
if os.environ["RANK"] == "1":
    if number == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if number == 2:
        until(lambda: (RUN / "net-4.safetensors").exists(), "the sick save")
        os.kill(os.getpid(), signal.SIGKILL)
    until(DONE.exists, "the other rank")
else:
    start(RUN)
    train(RUN, min(number + 1, 3))
    until(lambda: len(pids()) == 2 * number, "the other rank")
    if number < 3:
        if number == 2:
            leave_behind(RUN)
        save(RUN, number + 2, nan=True)
        while True:
            signal.pause()
    left = int(Path(f"{RUN}.left").read_text(encoding="utf-8"))
    DONE.write_text(str([pid for pid in (*pids()[:4], left) if is_there(pid)]), encoding="utf-8")

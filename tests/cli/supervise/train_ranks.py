"""What torchrun starts: ``train_ranks.py RUN``. Rank 0 turns sick the first time; rank 1 is deaf to SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from supervised_training import save, start, train, until

RUN = Path(sys.argv[1])
DONE = RUN.with_name("done")
PIDS = RUN.with_name("pids")

with PIDS.open("a", encoding="utf-8") as file:
    file.write(f"{os.getpid()} {os.getsid(0)}\n")
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until(DONE.exists, "the other rank")
else:
    if start(RUN) == 1:
        train(RUN, 2)
        until(lambda: len(PIDS.read_text(encoding="utf-8").splitlines()) == 2, "the other rank")
        save(RUN, 3, nan=True)
        while True:
            signal.pause()
    before = [int(line.split()[0]) for line in PIDS.read_text(encoding="utf-8").splitlines()[:2]]
    train(RUN, 4)
    DONE.write_text(str([pid for pid in before if Path(f"/proc/{pid}").exists()]), encoding="utf-8")

"""One daemon over many runs: what it costs while nothing happens, and how soon it sees a new save.

    python -m benchmarks.bench_fleet [--runs 500] [--checkpoints 50] [--seconds 60]

Makes a fleet of local runs in which each checkpoint has a good verdict, starts a daemon over it, waits until each run
had a pass, and then reads resident memory and processor time of the daemon and its children from /proc. Seen is a save
once the daemon logs its verdict, so `settle` (0.2 s) is included.

"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from support.daemon_process import request
from support.tiny_run import save
from support.views import look

from benchmarks.measuring import daemon, options, resident_mib
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

_TICKS = os.sysconf("SC_CLK_TCK")


def make_fleet(root: Path, runs: int, checkpoints: int) -> None:
    """One run by passes over real files, and the others as copies of it."""
    first = root / "run0"
    for step in range(checkpoints):
        save(str(first), step, step)
    reconcile(look(str(first), Settings(settle=0.0)), PassNotes())
    for number in range(1, runs):
        # Hard links of the same files: each run has names and records of its own.
        shutil.copytree(first, root / f"run{number}", copy_function=os.link)


def processor_seconds(pid: int) -> float:
    """User and system time of a process and of its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def main() -> None:
    """Measure, and print one line for each figure."""
    given = options(__doc__, runs=500, checkpoints=50, seconds=60.0, interval=30.0, folder=Path)
    with (
        tempfile.TemporaryDirectory(prefix="bench-fleet-", dir=given.folder) as place,
        tempfile.TemporaryDirectory(prefix="cg-") as short,
    ):
        fleet = Path(place) / "fleet"
        began = time.monotonic()
        make_fleet(fleet, given.runs, given.checkpoints)
        print(f"{given.runs} runs with {given.checkpoints} checkpoints each, made in {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        over = ("--fleet", str(fleet))
        with daemon(Path(short), arguments=over, settle=0.2, scan_interval=given.interval) as guard:
            pid = guard.process.pid
            while request(guard.address, "GET", "/readyz")[0] != 200:
                time.sleep(0.5)
            print(f"ready after {time.monotonic() - began:.1f} s, {processor_seconds(pid):.1f} s of a processor")
            time.sleep(2.5 * given.interval)
            before, start = processor_seconds(pid), time.monotonic()
            time.sleep(given.seconds)
            share = (processor_seconds(pid) - before) / (time.monotonic() - start)
            threads = len(os.listdir(f"/proc/{pid}/task"))
            print(f"idle: {resident_mib(pid):.0f} MiB resident, {100 * share:.2f} % of a core, {threads} threads")
            delays = []
            for number in range(0, given.runs, max(given.runs // 5, 1)):
                run, step = fleet / f"run{number}", given.checkpoints + number
                began = time.monotonic()
                save(str(run), step, step)
                guard.logged("verified", run=str(run), step=step)
                delays.append(time.monotonic() - began)
            print("new saves seen and verified after", ", ".join(f"{delay:.2f}" for delay in delays), "s")
            print([line for line in guard.log_lines() if line["event"] == "watching_by_timer_only"])


if __name__ == "__main__":
    main()

"""What a pass costs: the first one over many tiny saves, and an idle one over very many checkpoints.

``python -m benchmarks.bench_pass [--first 500 1000 2000] [--idle 5000] [--at FOLDER]`` prints seconds of
processor time (of this process and its scanners) and requests to storage. The first pass must be linear: twice as many
saves, hardly more than twice the time. Files lie in memory (``/dev/shm``), so that no disk is measured.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from support.counting_storage import counted
from support.tiny_files import content

from benchmarks.measuring import options
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan import scan_files
from ckptguard.upkeep.reconcile import PassNotes, PassResult, reconcile
from ckptguard.values.settings import Settings

SETTINGS = Settings(settle=0.0, scan_interval=1.0, workers=1)


def make(root: Path, count: int) -> None:
    """Save `count` checkpoints of two small files each."""
    for step in range(1, count + 1):
        folder = root / f"model-{step}"
        folder.mkdir(parents=True)
        for name, data in content(step).items():
            (folder / name).write_bytes(data)


def measure(count: int, place: Path | str | None, passes: int) -> list[tuple[float, int, PassResult]]:
    """(processor seconds, requests, result) of this many passes, the first one over new saves."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        root = Path(folder, "run")
        make(root, count)
        run, requests = counted(open_run(str(root)))
        notes, found = PassNotes(), []
        for _ in range(passes):
            requests.clear()
            before = time.process_time()
            done = reconcile(RunView(run, SETTINGS), notes, work=Work(scanner=scan_files), assume_quiet=True)
            found.append((time.process_time() - before, requests.total(), done))
        shutil.rmtree(root)
        return found


def main() -> None:
    """Measure and print."""
    given = options(__doc__, first=[500, 1000, 2000], idle=[5000], at=Path)
    place = given.at or ("/dev/shm" if os.path.isdir("/dev/shm") else None)
    for count in given.first:
        [(seconds, requests, done)] = measure(count, place, 1)
        assert len(done.checked) == count
        print(
            f"first pass, {count:6} saves: {seconds:7.2f} s, {requests} requests, {seconds / count * 1e3:.2f} ms each"
        )
    for count in given.idle:
        *_, (settling, _, _), (seconds, requests, done) = measure(count, place, 4)
        assert done == PassResult()
        print(f"idle pass, {count:6} checkpoints: {seconds:7.3f} s, {requests} requests (before it: {settling:.2f} s)")


if __name__ == "__main__":
    main()

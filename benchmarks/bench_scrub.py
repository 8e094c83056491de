"""Does a scrub stay at its rate, and what can it do without one?

    python -m benchmarks.bench_scrub [--rate 100e6] [--seconds 20] [--rounds 3] [--folder DIR]

Writes a run of several safetensors checkpoints, together as many bytes as the rate allows in so many seconds, verifies
it, and scrubs it with that rate and without one. Printed: bytes a second as a share of the rate, over the whole scrub
and over the fastest and slowest second of it; and without a rate as a share of a plain read of the same files, whose
page cache was dropped, too.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import options, write_tensors
from ckptguard.repair.scrub import scrub
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target

CHUNK = 8 << 20
FILES = 5
SETTINGS = Settings(settle=0.0, keep="none")


def write_run(run: Path, size: int) -> int:
    """Checkpoints of this size together; returns how many bytes they really have."""
    count, block = max(1, size // FILES // CHUNK), os.urandom(CHUNK // 2).replace(b"\xff", b"\x3f") * 2
    shapes = {f"w{i}": [CHUNK] for i in range(count)}
    for number in range(FILES):
        write_tensors(run / f"net-{number}.safetensors", shapes, (block for _ in range(count)), dtype="U8")
    return sum(path.stat().st_size for path in run.glob("*.safetensors"))


def scrubbed(run: Path, rate: float | None) -> tuple[float, list[float]]:
    """The seconds that a scrub took, and the bytes of each whole second of it."""
    seconds: dict[int, int] = {}
    began = time.perf_counter()

    def count(done: int) -> None:
        second = int(time.perf_counter() - began)
        seconds[second] = seconds.get(second, 0) + done

    done = scrub(open_view(str(run), SETTINGS), work=Work(rate=rate, progress=count))
    took = time.perf_counter() - began
    if len(done.places) != FILES or any(one.outcome.value != "good" for one in done.places):
        raise SystemExit(f"a good run was called otherwise: {done}")
    whole = [float(seconds.get(second, 0)) for second in range(int(took))]
    return took, whole


def plain(run: Path) -> float:
    """The seconds of a plain read of all files, from the disk."""
    buffer = bytearray(1 << 20)
    began = time.perf_counter()
    for path in sorted(run.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    given = options(__doc__, rate=100e6, seconds=20.0, rounds=3, folder=Path)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        run = Path(name) / "run"
        run.mkdir()
        size = write_run(run, int(given.rate * given.seconds))
        verify_target(str(run), SETTINGS)
        print(f"{size / 1e6:.0f} MB in {FILES} checkpoints, at {given.rate / 1e6:g} MB/s")
        shares, free = [], []
        for _ in range(given.rounds):
            took, each = scrubbed(run, given.rate)
            shares.append(size / took / given.rate)
            inner = [found / given.rate for found in each[1:]] or [shares[-1]]
            print(f"  {shares[-1]:.3f} of the rate; a second: {min(inner):.2f} to {max(inner):.2f}")
            free.append(plain(run) / scrubbed(run, None)[0])
        print(f"at its rate: {statistics.median(shares):.3f} of it (median of {given.rounds}); within 10 %: ", end="")
        print("yes" if all(abs(1 - share) <= 0.1 for share in shares) else "NO")
        print(f"without a rate: {statistics.median(free):.2f} of a plain read's speed")


if __name__ == "__main__":
    main()

"""How long the catalogue takes to answer about one run of a fleet, and to take in what a pass has seen, and its memory.

    python -m benchmarks.bench_catalogue [--runs 1000] [--generations 100]

Printed: the median of 30 times in milliseconds. Nothing else is read, so the figures are the same whatever the storage
of the runs is.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections import Counter

import msgspec

from benchmarks.measuring import median_ms, options
from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.catalogue.rows import Event, RunSeen, event_key
from ckptguard.values.run_rows import Generation
from ckptguard.values.run_summary import RunSummary

TIMES = 30
NOW = 1.8e9
OUTCOMES = ("good",) * 95 + ("bad",) * 2 + ("suspect", "incomplete", "good")


def generations(number: int, count: int) -> list[Generation]:
    """The checkpoints of one run."""
    chance = random.Random(number)
    return [
        Generation(
            name=f"checkpoint-#/{1000 * n:012d}.1",
            path=f"checkpoint-{1000 * n}",
            outcome=chance.choice(OUTCOMES),
            verdict="0001.good",
            good=True,
            bytes=chance.randrange(10**9, 10**11),
            saved_at=NOW - 600 * (count - n),
            judged_at=NOW - 600 * (count - n) + chance.random() * 60,
            in_place=True,
            kept="copy" if n == count - 1 else "",
            scrubbed_at=NOW - chance.random() * 6e5,
        )
        for n in range(count)
    ]


def seen_of(number: int, rows: list[Generation], digest: bytes = b"d") -> RunSeen:
    """What a pass has seen of one run."""
    size = Counter[str]()
    for row in rows:
        size[row.outcome] += row.bytes or 0
    summary = RunSummary(
        url=f"/data/team{number % 40}/run-{number}",
        name=f"run-{number}",
        protected=number % 2 == 0,
        known_good_step=99_000,
        newest_at=NOW,
        save_interval=600.0,
        checkpoints=dict(Counter(row.outcome for row in rows)),
        bytes=dict(size),
        scrubbed_at=min(row.scrubbed_at or NOW for row in rows),
    )
    events = tuple(
        Event(key=event_key("verdict", r.name), kind="verdict", at=r.judged_at, about=r.name, cause=r.outcome)
        for r in rows
    )
    return RunSeen(id=f"{number:012x}", digest=digest, summary=summary, generations=tuple(rows), events=events)


def main() -> None:
    """Note a fleet, and ask."""
    asked = options(__doc__, runs=1000, generations=100)
    with tempfile.TemporaryDirectory() as folder:
        catalogue, before = Catalogue(folder), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        for number in range(asked.runs):
            catalogue.see(seen_of(number, generations(number, asked.generations)))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        took = time.perf_counter() - began
        print(f"{asked.runs} runs x {asked.generations}: {grown:.0f} MiB more memory, noted in {took:.1f} s")
        middle, newest = f"{asked.runs // 2:012x}", catalogue.newest
        rows = generations(asked.runs // 2, asked.generations)
        more = [*rows[1:], msgspec.structs.replace(rows[0], name="checkpoint-#/000000999000.1")]
        for name, call in (
            ("rows of 1 run", lambda: catalogue.noted(middle)),
            ("newest 100 events", lambda: catalogue.events_after(newest - 100)),
            ("written: a run, unchanged", lambda: catalogue.see(seen_of(asked.runs // 2, rows))),
            ("written: a run, one more", lambda: catalogue.see(seen_of(asked.runs // 2, more))),
            ("read by the next process", lambda: Catalogue(folder).summary(middle)),
        ):
            print(f"{name:42} {median_ms(TIMES, call):8.2f} ms")


if __name__ == "__main__":
    main()

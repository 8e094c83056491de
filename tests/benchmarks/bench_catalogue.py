"""How long the catalogue takes to answer each question about a fleet, and to take in what a pass has seen.

    python tests/benchmarks/bench_catalogue.py [--runs 10000] [--generations 100]

Each question opens the catalogue anew, as the daemon does. Printed: the median of 30 times in milliseconds.
Nothing else is read, so the figures are the same whatever the storage of the runs is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ckptguard.catalogue import questions
from ckptguard.catalogue.rows import Event, RunSeen, event_key
from ckptguard.catalogue.schema import insert, open_for_reading, open_for_writing
from ckptguard.catalogue.write import write_run
from ckptguard.values.run_rows import Generation
from ckptguard.values.run_summary import RunSummary

Question = Callable[[sqlite3.Connection], Any]
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


def facts(number: int, rows: list[Generation]) -> RunSummary:
    """What is said of one run."""
    size = Counter[str]()
    for row in rows:
        size[row.outcome] += row.bytes or 0
    return RunSummary(
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


def events(rows: list[Generation]) -> list[Event]:
    """The verdicts of one run."""
    return [
        Event(key=event_key("verdict", r.name), kind="verdict", at=r.judged_at, about=r.name, cause=r.outcome)
        for r in rows
    ]


def build(path: str, runs: int, count: int) -> None:
    """Write a fleet in one transaction."""
    with contextlib.closing(open_for_writing(path)) as db:
        db.execute("BEGIN")
        for number in range(1, runs + 1):
            rows = generations(number, count)
            known = facts(number, rows)
            db.execute(
                "INSERT INTO run VALUES (?, ?, ?, ?)", (number, f"{number:012x}", b"d", msgspec.json.encode(known))
            )
            insert(db, "generation", number, rows)
            insert(db, "event", number, events(rows))
        db.execute("COMMIT")


def asked_of(run: str, event: int) -> dict[str, Question]:
    """The questions, about one run, and behind an event."""
    return {
        "timeline of 1 run": partial(questions.timeline, id=run),
        "newest 100 events": partial(questions.events_after, number=event),
    }


def timed(path: str, question: Question) -> float:
    """The median time in milliseconds."""
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        with contextlib.closing(open_for_reading(path)) as db:
            question(db)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    """Build a fleet, and ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--generations", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "catalogue")
        began = time.perf_counter()
        build(path, asked.runs, asked.generations)
        size = os.path.getsize(path) / 1e6
        print(f"{asked.runs} runs x {asked.generations}: {size:.0f} MB, built in {time.perf_counter() - began:.1f} s")
        middle = f"{asked.runs // 2:012x}"
        with contextlib.closing(open_for_reading(path)) as db:
            last = questions.events_after(db, 0, most=1).last + asked.runs * asked.generations - 101
        for name, question in asked_of(middle, last).items():
            print(f"{name:42} {timed(path, question):8.2f} ms")
        rows = generations(asked.runs, asked.generations)
        with contextlib.closing(open_for_writing(path)) as db:
            for state in ("unchanged", "one more"):
                seen = RunSeen(id=middle, digest=b"e", summary=facts(1, rows), generations=tuple(rows))
                if state == "unchanged":
                    write_run(db, seen, now=NOW)
                else:
                    rows = [*rows[1:], msgspec.structs.replace(rows[0], name="checkpoint-#/000000999000.1")]
                    seen = msgspec.structs.replace(seen, generations=tuple(rows))
                began = time.perf_counter()
                write_run(db, seen, now=NOW)
                print(f"{'written: a run, ' + state:42} {1e3 * (time.perf_counter() - began):8.2f} ms")


if __name__ == "__main__":
    main()

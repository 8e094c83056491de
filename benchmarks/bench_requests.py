"""What guarding a run on an object store asks of the store: requests by kind, and dollars at the prices of S3.

    python -m benchmarks.bench_requests [--saves 10] [--server radosgw|moto] [--requests]

A save has six files, as those of Transformers' Trainer. Listings have 1,000 names in one answer with moto, and 100 with
radosgw. `--requests` prints each request of an idle look and of a new save.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from servers.faulty_proxy import FaultyProxy
from support.store_requests import Bill
from support.store_runs import StoreRun, look

from benchmarks.measuring import BUCKET, options, s3_server
from ckptguard.layouts import Checkpoint
from ckptguard.runs.results import Checked
from ckptguard.runs.work import Work
from ckptguard.scan import scan_files

MONTH = 30 * 86400


def main() -> None:
    """Measure and print."""
    given = options(__doc__, saves=10, server=("moto", "radosgw"), requests=False)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with s3_server(given.server, place, page=1000) as server, FaultyProxy(server.endpoint).running() as proxy:
            server.client().create_bucket(Bucket=BUCKET)
            run = StoreRun(server, proxy, BUCKET, "run", place / "saves")
            for number in range(1, given.saves + 1):
                run.save(10 * number)
            guarded = run.guard(run.settings.changed(unfinished_limit=0.0))  # as if they were saved long ago

            def show(what: str, looks: int) -> Bill:
                bill = Bill(proxy)
                for _ in range(looks):
                    look(guarded)
                bill.end()
                counts = ", ".join(f"{count} {kind}" for kind, count in sorted(bill.counts().items()))
                print(f"{what}: {counts}; {bill.reads()} reads of its bytes; ${bill.dollars():.6f}", flush=True)
                return bill

            began, backlog = time.perf_counter(), Bill(proxy)

            def say(path: str, what: str) -> None:
                if path == f"checkpoint-{10 * given.saves}":
                    asked, seconds = sum(backlog.counts().values()) + backlog.reads(), time.perf_counter() - began
                    print(f"the newest is {what} after {seconds:.1f} s, {asked} requests", flush=True)

            def on_verdict(checked: Checked) -> None:
                say(checked.path, checked.outcome.value)

            def on_early(checkpoint: Checkpoint, words: str) -> None:
                say(checkpoint.path, "read")

            guarded.step(Work(scanner=scan_files, on_verdict=on_verdict, on_early=on_early))
            print(f"all {given.saves} saves are judged after {time.perf_counter() - began:.1f} s", flush=True)
            show("two more looks", 2)
            idle = show("an idle look", 1)
            run.save(10 * given.saves + 10)
            new = show("a new save, with the looks until the run is idle again", 3)
            for pause in (30, 900):
                print(f"500 idle runs, a look each {pause} s: ${500 * idle.dollars() * MONTH / pause:,.2f} a month")
            for kind, key in [*idle.asked, *new.asked] if given.requests else ():
                print(f"  {kind} {key}")


if __name__ == "__main__":
    main()

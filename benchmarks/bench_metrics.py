"""One scrape of a thousand runs: from their facts, and from a catalogue's feed.

    python -m benchmarks.bench_metrics [--runs 1000] [--times 20]

Prints the median time of each, the size of the text, and for comparison the time that Prometheus' own Python client
takes for as many series, if it is installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.metrics import Counted, DaemonFacts, exposition

from benchmarks.measuring import options
from ckptguard.catalogue.rows import RunSeen
from ckptguard.values.run_summary import RunSummary
from ckptguard.values.settings import Settings


def facts(number: int) -> RunSummary:
    """A run of which everything is known."""
    now = time.time()
    return RunSummary(
        url=f"/data/runs/experiment-{number}",
        name=f"experiment-{number}",
        protected=True,
        training=True,
        known_good_step=5000,
        known_good_at=now - 600,
        safe_at=now - 600,
        newest_at=now - 60,
        newest_outcome="good",
        save_interval=600.0,
        world_size=8,
        began_at=now - 86400,
        checkpoints={"good": 90, "bad": 2, "pending": 1},
        bytes={"good": 90 << 30, "bad": 2 << 30, "pending": 1 << 30},
        backlog=1,
        backlog_bytes=1 << 30,
        replicas=1,
        scrubbed_at=now - 86400,
        scrub_interval=604800.0,
        incidents={"numeric": 2},
        rollbacks={"numeric": 1},
    )


def median(times: int, act: Callable[[], object]) -> str:
    """The time as a text: by the clock, and of the processor."""
    taken, busy = [], []
    for _ in range(times):
        begun, worked = time.perf_counter(), time.process_time()
        act()
        taken.append((time.perf_counter() - begun) * 1e3)
        busy.append((time.process_time() - worked) * 1e3)
    return f"median {statistics.median(taken):.0f} ms, {statistics.median(busy):.0f} ms of processor time"


def with_the_client(text: bytes, times: int) -> str | None:
    """The time that the client library takes to write the same series."""
    try:
        from prometheus_client import generate_latest
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return None
    families = list(text_string_to_metric_families(text.decode()))

    class Families:
        def collect(self) -> object:
            return families

    return median(times, lambda: generate_latest(Families()))  # type: ignore[arg-type]


def main() -> None:
    """Measure and print."""
    given = options(__doc__, runs=1000, times=20)
    runs = [facts(number) for number in range(given.runs)]
    counted = Counted(verdicts={run.url: {"good": 90, "bad": 2} for run in runs})
    daemon = DaemonFacts(loop_at=time.time(), counted=counted)
    feed = CatalogueFeed()
    for run in runs:
        feed.catalogue.see(RunSeen(id=run.url, digest=b"d", summary=run))

    watched = [
        SimpleNamespace(
            run_id=r.url, url=r.url, name=r.name, state="guarded", trouble=None, settings=Settings(), shared=None
        )
        for r in runs
    ]

    def scrape() -> bytes:
        return exposition([feed.summary(one) for one in watched], daemon, time.time())

    text = scrape()
    print(f"{len(runs)} runs: {text.count(b'ckptguard_')} lines, {len(text) / 1e6:.1f} MB")
    print(f"a scrape: {median(given.times, scrape)}")
    client = with_the_client(text, given.times)
    if client is not None:
        print(f"the client library, for the text alone: {client}")


if __name__ == "__main__":
    main()

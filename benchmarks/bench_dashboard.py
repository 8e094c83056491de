"""How long the data routes of the page take for a long run and for a large fleet, and what open streams cost.

    python -m benchmarks.bench_dashboard [--checkpoints 5000] [--tensors 1000] [--runs 10000] [--streams 200]

The manifests that a heat map reads are written to a local disk; the rows are put into a catalogue. Printed: seconds of
the first and of the second answer, its size in KiB as sent, and the growth of the process by the streams in MiB.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from ckptguard_daemon.dashboard.heat import MOST, choose
from support.dashboards import Dashboard

from benchmarks.bench_catalogue import generations
from benchmarks.measuring import options, resident_mib
from ckptguard.catalogue.rows import RunSeen
from ckptguard.records.manifests import write_manifest
from ckptguard.records.run import begin_run
from ckptguard.values.ids import run_id_of
from ckptguard.values.manifest import File, Manifest, Span, Tensor
from ckptguard.values.run_summary import RunSummary


def manifest(step: int, tensors: int) -> Manifest:
    """One checkpoint of so many tensors."""
    path = f"checkpoint-{step}/model.safetensors"
    spans = tuple(Span(4096 * n, 4096, f"{step * tensors + n:064x}") for n in range(tensors))
    names = (f"model.layers.{n // 10}.block.part{n % 10}.weight" for n in range(tensors))
    own = tuple(Tensor(name, "float32", (32, 32), n, "model", 1.0 + n, 0.5, 0.0) for n, name in enumerate(names))
    file = File(path=path, size=4096 * tensors, format="safetensors", envelope="0" * 64, spans=spans, tensors=own)
    return Manifest(
        series="checkpoint-#",
        path=f"checkpoint-{step}",
        layout="hf_trainer",
        step=step,
        generation=1,
        digest_origin="observer",
        sealed_at="2026-01-01T12:00:00Z",
        version="0",
        nonce=f"{step}",
        files=(file,),
    )


def timed(dashboard: Dashboard, name: str, path: str) -> None:
    """Ask twice, and print."""
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        status, _, body = dashboard.get(path, **{"Accept-Encoding": "gzip"})
        seconds.append(time.perf_counter() - began)
        assert status == 200, body[:500]
    print(f"{name:12} {seconds[0]:7.3f} {seconds[1]:7.3f} s {len(body) / 1024:9.0f} KiB")


def main() -> None:
    """Measure."""
    given = options(__doc__, checkpoints=5000, tensors=1000, runs=10_000, streams=200)
    with tempfile.TemporaryDirectory() as place:
        folder, url = Path(place), f"{place}/run"
        os.mkdir(url)
        dashboard = Dashboard(folder, url)
        rows = generations(1, given.checkpoints)
        run = begin_run(url)
        shown = choose([row.outcome for row in rows], MOST)
        for step in {rows[n].id.number or 0 for n in (*shown, 0, 1)}:
            write_manifest(run, manifest(step, given.tensors))
        facts = RunSummary(url=url, name="run", explanation="yes: it is", checkpoints={"good": len(rows)})
        dashboard.catalogue.see(RunSeen(id=run_id_of(url), digest=b"d", summary=facts, generations=tuple(rows)))
        below, names = f"/v1/runs/{run_id_of(url)}", [row.name.replace("#", "%23") for row in rows[:2]]
        timed(dashboard, "page", f"{below}/page")
        timed(dashboard, "checkpoint", f"{below}/checkpoint?name={names[0]}")
        timed(dashboard, "diff", f"{below}/diff?a={names[0]}&b={names[1]}")
        timed(dashboard, "shards", f"{below}/shards?name={names[0]}")
        timed(dashboard, "heat", f"{below}/heat?most={MOST}")
        for number in range(given.runs):
            dashboard.add(f"/runs/team-{number % 40}/run-{number}")
        timed(dashboard, "fleet", "/v1/fleet")
        before = resident_mib()
        listeners = [dashboard.listen() for _ in range(given.streams)]
        for listener in listeners:
            listener.next()
        print(f"{given.streams} streams, both ends in one process: {resident_mib() - before:.1f} MiB")
        for listener in listeners:
            listener.close()
        dashboard.close()


if __name__ == "__main__":
    main()

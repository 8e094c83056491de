"""What the dashboard costs: open streams, an event on its way to the page, and pages of long runs and of many runs.

    python -m benchmarks.bench_page [--checkpoints 5000] [--tensors 1000] [--runs 10000] [--streams 200]

A real daemon and Debian's chromium. The rows of the fleet are copies of one real row; all else is the daemon's.
"""

from __future__ import annotations

import http.client
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from support.browsing import Dashboard, Watched, chromium
from support.daemon_process import save, until
from support.tiny_files import safetensors_head

from benchmarks.measuring import options
from ckptguard.runs.token_file import add_token
from ckptguard.values.access import Role, Token

TIMES = 10
# When an element of this kind last came into the page, by the page's own clock, which is the machine's.
WATCH = """() => new MutationObserver((changes) => {
  const added = changes.flatMap(({ addedNodes }) => [...addedNodes]);
  const isEvent = (node) => node.matches?.(".events li") || node.querySelector?.(".events li");
  if (added.some(isEvent)) window.seenAt = Date.now();
}).observe(document.body, { childList: true, subtree: true })"""
TYPE = """(words) => new Promise((done) => {
  const field = document.querySelector("input[type=search]");
  const begun = performance.now();
  field.value = words;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const look = () => requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun)));
  requestAnimationFrame(look);
})"""


def resident(pid: int) -> float:
    """MiB of a process and of all below it that are not shared with others."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            above, found = pid, int(path.name)
            while found not in (above, 0, 1):
                found = int((Path("/proc") / str(found) / "stat").read_text().rpartition(")")[2].split()[1])
            if found == above:
                rows = (path / "smaps_rollup").read_text().splitlines()
                total += sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
        except OSError:
            continue
    return total / 1024


def streams(daemon: Dashboard, token: str, count: int) -> None:
    """Open streams, as pages do, and what they add to the daemon's memory."""
    before = resident(daemon.process.pid)
    opened = []
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", daemon.port)
        connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {token}"})
        opened.append((connection, connection.getresponse()))
    for _, answer in opened:
        assert answer.status == 200, answer.status
        answer.fp.readline()
    print(f"{count} streams: {resident(daemon.process.pid) - before:.1f} MiB over {before:.1f} MiB")
    for connection, _ in opened:
        connection.close()


def events(page: Any, daemon: Dashboard, run: Path) -> None:
    """From the verdict's record on the disk to its line on the page."""
    page.goto(daemon.page_of(run))
    page.locator(".connection.live").wait_for()
    page.locator("#timeline").wait_for()
    page.evaluate(WATCH)
    took = []
    for step in range(1, TIMES + 1):
        page.evaluate("window.seenAt = null")
        save(run, step)
        at = until(lambda: page.evaluate("window.seenAt"), "the event")
        page.wait_for_timeout(100)
        ledger = max((run / "_ckptguard/ledger").rglob("*.good*"), key=lambda path: path.stat().st_mtime_ns)
        took.append(at / 1000 - ledger.stat().st_mtime_ns / 1e9)
    print(f"verdict to page: {statistics.median(took):.3f} s, at most {max(took):.3f} s")


def write_long(run: Path, checkpoints: int, tensors: int) -> None:
    """A run of so many small checkpoints of so many tensors."""
    head = safetensors_head({f"model.layers.{i // 10}.mlp.{i % 10}.weight": [2] for i in range(tensors)})
    for number in range(1, checkpoints + 1):
        path = run / f"net-{number}.safetensors"
        path.write_bytes(head + number.to_bytes(4, "little") * 2 * tensors)
        os.utime(path, (time.time() - 1e5 + number,) * 2)


def pages(watched: Watched, daemon: Dashboard, run: Path, checkpoints: int) -> None:
    """Each page of a long run: its document, its first paint with data, and the browser's memory."""

    def noted() -> list[dict[str, Any]] | None:
        found = daemon.ask("page", run=run)[1]["generations"]
        return found if len(found) == checkpoints else None

    generations = until(noted, f"{checkpoints} verdicts", 7200)
    name, earlier = generations[-1]["name"], generations[-2]["name"]
    places = {
        (): "tbody tr",
        ("heat",): ".heat-canvas",
        ("checkpoint", name): "#tensors",
        ("diff", earlier, name): "main h2",
        ("shards", name): "main table",
        ("keep",): "#retention",
    }
    for parts, there in places.items():
        page = watched.context.new_page()
        begun = time.perf_counter()
        page.goto(daemon.page_of(run, *parts))
        page.locator(there).first.wait_for()
        page.evaluate("() => new Promise(requestAnimationFrame)")
        took = time.perf_counter() - begun
        answered = page.evaluate(
            """Math.max(...performance.getEntriesByType("resource")
              .filter(({ name }) => name.includes("/v1/runs/")).map(({ duration }) => duration))"""
        )
        if parts == ("keep",):
            begun = time.perf_counter()
            page.get_by_role("button", name="Show what it would remove").click()
            page.get_by_text("would go to the trash").wait_for()
            print(f"preview of retention: {time.perf_counter() - begun:.2f} s")
        page.wait_for_timeout(500)
        cdp = watched.context.new_cdp_session(page)
        cdp.send("HeapProfiler.collectGarbage")
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
        print(
            f"{parts[0] if parts else 'run'}: {took:.2f} s, its document {answered / 1000:.2f} s, heap {heap:.0f} MiB"
        )
        page.close()


def fleet(watched: Watched, daemon: Dashboard, runs: int) -> None:
    """Filter a fleet as somebody types."""
    page = watched.context.new_page()
    found = page.request.get(f"{daemon.origin}/v1/fleet").json()
    row = found["runs"][0]
    found["runs"] = [{**row, "id": f"{n:012x}", "name": f"team-{n % 97}/exp-{n}"} for n in range(runs)]
    page.route("**/v1/fleet", lambda route: route.fulfill(json=found))
    page.goto(f"{daemon.origin}/#/")
    page.locator("tbody tr").nth(5).wait_for()
    words = ("t", "te", "team-9", "team-9/exp-1", "9/ 42", "nothing like it", "")
    took = [page.evaluate(TYPE, one) for one in words]
    print(f"{runs} runs: filter {statistics.median(took):.0f} ms, at most {max(took):.0f} ms, painted")
    page.close()


def main() -> None:
    """Measure all of it."""
    asked = options(__doc__, checkpoints=5000, tensors=1000, runs=10_000, streams=200)
    with tempfile.TemporaryDirectory(prefix="cg-") as temporary, chromium() as browser:
        home = Path(temporary)
        live, long = home / "live", home / "long"
        live.mkdir()
        long.mkdir()
        write_long(long, asked.checkpoints, asked.tensors)
        tokens = home / "tokens"
        _, secret = add_token(str(tokens), Token(name="bench", role=Role.READER, digest=""))
        daemon = Dashboard(home, live, long, arguments=("--tokens", str(tokens)))
        try:
            watched = Watched(browser, daemon)
            page = watched.log_in()
            pages(watched, daemon, long, asked.checkpoints)
            streams(daemon, secret, asked.streams)
            events(page, daemon, live)
            fleet(watched, daemon, asked.runs)
            print(
                f"the whole browser: {resident(os.getpid()) - resident(daemon.process.pid):.0f} MiB, with this program"
            )
            print(f"load average: {os.getloadavg()[0]:.1f}")
        finally:
            daemon.kill()


if __name__ == "__main__":
    main()

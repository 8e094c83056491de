"""One daemon over many runs on a store of which every tenth request fails, breaks off or is slow."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.faulty_proxy import FaultyProxy
from servers.fixtures import S3_BUCKETS
from servers.s3 import S3Server
from support.daemon_process import DaemonProcess, until
from support.tiny_files import content

from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.values.settings import Settings

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
RUNS, INTERVAL = (200, "20") if FULL else (4, "2")
PATIENCE = 3000.0 if FULL else 240.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3 * PATIENCE)]


@pytest.fixture
def fleet(moto: S3Server) -> Iterator[tuple[str, FaultyProxy]]:
    """A place for a fleet in a bucket, and the proxy that stands before it."""
    prefix = f"fleet-{uuid.uuid4().hex[:12]}"
    with FaultyProxy(moto.endpoint, share=0.1, held=f"{prefix}/stuck").running() as proxy:
        yield prefix, proxy


def test_every_save_gets_its_verdict_and_none_starves(
    fleet: tuple[str, FaultyProxy], moto: S3Server, tmp_path: Path, short_folder: Path
) -> None:
    """Every save of every run gets one verdict, also saves that come later, while another run's storage answers nothing
    at all; once that answers, it gets its verdict, too. Good ones are known-good, damaged ones bad."""
    prefix, proxy = fleet
    client, bucket = moto.client(), S3_BUCKETS[0]
    names = [f"team-{number % 4}/run-{number}" for number in range(RUNS)]

    def save(name: str, step: int, *, damaged: bool = False) -> None:
        for file, data in content(step).items():
            whole = data[:-3] if damaged and file.endswith(".safetensors") else data
            client.put_object(Bucket=bucket, Key=f"{prefix}/{name}/checkpoint-{step}/{file}", Body=whole)

    for name in names:
        save(name, 1)
    save("stuck/run", 1)
    fleet_url, stuck = f"s3://{bucket}/{prefix}", f"s3://{bucket}/{prefix}/stuck/run"
    file = tmp_path / "fleet.toml"
    # The stuck run is named apart: a search waits for what it lists.
    file.write_text(f'folders = ["{fleet_url}/team-*"]\n[settings]\nkeep = "none"\nunfinished_limit = 2')
    options = json.dumps({f"s3://{bucket}": {**moto.options, "endpoint_url": proxy.url}})
    url: Any = stuck
    daemon = DaemonProcess(
        short_folder, url, arguments=("--fleet", str(file)), CKPTGUARD_STORAGE=options, CKPTGUARD_SCAN_INTERVAL=INTERVAL
    )

    def verdicts() -> dict[tuple[str, int], list[str]]:
        found: dict[tuple[str, int], list[str]] = {}
        for line in daemon.log_lines():
            if line["event"] == "verified":
                found.setdefault((line["run"], line["step"]), []).append(line["outcome"])
        return found

    def all_verified(step: int) -> bool:
        assert daemon.process.poll() is None, daemon.log_path.read_text()[-2000:]
        return {f"{fleet_url}/{name}" for name in names} <= {run for run, of in verdicts() if of == step}

    try:
        until(lambda: all_verified(1), "a verdict on the first save of every run", PATIENCE)
        assert (stuck, 1) not in verdicts()
        for number, name in enumerate(names):
            save(name, 2, damaged=number % 3 == 0)
        until(lambda: all_verified(2), "a verdict on the second save of every run", PATIENCE)
        assert (stuck, 1) not in verdicts()
        assert proxy.counts["held"] > 0
        proxy.released.set()
        until(lambda: (stuck, 1) in verdicts(), "the verdict of the run that was stuck", PATIENCE)
    finally:
        daemon.stop()
    print(proxy.counts)
    assert min(proxy.counts[fate] for fate in ("busy", "broken", "slow")) > 0
    found = verdicts()
    assert found.pop((stuck, 1)) == ["good"]
    for number, name in enumerate(names):
        url = f"{fleet_url}/{name}"
        expected = "bad" if number % 3 == 0 else "good"
        assert (found[url, 1], found[url, 2]) == (["good"], [expected])
        assert_recorded_once(url, {1: "good", 2: expected}, Settings(storage={f"s3://{bucket}": moto.options}))


def assert_recorded_once(url: str, expected: dict[int, str], settings: Settings) -> None:
    """The ledger has one entry for each save, and the newest good one is known-good."""
    run = open_run(url, settings)
    history = load_history(run)
    entries = Counter(
        (s.id.number, s.outcome.value) for series in history.names for s in history.current_verdicts(series).values()
    )
    assert entries == Counter(expected.items())
    assert find_known_good(run).id.number == max(step for step, outcome in expected.items() if outcome == "good")

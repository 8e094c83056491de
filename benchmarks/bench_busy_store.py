"""`ckptguard verify` of a run on an S3 that answers many requests with 503 SlowDown: how long, and what it asked for.

    python -m benchmarks.bench_busy_store [--checkpoints 12] [--busy 40] [--rounds 3] [--server moto|radosgw]

Checkpoints are small, of one file. Each round is a run of its own, verified once without a fault and once where so many
of 100 answers are busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from servers.faulty_proxy import FaultyProxy
from support.tiny_files import WEIGHTS, content

from benchmarks.measuring import BUCKET, options, s3_server


def verify(proxy: FaultyProxy, run: str, reached: dict[str, object]) -> tuple[int, float, str]:
    """The exit code, the seconds and the output of the command."""
    given = json.dumps({"s3": {**reached, "endpoint_url": proxy.url}})
    environment = {**os.environ, "CKPTGUARD_STORAGE": given, "CKPTGUARD_SETTLE": "0"}
    command = [sys.executable, "-m", "ckptguard", "verify", f"s3://{BUCKET}/{run}"]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, time.monotonic() - begun, done.stdout + done.stderr


def main() -> None:
    """Measure and print."""
    given = options(__doc__, checkpoints=12, busy=40.0, rounds=3, server=("moto", "radosgw"))
    with tempfile.TemporaryDirectory() as folder, s3_server(given.server, Path(folder)) as server:
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        for number in range(given.rounds):
            for busy in (0.0, given.busy):
                run = f"run-{number}-{busy:.0f}"
                for step in range(1, given.checkpoints + 1):
                    client.put_object(Bucket=BUCKET, Key=f"{run}/net-{step}.safetensors", Body=content(step)[WEIGHTS])
                proxy = FaultyProxy(server.endpoint, share=busy / 100, faults=["busy"], seed=number)
                with proxy.running():
                    code, seconds, said = verify(proxy, run, server.options)
                asked = len(proxy.asked)
                print(f"{busy:.0f} % busy: exit {code}, {seconds:.1f} s, {asked} requests, {proxy.counts}")
                if code:
                    print(said)


if __name__ == "__main__":
    main()

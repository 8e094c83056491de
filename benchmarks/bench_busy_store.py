"""`ckptguard verify` of a run on an S3 that answers many requests with 503 SlowDown: how long, and what it asked for.

    python -m benchmarks.bench_busy_store [--checkpoints 12] [--busy 40] [--rounds 3] [--server moto|radosgw]

Checkpoints are small, of one file. Each round is a run of its own, verified once without a fault and once with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servers.faulty_proxy import FaultyProxy

BUCKET = "ckptguard-bench"


def verify(proxy: FaultyProxy, run: str, options: dict[str, object]) -> tuple[int, float, str]:
    """The exit code, the seconds and the output of the command."""
    given = json.dumps({"s3": {**options, "endpoint_url": proxy.url}})
    environment = {**os.environ, "CKPTGUARD_STORAGE": given, "CKPTGUARD_SETTLE": "0"}
    command = [sys.executable, "-m", "ckptguard", "verify", f"s3://{BUCKET}/{run}"]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, time.monotonic() - begun, done.stdout + done.stderr


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=12)
    parser.add_argument("--busy", type=float, default=40, help="of 100 answers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=("moto", "radosgw"), default="moto")
    given = parser.parse_args()
    from servers.faulty_proxy import FaultyProxy
    from servers.moto_server import moto_server
    from servers.radosgw import radosgw
    from support.tiny_files import WEIGHTS, content

    with tempfile.TemporaryDirectory() as folder:
        starting = moto_server(Path(folder)) if given.server == "moto" else radosgw(Path(folder))
        with starting as server:
            client = server.client()
            client.create_bucket(Bucket=BUCKET)
            for number in range(given.rounds):
                for busy in (0.0, given.busy):
                    run = f"run-{number}-{busy:.0f}"
                    for step in range(1, given.checkpoints + 1):
                        client.put_object(
                            Bucket=BUCKET, Key=f"{run}/net-{step}.safetensors", Body=content(step)[WEIGHTS]
                        )
                    proxy = FaultyProxy(server.endpoint, share=busy / 100, faults=["busy"], seed=number)
                    with proxy.running():
                        code, seconds, said = verify(proxy, run, server.options)
                    asked = len(proxy.asked)
                    print(f"{busy:.0f} % busy: exit {code}, {seconds:.1f} s, {asked} requests, {proxy.counts}")
                    if code:
                        print(said)


if __name__ == "__main__":
    main()

"""Replicating, verifying and restoring over loopback S3, against fsspec's own put and get of the same object.

    python tests/benchmarks/bench_remote.py [--mebibytes 1024] [--rounds 3] [--server radosgw|moto] [--folder DIR]

Each round does everything once, in turn; what counts is the best of each. Replicating reads every byte back from the
store, unless the store's own checksum is to be enough, so it is held against a put, and against a put and a get. Ratios
above 1 are faster than fsspec.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np

from ckptguard.config import Settings
from ckptguard.operations.listing import list_checkpoints
from ckptguard.operations.reconcile import Watch, reconcile
from ckptguard.operations.replicate import replicate
from ckptguard.operations.restore import restore
from ckptguard.operations.verify import verify_checkpoint
from ckptguard.records.run import open_run
from ckptguard.storage.options import use_options

if TYPE_CHECKING:
    from servers.s3 import S3Server

sys.path[:0] = [str(Path(__file__).parent.parent)]

BUCKET, NAME = "ckptguard-bench", "net-1.safetensors"
SERVERS = ("radosgw", "moto")
SETTINGS = Settings(settle=0.0, keep="none", digest="blake3")


def write(path: Path, mebibytes: int) -> None:
    """A safetensors file of some tensors of random numbers."""
    count = 16
    each = mebibytes * 2**20 // count
    places = {
        f"w{n}": {"dtype": "F32", "shape": [each // 4], "data_offsets": [n * each, (n + 1) * each]}
        for n in range(count)
    }
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    chance = np.random.default_rng(1)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(count):
            file.write(chance.standard_normal(each // 4, dtype="<f4").tobytes())


def seconds(act: Callable[[], object]) -> float:
    """How long it took."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def measure(root: Path, server: S3Server, out: Path, best: dict[str, float]) -> None:
    """Everything once, on a server that is new: gateways free what was removed much later. Keeps the best times."""
    server.client().create_bucket(Bucket=BUCKET)
    use_options({f"s3://{BUCKET}": server.options})
    fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, **server.options)

    def note(what: str, act: Callable[[], object]) -> None:
        took = seconds(act)
        best[what] = min(best.get(what, took), took)
        print(f"  {what}: {took:.2f} s", flush=True)

    url = f"s3://{BUCKET}/replica"
    note("put", lambda: fs.put(str(root / NAME), f"{BUCKET}/plain"))
    note("replicate", lambda: replicated(str(root), url))
    note("replicate by checksum", lambda: replicated(str(root), f"{url}-2", replica_verify="checksum"))
    note("get", lambda: fs.get(f"{BUCKET}/plain", str(out / "got")))
    note("verify", lambda: verified(url))
    note("restore", lambda: restore(open_run(url), SETTINGS, str(out / "restored")))


def replicated(root: str, url: str, **settings: str) -> None:
    """Replicate, which must succeed."""
    done = replicate(open_run(root), SETTINGS.changed(**settings), url)
    assert [c.done for c in done.checkpoints] == ["sent"], done


def verified(url: str) -> None:
    """Verify everything there, which must be good."""
    run = open_run(url)
    for checkpoint in list_checkpoints(run):
        assert verify_checkpoint(run, checkpoint, SETTINGS, md5=False).outcome.value == "good"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=SERVERS, default="radosgw")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    from servers.moto_server import moto_server
    from servers.radosgw import radosgw

    serve = radosgw if given.server == "radosgw" else moto_server
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        root = Path(place) / "run"
        root.mkdir()
        write(root / NAME, given.mebibytes)
        reconcile(open_run(str(root)), SETTINGS, Watch())
        for number in range(given.rounds):
            print(f"round {number + 1}", flush=True)
            with tempfile.TemporaryDirectory(dir=place) as folder, serve(Path(folder)) as server:
                measure(root, server, Path(folder), best)
    for what, took in best.items():
        print(f"{what:>22}: {took:6.2f} s, {given.mebibytes / took:7.1f} MiB/s")
    print(f"replicate against put: {best['put'] / best['replicate']:.2f}")
    print(f"replicate by checksum against put: {best['put'] / best['replicate by checksum']:.2f}")
    print(f"replicate against put and get: {(best['put'] + best['get']) / best['replicate']:.2f}")
    print(f"verify against get: {best['get'] / best['verify']:.2f}")
    print(f"restore against get: {best['get'] / best['restore']:.2f}")


if __name__ == "__main__":
    main()

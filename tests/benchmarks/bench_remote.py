"""Replicating, verifying and restoring over loopback S3, against fsspec's own put and get of the same object.

    python tests/benchmarks/bench_remote.py [--mebibytes 1024] [--rounds 3] [--server radosgw|moto] [--folder DIR]

Each round does everything once, in turn; what counts is the best of each. Replicating reads every byte back from the
store, unless the store's own checksum is to be enough, so it is held against a put, and against a put and a get. Ratios
above 1 are faster than fsspec.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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

sys.path[:0] = [str(Path(__file__).parent.parent)]

BUCKET = "ckptguard-bench"
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


def measure(folder: Path, endpoint: dict[str, object], mebibytes: int, rounds: int) -> dict[str, float]:
    """The best time of each."""
    root = folder / "run"
    root.mkdir()
    name = "net-1.safetensors"
    write(root / name, mebibytes)
    reconcile(open_run(str(root)), SETTINGS, Watch())
    fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, **endpoint)
    best: dict[str, float] = {}

    def note(what: str, act: Callable[[], object]) -> None:
        best[what] = min(best.get(what, 1e9), seconds(act))
        print(f"  {what}: {best[what]:.2f} s at best", flush=True)

    for number in range(rounds):
        print(f"round {number + 1}", flush=True)
        url, out = f"s3://{BUCKET}/replica-{number}", folder / "out"
        note("put", lambda number=number: fs.put(str(root / name), f"{BUCKET}/plain-{number}"))
        note("replicate", lambda url=url: replicated(str(root), url))
        note(
            "replicate by checksum",
            lambda number=number: replicated(str(root), f"s3://{BUCKET}/sums-{number}", replica_verify="checksum"),
        )
        note("get", lambda number=number: fs.get(f"{BUCKET}/plain-{number}", str(folder / "got")))
        note("verify", lambda url=url: verified(url))
        note("restore", lambda url=url, out=out: restore(open_run(url), SETTINGS, str(out)))
        (folder / "got").unlink()
        shutil.rmtree(out)
        fs.rm(f"{BUCKET}/plain-{number}")
        fs.rm([url, f"s3://{BUCKET}/sums-{number}"], recursive=True)
    return best


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
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        folder = Path(place)
        (folder / "server").mkdir()
        with serve(folder / "server") as server:
            server.client().create_bucket(Bucket=BUCKET)
            use_options({f"s3://{BUCKET}": server.options})
            best = measure(folder, server.options, given.mebibytes, given.rounds)
    for what, took in best.items():
        print(f"{what:>22}: {took:6.2f} s, {given.mebibytes / took:7.1f} MiB/s")
    print(f"replicate against put: {best['put'] / best['replicate']:.2f}")
    print(f"replicate by checksum against put: {best['put'] / best['replicate by checksum']:.2f}")
    print(f"replicate against put and get: {(best['put'] + best['get']) / best['replicate']:.2f}")
    print(f"verify against get: {best['get'] / best['verify']:.2f}")
    print(f"restore against get: {best['get'] / best['restore']:.2f}")


if __name__ == "__main__":
    main()

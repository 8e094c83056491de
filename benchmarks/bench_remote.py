"""Replicating, verifying and restoring over loopback S3, against fsspec's own put and get of the same files.

    python -m benchmarks.bench_remote [--mebibytes 1024] [--shards 1] [--rounds 3] [--server radosgw|moto]
        [--folder DIR]

Each round does everything once, in turn, on a server of its own; a ratio is that of one round, and what counts is the
median of the rounds. Replicating reads every byte back from the store, unless the store's own checksum is to be enough,
so it is held against a put, and against a put and a get. Ratios above 1 are faster than fsspec.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import fsspec
import numpy as np
from servers.s3 import S3Server

from benchmarks.measuring import BUCKET, options, s3_server, seconds, write_tensors
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import replicate
from ckptguard.runs.run_view import open_view
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.verification.checkpoint import Verification, verify_checkpoint

NAME = "net-1.safetensors"
SETTINGS = Settings(settle=0.0, keep="none", digest="blake3")


def write(folder: Path, mebibytes: int, shards: int) -> None:
    """A safetensors checkpoint of some tensors of random numbers: one file, or shards with their index."""
    if shards == 1:
        write_file(folder / NAME, mebibytes, "w")
        return
    place = folder / "checkpoint-1"
    place.mkdir()
    (place / "config.json").write_text("{}")
    where: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        where |= dict.fromkeys(write_file(place / name, mebibytes // shards, f"{number}."), name)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_file(path: Path, mebibytes: int, prefix: str) -> list[str]:
    """One file; the names of its tensors."""
    numbers, chance = mebibytes * 2**20 // 16 // 4, np.random.default_rng(1)
    names = [f"{prefix}{n}" for n in range(16)]
    blocks = (chance.standard_normal(numbers, dtype="<f4").tobytes() for _ in names)
    write_tensors(path, {name: [numbers] for name in names}, blocks)
    return names


def measure(root: Path, server: S3Server, out: Path, times: dict[str, list[float]]) -> None:
    """Everything once, on a server that is new: gateways free what was removed much later."""
    server.client().create_bucket(Bucket=BUCKET)
    settings = SETTINGS.changed(storage={f"s3://{BUCKET}": server.options})
    fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, **server.options)

    def note(what: str, act: Callable[[], object]) -> None:
        os.sync()  # no writing to the disk is left over from before
        times.setdefault(what, []).append(seconds(act))
        print(f"  {what}: {times[what][-1]:.2f} s", flush=True)

    url = f"s3://{BUCKET}/replica"
    single = (root / NAME).is_file()
    local, plain = str(root / (NAME if single else "checkpoint-1")), f"{BUCKET}/plain"
    note("put", lambda: fs.put(local, plain, recursive=not single))
    note("replicate", lambda: replicated(str(root), url, settings))
    note("get", lambda: fs.get(plain, str(out / "got"), recursive=not single))
    note("verify", lambda: verified(url, settings, md5=False))
    note("verify with MD5", lambda: verified(url, settings, md5=True))
    note("restore", lambda: restore(open_view(url, settings), str(out / "restored")))


def replicated(root: str, url: str, settings: Settings) -> None:
    """Replicate, which must succeed."""
    done = replicate(open_view(root, settings), url)
    assert [c.done for c in done.checkpoints] == ["sent"], done


def verified(url: str, settings: Settings, *, md5: bool) -> None:
    """Verify everything there, which must be good."""
    view = open_view(url, settings.changed(digest="md5") if md5 else settings)
    for checkpoint in view.checkpoints:
        assert verify_checkpoint(view, checkpoint, Verification(md5=md5)).outcome.value == "good"


def main() -> None:
    """Measure and print."""
    given = options(__doc__, mebibytes=1024, shards=1, rounds=3, server=("radosgw", "moto"), folder=Path)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        root = Path(place) / "run"
        root.mkdir()
        write(root, given.mebibytes, given.shards)
        reconcile(open_view(str(root), SETTINGS), PassNotes())
        for number in range(given.rounds):
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}", flush=True)
            with tempfile.TemporaryDirectory(dir=place) as folder, s3_server(given.server, Path(folder)) as server:
                measure(root, server, Path(folder), times)
    for what, took in times.items():
        print(f"{what:>22}: {median(took):6.2f} s, {given.mebibytes / median(took):7.1f} MiB/s")

    def ratio(what: str, *plain: str) -> None:
        rounds = [sum(parts) / took for took, *parts in zip(times[what], *(times[p] for p in plain), strict=True)]
        print(f"{what} against {' and '.join(plain)}: {median(rounds):.2f} ({min(rounds):.2f} to {max(rounds):.2f})")

    ratio("replicate", "put")
    ratio("replicate", "put", "get")
    for what in ("verify", "verify with MD5", "restore"):
        ratio(what, "get")


if __name__ == "__main__":
    main()

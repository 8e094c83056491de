"""Asking for the known-good checkpoint of a run of many: in this process, and from a daemon's socket.

    python -m benchmarks.bench_known_good [--checkpoints 10000] [--files 10] [--runs 200] [--folder DIR]

Prints the median time of each, and how many listings, reads and other questions the storage was asked. `--files`: so
many of the checkpoints, the newest, have files in place; of the others there are the records. The daemon is asked by a
new connection each time, as the training side does, once it has nothing left to do.
"""

from __future__ import annotations

import collections
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from support.daemon_process import DaemonProcess, request, until
from support.records_on_disk import at
from support.tiny_run import name_of, save

from benchmarks.measuring import daemon, median_ms, options
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.run_view import open_view
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.manifest import content_digest, decode_manifest
from ckptguard.values.record_text import encode_checked
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import decode_verdict

CALLS = ("list", "names", "open", "stat", "create", "move", "remove")


def write_run(root: Path, count: int, files: int | None = None) -> None:
    """One checkpoint that is really verified, and its records and files again under the steps before it; `files`: so
    many of them have files, the newest."""
    save(str(root), count, 1)
    reconcile(open_view(str(root), Settings(settle=0.0, keep="none")), PassNotes())
    last = f"{count:012d}.1"
    manifests, ledger = at(root, "_ckptguard/manifests/model-#"), at(root, "_ckptguard/ledger/model-#")
    manifest = decode_manifest((manifests / f"{last}.json").read_bytes())
    verdict = decode_verdict((ledger / f"{last}.0001.good.json").read_bytes())
    for step in range(1, count):
        name = f"{step:012d}.1"
        paths = [file.path.replace(name_of(count), name_of(step)) for file in manifest.files]
        own_files = [msgspec.structs.replace(f, path=p) for f, p in zip(manifest.files, paths, strict=True)]
        if files is None or step > count - files:
            (root / name_of(step)).mkdir()
            for place, (file, path) in enumerate(zip(manifest.files, paths, strict=True)):
                (root / path).write_bytes((root / file.path).read_bytes())
                found = (root / path).stat()
                own_files[place] = msgspec.structs.replace(
                    own_files[place], mtime_ns=found.st_mtime_ns, inode=found.st_ino, ctime_ns=found.st_ctime_ns
                )
        one = msgspec.structs.replace(manifest, path=name_of(step), step=step, files=tuple(own_files))
        (manifests / f"{name}.json").write_bytes(encode_checked(one))
        told = msgspec.structs.replace(verdict, step=step, manifest=content_digest(one.files))
        (ledger / f"{name}.0001.good.json").write_bytes(encode_checked(told))


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """How often the storage is asked what."""
    counts: collections.Counter[str] = collections.Counter()

    def count(name: str) -> Callable[..., object]:
        real = getattr(LocalStorage, name)

        def call(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            if hasattr(LocalStorage, name):
                stack.enter_context(mock.patch.object(LocalStorage, name, count(name)))
        yield counts


def is_done(asked: DaemonProcess) -> bool:
    """Whether the daemon has made its passes, and left nothing pending."""
    (run,) = answer(asked.address, "/v1/runs")["runs"]
    return bool(run["passes"] >= 2 and not run["pending"])


def answer(address: str, path: str) -> Any:
    """The daemon's answer."""
    status, found = request(address, "GET", path)
    assert status == 200, found
    return found


def main() -> None:
    """Measure and print."""
    given = options(__doc__, checkpoints=10_000, files=10, runs=200, folder=Path)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        root = Path(folder) / "run"
        root.mkdir()
        write_run(root, given.checkpoints, given.files)

        def here() -> str:
            return find_known_good(open_run(str(root))).path

        with counted() as counts:
            here()
        print(f"{given.checkpoints} checkpoints, {given.files} in place; the storage is asked: {dict(counts)}")
        cpu = time.process_time()
        taken = median_ms(30, here)
        cpu = (time.process_time() - cpu) / 30 * 1e3
        print(f"in this process: median {taken:.1f} ms, {cpu:.1f} ms of processor time each")
        with tempfile.TemporaryDirectory(prefix="cg-") as short, daemon(Path(short), root) as asked:
            until(lambda: is_done(asked), "the second pass", 3600.0)
            place = asked.address
            question = f"/v1/runs/{open_run(str(root)).run_id}/known-good"

            def there() -> str:
                return str(answer(place, question)["path"])

            print(f"from the daemon: median {median_ms(given.runs, there):.1f} ms")
            waiting = f"{question}?wait_seconds=60"
            print(f"from the daemon, told to wait: median {median_ms(5, lambda: answer(place, waiting)):.1f} ms")
            health = median_ms(given.runs, lambda: answer(place, "/healthz"))
            print(f"from the daemon, `/healthz`: median {health:.2f} ms")
            assert there() == here()


if __name__ == "__main__":
    main()

"""Asking for the known-good checkpoint of a run of many: in this process, and from a daemon's socket.

    python -m benchmarks.bench_known_good [--checkpoints 10000] [--files 10] [--runs 200] [--folder DIR]

Prints the median time of each, and how many listings, reads and other questions the storage was asked. `--files`: so
many of the checkpoints, the newest, have files in place; of the others there are the records. The daemon is asked by a
new connection each time, as the training side does, once it has nothing left to do.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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
    import msgspec
    from support.records_on_disk import at
    from support.tiny_run import name_of, save

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


def median(times: int, act: Callable[[], object]) -> float:
    """Milliseconds."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        act()
        taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken)


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


@contextlib.contextmanager
def daemon(root: Path, folder: Path) -> Iterator[str]:
    """A daemon on the run that has looked at all of it: its socket."""
    place = str(folder / "d.sock")
    path = str(Path(__file__).parent.parent / "daemon")
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "ckptguard_daemon", str(root), "--socket", place]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_done(place):
            assert process.poll() is None, "the daemon ended"
            time.sleep(0.2)
        yield place
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def is_done(place: str) -> bool:
    """Whether the daemon has made its passes, and left nothing pending."""
    try:
        (run,) = ask(place, "/v1/runs")["runs"]
    except OSError:
        return False  # it does not listen yet
    return bool(run["passes"] >= 2 and not run["pending"])


def ask(place: str, path: str) -> dict[str, Any]:
    """The daemon's answer."""
    connection = http.client.HTTPConnection("localhost", timeout=600)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(place)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    assert answer.status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=10000)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder) / "run"
        root.mkdir()
        write_run(root, options.checkpoints, options.files)

        def here() -> str:
            return find_known_good(open_run(str(root))).path

        with counted() as counts:
            here()
        print(f"{options.checkpoints} checkpoints, {options.files} in place; the storage is asked: {dict(counts)}")
        cpu = time.process_time()
        taken = median(30, here)
        cpu = (time.process_time() - cpu) / 30 * 1e3
        print(f"in this process: median {taken:.1f} ms, {cpu:.1f} ms of processor time each")
        with daemon(root, Path(folder)) as place:
            question = f"/v1/runs/{open_run(str(root)).run_id}/known-good"

            def there() -> str:
                return str(ask(place, question)["path"])

            print(f"from the daemon: median {median(options.runs, there):.1f} ms")
            waiting = f"{question}?wait_seconds=60"
            print(f"from the daemon, told to wait: median {median(5, lambda: ask(place, waiting)):.1f} ms")
            print(f"from the daemon, `/healthz`: median {median(options.runs, lambda: ask(place, '/healthz')):.2f} ms")
            assert there() == here()


if __name__ == "__main__":
    main()

"""Runs of tiny checkpoints, local or in memory, written by hand: for campaigns on storage, in processes without torch.

A checkpoint is a folder ``model-<step>`` with one safetensors file and a configuration; what it holds follows from its
seed, so that a test can say what must come back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import fsspec
import msgspec
from blake3 import blake3
from fsspec.implementations.memory import MemoryFile

from ckptguard.errors import ObjectMissingError
from ckptguard.records.pins import counts, list_pins
from ckptguard.records.run import Run, open_run
from ckptguard.runs import settling
from ckptguard.runs.find_known_good import Candidate, known_good_candidates
from ckptguard.runs.work import Work
from ckptguard.scan import Progress, ScanOptions, scan_files
from ckptguard.scan.result import Scan
from ckptguard.storage import Storage
from ckptguard.upkeep.reconcile import PassNotes, PassResult, reconcile
from ckptguard.values.manifest import File
from ckptguard.values.settings import Settings
from support.faults import flip
from support.records_on_disk import at, files_of
from support.tiny_files import CONFIG as CONFIG
from support.tiny_files import WEIGHTS as WEIGHTS
from support.tiny_files import Content
from support.tiny_files import content as content
from support.views import look

TINY = Settings(settle=0.0, scan_interval=1.0, keep="copy", workers=1)
SERIES = "model-#"


def files_of_manifest(path: str, seed: int) -> tuple[File, ...]:
    """What a writer says of its files in a manifest."""
    return tuple(
        File(path=f"{path}/{name}", size=len(data), format="opaque", envelope=blake3(data).hexdigest())
        for name, data in content(seed).items()
    )


def name_of(step: int) -> str:
    """A checkpoint's path in its run."""
    return f"model-{step}"


def save(url: str, step: int, seed: int) -> Content:
    """Save as a trainer does: into fresh files of the final names, whatever lay there."""
    files = content(seed)
    for name, data in files.items():
        if url.startswith("memory://"):
            fsspec.filesystem("memory").pipe_file(f"{memory_path(url)}/{name_of(step)}/{name}", data)
        else:
            path = Path(url, name_of(step), name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f"tmp-{name}").write_bytes(data)
            path.with_name(f"tmp-{name}").replace(path)
    return files


def delete(url: str, step: int) -> None:
    """Rotate a checkpoint away as a trainer does."""
    for name in (WEIGHTS, CONFIG):
        if url.startswith("memory://"):
            fsspec.filesystem("memory").store.pop(f"{memory_path(url)}/{name_of(step)}/{name}", None)
        else:
            Path(url, name_of(step), name).unlink(missing_ok=True)
    if not url.startswith("memory://") and Path(url, name_of(step)).is_dir():
        Path(url, name_of(step)).rmdir()


def rot(url: str, key: str) -> None:
    """Flip a bit of a file's last byte, behind the back of its size and times."""
    if url.startswith("memory://"):
        fsspec.filesystem("memory").store[f"{memory_path(url)}/{key}"].getbuffer()[-1] ^= 0x10
        return
    flip(at(url, key), -1, 0x10)


def poison(path: Path) -> None:
    """NaN in every number of a safetensors file, of the same size, through the same inode."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(b"\xff" * (len(data) - begin))


def truncate(url: str, key: str) -> None:
    """Cut a file in two, as a killed writer leaves it."""
    half = files_below(url, key.rpartition("/")[0])[key.rpartition("/")[2]]
    half = half[: len(half) // 2]
    if url.startswith("memory://"):
        fsspec.filesystem("memory").pipe_file(f"{memory_path(url)}/{key}", half)
    else:
        at(url, key).write_bytes(half)


def files_below(url: str, folder: str) -> Content:
    """What lies below a folder of a run, temporaries of ours too."""
    if url.startswith("memory://"):
        start = f"{memory_path(url)}/{folder}/" if folder else f"{memory_path(url)}/"
        store = fsspec.filesystem("memory").store
        return {path.removeprefix(start): store[path].getvalue() for path in list(store) if path.startswith(start)}
    return files_of(url, folder)


def memory_path(url: str) -> str:
    """Where a memory run lies in its store."""
    return "/" + url.removeprefix("memory://")


def clone(source: str, target: str) -> None:
    """A run again under another URL, with the times of its files; locally with their inodes: as hard links."""
    if source.startswith("memory://"):
        store = fsspec.filesystem("memory").store
        for path in [p for p in store if p.startswith(memory_path(source) + "/")]:
            old, place = store[path], memory_path(target) + path.removeprefix(memory_path(source))
            store[place] = MemoryFile(fsspec.filesystem("memory"), place, old.getvalue())
            store[place].created = store[place].modified = old.created
        return
    for folder, _, names in os.walk(source):
        place = Path(target, os.path.relpath(folder, source))
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.link(Path(folder, name), place / name)


def forget(url: str) -> None:
    """Free a memory run."""
    store = fsspec.filesystem("memory").store
    for path in [p for p in store if p.startswith(memory_path(url) + "/")]:
        del store[path]


def inline(
    storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
) -> Scan:
    """A scanner that works in its caller's thread, so that a count of operations is always the same."""
    return scan_files(storage, keys, msgspec.structs.replace(options or ScanOptions(), workers=1), progress)


def cycle(run: Run, settings: Settings = TINY) -> PassResult:
    """One pass as a daemon makes it at its start, an hour later: whatever was left behind is old by now."""
    with mock.patch.object(settling, "OLD", -1.0):
        return reconcile(look(run, settings), PassNotes(), work=Work(scanner=inline), assume_quiet=True)


def candidates(run: Run) -> list[Candidate]:
    """All that may be called known-good, best first."""
    return list(known_good_candidates(look(run)))


def leftovers(run: Run) -> list[str]:
    """What lies in a run and its records that no record speaks of and no trainer wrote."""
    try:
        inside = {e.key for e in run.records.list("", recursive=True)}
    except ObjectMissingError:
        inside = set()
    left = [key for key in inside if "/.tmp-" in f"/{key}"]
    for key in inside:
        top, _, rest = key.partition("/")
        series, _, below = rest.partition("/")
        if top in ("kept", "trash") and not below.endswith((".json", ".taken")):
            own = f"{top}/{series}/{below.partition('/')[0]}"
            left += [] if {f"{own}.json", f"{own}.damaged.json"} & inside else [key]
    left += [e.key for e in run.storage.list("") if e.name.startswith(("tmp-rollback-", "tmp-repair-", ".tmp-"))]
    return sorted({*left, *(pin.key for pin in list_pins(run) if not counts(run, pin))})


def opened(url: str) -> Run:
    """The run."""
    return open_run(url)

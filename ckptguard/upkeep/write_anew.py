"""Write files of a checkpoint anew without what thinning takes from them. The old ones are only read.

What is written waits in the records, on the same file system, and lasts before it is read back. Each file keeps its
mode, its owner and its time: trainers look for the newest file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence

import msgspec

from ckptguard.errors import StoppedError, StorageFullError
from ckptguard.formats.structure import ReadProblem
from ckptguard.formats.table import is_dcp_metadata
from ckptguard.formats.zip.fewer_records import Part
from ckptguard.keep.room import measure
from ckptguard.layouts.thinning import Anew, Split
from ckptguard.runs.free_space import SHARED
from ckptguard.runs.publish import Place, staging
from ckptguard.runs.removal import remove_temporary
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.storage import Storage
from ckptguard.storage.local.writes import give_owner_and_mode, shown_as_written, swap_files
from ckptguard.storage.protocol import Reader
from ckptguard.values.temporary_names import RECORD

_TRIAL = ("one", "other")


@contextlib.contextmanager
def written_anew(view: RunView, split: Split, work: Work) -> Iterator[tuple[Place | None, Split]]:
    """Yield the place of the files that are written anew, None if there are none, and the split, to which files are
    added that lose no tensor. What is left there goes at the end.

    Raises ReadProblem if one cannot be written anew surely, and StorageFullError if there is too little room.
    """
    if not split.anew:
        yield None, split
        return
    run, contents, room = view.run, _contents(view.run.storage, split), measure(view)
    split = _with_all(split, contents)
    size = sum(one.file.size - one.bytes for one in split.anew)
    if room.free is not None and room.free < size + room.needed:
        raise StorageFullError(f"{size} bytes more would take the room of the next saves", key="")
    pace = Pace(work.rate, lambda: _stop(work))
    with staging(run.records, RECORD) as staged, SHARED.copying(room.file_system, size):
        _try_to_exchange(staged.place)
        with shown_as_written(run.records.path_of(staged.place.key(""))):
            for path, parts in contents.items():
                if parts:
                    _write(run.storage, staged.place, path, parts, pace)
            yield staged.place, split


def _stop(work: Work) -> None:
    if work.is_stopped():
        raise StoppedError("it was stopped", key="")


def _try_to_exchange(place: Place) -> None:
    """Raise ReadProblem if the file system cannot exchange two files in one step."""
    for name in _TRIAL:
        place.storage.create(place.key(name), b"")
    if place.storage.root is None or not swap_files(place.storage.root, *map(place.key, _TRIAL)):
        raise ReadProblem("the file system cannot exchange two files in one step")
    for name in _TRIAL:
        remove_temporary(place.storage, place.key(name))


def _contents(storage: Storage, split: Split) -> dict[str, list[Part]]:
    """Return what each file will hold, by its path."""
    from ckptguard.formats.without_entries import archive_without, distributed_without

    found: dict[str, list[Part]] = {}
    for one in split.anew:
        if is_dcp_metadata(one.file.path):
            folder, _, name = one.file.path.rpartition("/")
            every = (*split.takes, *split.stays)
            beside = {f.path.removeprefix(f"{folder}/"): f.size for f in every if f.format == "distcp"}
            if name != ".metadata":
                raise ReadProblem("each rank has metadata of its own")
            with storage.open(one.file.path) as reader:
                files = distributed_without(reader.read(0, one.file.size), one.places, beside)
            found |= {f"{folder}/{inside}": parts for inside, parts in files.items()}
        elif one.file.format == "torch_zip":
            with storage.open(one.file.path) as reader:
                found[one.file.path] = archive_without(reader, one.places)
    return found


def _with_all(split: Split, contents: Collection[str]) -> Split:
    """Add what only metadata tells: files with values of an optimizer that are no tensors, or with nothing else."""
    places = {one.file.path.rpartition("/")[0]: one.places for one in split.anew}
    known = {one.file.path for one in split.anew}
    more = {file.path: file for file in split.stays if file.path in contents and file.path not in known}
    return msgspec.structs.replace(
        split,
        stays=tuple(file for file in split.stays if file.path not in more),
        anew=(*split.anew, *(Anew(f, places[path.rpartition("/")[0]], f.tensors) for path, f in more.items())),
    )


def _write(storage: Storage, staged: Place, path: str, parts: Sequence[Part], pace: Pace) -> None:
    """Write one file, in bounded memory. Who cannot read the old one cannot read this one at any moment."""
    old, key = os.stat(storage.path_of(path)), staged.key(path)
    staged.storage.create(key, b"")
    _make_like(staged.storage.path_of(key), old)
    with storage.open(path) as reader, staged.storage.upload(key, replace=True) as upload:
        for part in parts:
            if isinstance(part, bytes):
                upload.write(part)
                continue
            for block in _blocks(reader, *part, pace):
                upload.write(block)
        reader.check_unchanged()
        upload.commit()
    _make_like(staged.storage.path_of(key), old)


def _make_like(path: str, old: os.stat_result) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        give_owner_and_mode(descriptor, old)
        os.utime(descriptor, ns=(old.st_atime_ns, old.st_mtime_ns))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _blocks(reader: Reader, offset: int, length: int, pace: Pace) -> Iterator[bytes]:
    # Imported here, because it imports BLAKE3, which a daemon that writes nothing does not need.
    from ckptguard.scan.thread_buffers import BLOCK

    for begin in range(offset, offset + length, BLOCK):
        size = min(BLOCK, offset + length - begin)
        pace.before()
        yield reader.read(begin, size)
        reader.done_with(begin, size)
        pace.passed(size)

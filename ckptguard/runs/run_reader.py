"""Read what the records say about each checkpoint, and remember it, so that the next look reads only what is new.

What is remembered is only a cache. It counts for a checkpoint while every record of it is listed as it was: same name,
size, time, and inode or tag. The names are always listed. Without a memory everything is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ckptguard.decisions.known_good import series_head_of, updates_in
from ckptguard.layouts.rank_names import ranks_named
from ckptguard.records.who_and_when import saved_at, seconds_of
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.history import History
from ckptguard.runs.sealed_content import JudgedAs, SealedAs, sealed_outcome, seen_when_sealed
from ckptguard.storage.local.writes import replace_file
from ckptguard.storage.protocol import Entry
from ckptguard.storage.runtime_folder import private_runtime_folder, read_private
from ckptguard.values.ids import CheckpointId, Step, escape
from ckptguard.values.manifest import Seen, bytes_digest
from ckptguard.values.record_text import decodable
from ckptguard.values.run_rows import LONGEST_TEXT, Generation
from ckptguard.values.verdict import Outcome, heaviest_words
from ckptguard.version import __version__

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView

_COARSE = 5.0  # seconds: more than the time resolution of any file system
_LARGEST = 16 << 20  # bytes of one run's memo: about 100,000 checkpoints
_MOST_RUNS = 64
_MOST_ROWS = 50_000  # of one run
_LARGEST_NUMBER = 2**63 - 1  # that a row holds
_PREFIX, _SUFFIX = "states-", ".memo"


class ReadRecords(msgspec.Struct, frozen=True, array_like=True):
    """What the records say about one checkpoint. `stamp` identifies its source records.

    `sealed` is None if no manifest can be read, `judged` if there is no verdict. Without `has_files` the files were
    left out.
    """

    series: str
    step: Step
    generation: int
    stamp: bytes
    sealed: SealedAs | None
    judged: JudgedAs | None
    has_files: bool

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return CheckpointId(self.series, self.step, self.generation)


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: str
    run: str
    rows: tuple[ReadRecords, ...]


class RunMemory:
    """What the records of one run said, in memory. Any thread may use it, and any number of readers. Between two looks
    it can be packed: a run may have very many checkpoints, and a process very many runs.

    With a `path` it begins with what this private file has of the run with this name, and `pack` writes what changed.
    A file that is damaged, of another owner or version is ignored. If none can be written, none is.
    """

    def __init__(self, path: str = "", name: str = "") -> None:
        self._lock = threading.Lock()
        self._path, self._name = path, name
        self._unpacked: dict[CheckpointId, ReadRecords] | None = None
        self._packed = b""  # of the same rows; empty: not yet
        self._changed = False  # since they were written

    def row(self, id: CheckpointId, stamp: bytes) -> ReadRecords | None:
        """Return the row of a checkpoint, if it came from the records with this stamp."""
        with self._lock:
            row = self._rows().get(id)
        return row if row is not None and row.stamp == stamp else None

    def put(self, row: ReadRecords) -> None:
        """Remember what the records say about a checkpoint."""
        with self._lock:
            rows = self._rows(will_change=True)
            rows.pop(row.id, None)
            rows[row.id] = row
            if len(rows) > _MOST_ROWS:
                del rows[next(iter(rows))]

    def keep_only(self, ids: Collection[CheckpointId]) -> None:
        """Forget all other checkpoints."""
        with self._lock:
            others = [id for id in self._rows() if id not in ids]
            rows = self._rows(will_change=bool(others))
            for id in others:
                del rows[id]

    def pack(self) -> bool:
        """Keep the rows packed until one is needed. True if they were written into the file."""
        packed, writes = b"", False
        with self._lock, contextlib.suppress(ValueError, OverflowError):  # not Unicode; sizes that add up to too much
            if self._unpacked is not None and not self._packed:
                stored = _Stored(__version__, self._name, tuple(self._unpacked.values()))
                self._packed = zlib.compress(msgspec.msgpack.encode(stored), 1)
            self._unpacked = None
            packed, writes = self._packed, self._changed and bool(self._path) and len(self._packed) <= _LARGEST
            self._changed = False
        if writes:  # nothing is locked meanwhile: the folder may hang
            with contextlib.suppress(OSError):
                replace_file(self._path, packed)
                return True
        return False

    def _rows(self, *, will_change: bool = False) -> dict[CheckpointId, ReadRecords]:
        if self._unpacked is None:
            self._packed = self._packed or (read_private(self._path, _LARGEST) if self._path else None) or b""
            self._unpacked = {row.id: row for row in _rows_in(self._packed, self._name)}
        if will_change:
            self._changed, self._packed = True, b""
        return self._unpacked


def _rows_in(packed: bytes, name: str) -> tuple[ReadRecords, ...]:
    try:
        stored = msgspec.msgpack.decode(zlib.decompress(packed), type=decodable(_Stored))
    except (ValueError, zlib.error):  # msgspec's errors are ValueErrors
        return ()
    return stored.rows if (stored.version, stored.run) == (__version__, name) else ()


@contextlib.contextmanager
def remembered(view: RunView) -> Iterator[RunReader]:
    """Yield the view's reader. A view without a memory gets that of this user's file, which is saved at the end."""
    if view.memory is not None:
        yield view.reader
        return
    # The run without its URL, which may hold a password.
    name = hashlib.sha256(view.run.url.encode("utf-8", "surrogateescape")).hexdigest()
    path = ""
    with contextlib.suppress(OSError):
        path = os.path.join(private_runtime_folder(os.environ), f"{_PREFIX}{name[:32]}{_SUFFIX}")
    memory = RunMemory(path, name)
    yield RunReader(view.history, memory)
    if memory.pack():
        with contextlib.suppress(OSError):
            _forget_old(os.path.dirname(path))


def _forget_old(folder: str) -> None:
    """Keep only the memos that were written last."""
    with os.scandir(folder) as entries:
        own = [e for e in entries if e.name.startswith(_PREFIX) and e.name.endswith((_SUFFIX, ".tmp"))]
        ages = sorted(((e.stat(follow_symlinks=False).st_mtime_ns, e.path) for e in own), reverse=True)
    for _, path in ages[_MOST_RUNS:]:
        with contextlib.suppress(OSError):
            os.unlink(path)


class RunReader:
    """What the records of a run say about its checkpoints, with as few reads as possible.

    The history listed the records first, so what is read later is at least as new as the stamp in the memory. A record
    that the history knows by its name alone is read, and not remembered.
    """

    def __init__(self, history: History, memory: RunMemory) -> None:
        self.history, self._memory = history, memory
        self._rows: dict[CheckpointId, tuple[list[str], ReadRecords]] = {}

    def sealed(self, id: CheckpointId, *, files: bool = False) -> SealedAs | None:
        """Return what its manifest says, with the files only on request; None if it cannot be read."""
        return self._row(id, files=files).sealed

    def sealed_path(self, id: CheckpointId) -> str | None:
        """Return the path that it was sealed for; None if its manifest cannot be read."""
        sealed = self.sealed(id)
        return sealed.path if sealed is not None else None

    def judged(self, id: CheckpointId, *, files: bool = False) -> JudgedAs | None:
        """Return what the verdict that counts says, with what it saw only on request; None if there is none."""
        return self._row(id, files=files).judged

    def row(self, id: CheckpointId) -> Generation:
        """Return what the records say of a checkpoint, without where its bytes are."""
        sealed, judged = self.sealed(id), self.judged(id)
        ranks = None if judged is None else judged.world_size
        if ranks is None and sealed is not None:
            ranks = sealed.ranks
        return Generation(
            name=id.record_path,
            path=None if sealed is None else escape(sealed.path),
            outcome=(Outcome.PENDING if judged is None else judged.outcome).value,
            verdict="" if judged is None else f"{judged.number:04d}.{judged.outcome.value}",
            good=judged is not None and sealed_outcome(judged) is Outcome.GOOD,
            bytes=None if sealed is None else stored(sealed.bytes),
            saved_at=None if sealed is None else sealed.saved_at,
            updates=None if sealed is None else stored(updates_in(sealed.series_head.counters)),
            judged_at=None if judged is None else seconds_of(judged.checked_at),
            reason="" if judged is None else escape(judged.reason)[:LONGEST_TEXT],
            world_size=stored(ranks),
            md5="sealed" if sealed is not None and sealed.has_md5 else "",
            content="" if sealed is None else sealed.content,
            thinned=sealed is not None and bool(sealed.thinned),
        )

    def has_changed(self, id: CheckpointId, entries: Sequence[Entry]) -> bool:
        """True if there is a verdict on what was sealed under this id, but about other files than these."""
        row = self._row(id, files=False)
        if row.sealed is None or row.judged is None:
            return False
        if not row.has_files:
            now = _digest((e.key, *e.signature) for e in entries)
            if now == (row.judged.looked or row.sealed.looked):
                return False
            row = self._row(id, files=True)
        if row.sealed is None or row.judged is None:
            return False
        return not looks_as_read(entries, row.sealed, row.judged)

    def forget_others(self) -> None:
        """Make the memory forget what was not asked for."""
        self._memory.keep_only(self._rows.keys())

    def _row(self, id: CheckpointId, *, files: bool) -> ReadRecords:
        keys = self.history.keys(id)
        known, row = self._rows.get(id, ([], None))
        if row is not None and known == keys and (row.has_files or not files):
            return row
        stamp = self._stamp(keys)
        row = self._memory.row(id, stamp) if stamp is not None else None
        if row is None or (files and not row.has_files):
            row = self._read(id, stamp or b"", files)
            if stamp is not None:
                self._memory.put(row)
        self._rows[id] = keys, row
        return row

    def _read(self, id: CheckpointId, stamp: bytes, files: bool) -> ReadRecords:
        history, sealed, judged = self.history, None, None
        manifest = history.manifest(id) if history.is_sealed(id) else None
        if manifest is not None:
            found = tuple(seen_when_sealed(manifest))
            sealed = SealedAs(
                manifest.path,
                manifest.layout,
                manifest.bytes,
                found if files else (),
                _digest(found),
                series_head_of(manifest),
                manifest.metrics,
                saved_at(manifest),
                bytes_digest(manifest.files),
                ranks_named(f.path for f in manifest.files),
                all(f.md5 for f in manifest.files),
                manifest.thinned,
            )
        number, verdict = history.judged(id)
        if verdict is not None:
            judged = JudgedAs(
                number,
                verdict.outcome,
                verdict.checked_at,
                verdict.place_damaged,
                verdict.content,
                heaviest_words(verdict.findings),
                verdict.seen if files else (),
                _digest(verdict.seen) if verdict.seen else b"",
                verdict.facts.world_size,
            )
        history.forget(id)  # a manifest may be large, and there may be many
        return ReadRecords(id.series, id.step, id.generation, stamp, sealed, judged, files or manifest is None)

    def _stamp(self, keys: Sequence[str]) -> bytes | None:
        """Return the stamp of a checkpoint's records, or None if they cannot be identified."""
        found = [self.history.listed.get(key) for key in keys]
        if not found or not all(entry is not None and _is_distinguished(entry) for entry in found):
            return None
        return _digest((entry.key, *entry.signature) for entry in found if entry is not None)


def stored(number: int | None) -> int | None:
    """Return the number, or the nearest one that a catalogue can hold."""
    return None if number is None else max(-_LARGEST_NUMBER, min(number, _LARGEST_NUMBER))


def _digest(signatures: Iterable[Seen]) -> bytes:
    """Return a digest of the signatures of some files."""
    return hashlib.blake2b(repr(sorted(signatures)).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _is_distinguished(entry: Entry) -> bool:
    """True if storage would report a new record with the same name differently."""
    if entry.etag or entry.inode is not None:
        return True
    if entry.mtime_ns is None:
        return False
    # With whole-second times (SFTP), only for a record older than that.
    return entry.mtime_ns % 1_000_000_000 != 0 or time.time() - entry.mtime_ns / 1e9 > _COARSE

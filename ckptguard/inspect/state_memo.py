"""Remember what the records said about each checkpoint, so that the next survey reads only what is new.

A memo is only a cache. Its row for a checkpoint counts while every source record is unchanged: same name, size, time,
and inode or tag. Without a memo everything is read. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from ckptguard.decisions.known_good import Standpoint, parse_verdict_name
from ckptguard.errors import ObjectMissingError, RecordsError
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.ledger import is_about, latest_verdict
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import read_manifest, sealed_id
from ckptguard.records.run import Run
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.find_known_good import standpoint_of
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import Seen
from ckptguard.storage.protocol import Entry
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.values.ids import CheckpointId, Step, series_from_folder
from ckptguard.values.record_text import decodable
from ckptguard.values.verdict import Outcome, Severity, Verdict
from ckptguard.version import __version__

_COARSE = 5.0  # seconds: more than the time resolution of any file system
_LARGEST = 16 << 20  # bytes of one run's memo: about 100,000 checkpoints
_MOST_RUNS = 64
_PREFIX, _SUFFIX = "states-", ".memo"
Digest = bytes


class RememberedFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What storage said about a file when it was sealed."""

    path: str
    size: int
    mtime_ns: int | None
    inode: int | None
    etag: str | None


class SealedAs(msgspec.Struct, frozen=True, array_like=True):
    """The part of a manifest that says what was sealed and where. No digests: nothing is verified with it.

    If the file signatures were left out, `looked` is their digest.
    """

    path: str
    layout: str
    bytes: int
    files: tuple[RememberedFile, ...]
    looked: Digest
    standpoint: Standpoint


class JudgedAs(msgspec.Struct, frozen=True, array_like=True):
    """The part of a verdict that a listing shows, and the signatures that it saw, or with `looked` their digest."""

    outcome: Outcome
    checked_at: str
    place_damaged: bool
    content: Outcome | None
    reason: str
    seen: tuple[Seen, ...]
    looked: Digest


class MemoRow(msgspec.Struct, frozen=True, array_like=True):
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
    rows: tuple[MemoRow, ...]


class StateMemo:
    """The rows of one run, in memory. Any thread may use it."""

    def __init__(self, rows: Collection[MemoRow] = ()) -> None:
        self._lock = threading.Lock()
        self._rows = {row.id: row for row in rows}
        self._changed = False

    def row(self, id: CheckpointId, stamp: bytes) -> MemoRow | None:
        """Return the row of a checkpoint, if it came from the records with this stamp."""
        with self._lock:
            row = self._rows.get(id)
        return row if row is not None and row.stamp == stamp else None

    def put(self, row: MemoRow) -> None:
        """Remember what the records say about a checkpoint."""
        with self._lock:
            self._rows[row.id] = row
            self._changed = True

    def keep_only(self, ids: Collection[CheckpointId]) -> None:
        """Forget all other checkpoints."""
        with self._lock:
            for id in [id for id in self._rows if id not in ids]:
                del self._rows[id]
                self._changed = True

    def news(self) -> tuple[MemoRow, ...] | None:
        """Return all rows if any changed since this was made, else None."""
        with self._lock:
            return tuple(self._rows.values()) if self._changed else None


@contextlib.contextmanager
def remembered(run: Run, memo: StateMemo | None = None) -> Iterator[StateMemo]:
    """Yield this memo of a run, else the one from this user's file, and save what is new at the end.

    A damaged file, one of another owner or version is ignored. If none can be written, none is.
    """
    if memo is not None:
        yield memo
        return
    # The run without its URL, which may hold a password.
    name = hashlib.sha256(run.url.encode("utf-8", "surrogateescape")).hexdigest()
    path = ""
    with contextlib.suppress(OSError):
        path = os.path.join(private_runtime_folder(os.environ), f"{_PREFIX}{name[:32]}{_SUFFIX}")
    memo = StateMemo(_load(path, name))
    yield memo
    rows = memo.news()
    if path and rows is not None:
        _save(path, _Stored(__version__, name, rows))


def _load(path: str, name: str) -> tuple[MemoRow, ...]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size > _LARGEST:
                return ()
            stored = msgspec.msgpack.decode(file.read(_LARGEST + 1), type=decodable(_Stored))
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return ()
    return stored.rows if (stored.version, stored.run) == (__version__, name) else ()


def _save(path: str, stored: _Stored) -> None:
    """Replace the file. Other readers see the old one or the new one. It is a cache, so nothing is synced."""
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        text = msgspec.msgpack.encode(stored)
        if len(text) > _LARGEST:
            return
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(text)
        os.replace(temporary, path)
        _forget_old(os.path.dirname(path))
    except (OSError, ValueError):  # no space, or a name that is not Unicode
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _forget_old(folder: str) -> None:
    """Keep only the memos that were written last."""
    with os.scandir(folder) as entries:
        own = [e for e in entries if e.name.startswith(_PREFIX) and e.name.endswith((_SUFFIX, ".tmp"))]
        ages = sorted(((e.stat(follow_symlinks=False).st_mtime_ns, e.path) for e in own), reverse=True)
    for _, path in ages[_MOST_RUNS:]:
        with contextlib.suppress(OSError):
            os.unlink(path)


class Glance:
    """What the records of a run say about its checkpoints, with as few reads as possible.

    The records are listed first, so what is read later is at least as new as the stamp in the memo. If the listing and
    the view's history differ, the memo is not used.
    """

    def __init__(self, view: RunView, memo: StateMemo) -> None:
        self._memo, self._run = memo, view.run
        self._entries = _listed(view.run)
        self._history = view.history
        self._rows: dict[CheckpointId, MemoRow] = {}

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
        """Make the memo forget what this glance did not use."""
        self._memo.keep_only(self._rows.keys())

    def _row(self, id: CheckpointId, *, files: bool) -> MemoRow:
        row = self._rows.get(id)
        if row is not None and (row.has_files or not files):
            return row
        stamp = self._stamp(id)
        row = self._memo.row(id, stamp) if stamp is not None else None
        if row is None or (files and not row.has_files):
            row = self._read(id, stamp or b"", files)
            if stamp is not None:
                self._memo.put(row)
        self._rows[id] = row
        return row

    def _read(self, id: CheckpointId, stamp: bytes, files: bool) -> MemoRow:
        # From storage, because the history's memory may be older than the stamp.
        manifest, sealed, judged = None, None, None
        is_sealed = self._history.is_sealed(id)
        if is_sealed:
            with contextlib.suppress(RecordsError):
                manifest = read_manifest(self._run, id)
        if manifest is not None:
            found = tuple((f.path, f.size, f.mtime_ns, f.inode, f.etag) for f in manifest.files)
            remembered_files = tuple(RememberedFile(*one) for one in found if files)
            place, looked = (manifest.path, manifest.layout, manifest.bytes), _digest(found)
            sealed = SealedAs(*place, remembered_files, looked, standpoint_of(manifest))
        verdict = latest_verdict(
            self._run, id, self._names_of(id), partial(is_about, manifest=manifest, sealed=is_sealed)
        )
        if verdict is not None:
            judged = JudgedAs(
                verdict.outcome,
                verdict.checked_at,
                verdict.place_damaged,
                verdict.content,
                _heaviest_reason(verdict),
                verdict.seen if files else (),
                _digest(verdict.seen) if verdict.seen else b"",
            )
        return MemoRow(id.series, id.step, id.generation, stamp, sealed, judged, files or manifest is None)

    def _stamp(self, id: CheckpointId) -> bytes | None:
        """Return the stamp of a checkpoint's records, or None if they cannot be identified."""
        listed = self._entries.get(id, {})
        names = {f"{LEDGER}/{name}" for name in self._names_of(id)}
        if self._history.is_sealed(id):
            names.add(MANIFESTS)
        if not names or names != listed.keys() or not all(map(_is_told_apart, listed.values())):
            return None
        return _digest((name, *entry.signature) for name, entry in listed.items())

    def _names_of(self, id: CheckpointId) -> list[str]:
        return self._history.entries(id)


def _digest(signatures: Iterable[Seen]) -> bytes:
    """Return a digest of the signatures of some files."""
    return hashlib.blake2b(repr(sorted(signatures)).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _heaviest_reason(verdict: Verdict) -> str:
    """Return the message of the heaviest finding, with its subject; "" if there is none."""
    order = (Severity.ERROR, Severity.SICKNESS, Severity.WARNING)
    weighty = [f for f in verdict.findings if f.severity in order]
    if not weighty:
        return ""
    heaviest = min(weighty, key=lambda f: order.index(f.severity))
    about = heaviest.tensor or heaviest.file
    return f"{about}: {heaviest.message}" if about else heaviest.message


def _is_told_apart(entry: Entry) -> bool:
    """True if storage would report a new record with the same name differently."""
    if entry.etag or entry.inode is not None:
        return True
    if entry.mtime_ns is None:
        return False
    # With whole-second times (SFTP), only for a record older than that.
    return entry.mtime_ns % 1_000_000_000 != 0 or time.time() - entry.mtime_ns / 1e9 > _COARSE


def _listed(run: Run) -> dict[CheckpointId, dict[str, Entry]]:
    """Return the records of each checkpoint: ledger entries with content by name, and the manifest."""
    found: dict[CheckpointId, dict[str, Entry]] = {}
    for series, name, entry in _records(run, LEDGER):
        standing = parse_verdict_name(series, name) if entry.size else None
        if standing is not None:
            found.setdefault(standing.id, {})[f"{LEDGER}/{name}"] = entry
    for series, name, entry in _records(run, MANIFESTS):
        id = sealed_id(series, name)
        if id is not None:
            found.setdefault(id, {})[MANIFESTS] = entry
    return found


def _records(run: Run, top: str) -> Iterator[tuple[str, str, Entry]]:
    try:
        entries = run.records.list(top, recursive=True)
    except ObjectMissingError:
        return
    for entry in entries:
        _, _, rest = entry.key.partition("/")
        folder, _, name = rest.partition("/")
        if entry.kind == "file" and name:
            yield series_from_folder(folder), name, entry

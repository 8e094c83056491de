"""What the records said of each checkpoint when they were read last, so that the next look reads only what is new.

A memo is never a truth. What it says of a checkpoint counts only while every record that it came from is unchanged: the
same name, size, time, and inode or tag. Without a memo everything is read. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import uuid
from collections.abc import Collection, Iterator

import msgspec

from ckptguard.records.run import Run
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.version import __version__

_LARGEST = 16 << 20  # bytes of one run's memo: some 100,000 checkpoints
_MOST_RUNS = 64
_PREFIX, _SUFFIX = "states-", ".memo"


class RememberedFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What storage said of a file when it was sealed."""

    path: str
    size: int
    mtime_ns: int | None
    inode: int | None
    etag: str | None


class SealedAs(msgspec.Struct, frozen=True, array_like=True):
    """As much of a manifest as tells what was sealed and where. No digests: nothing is ever verified with it."""

    path: str
    layout: str
    bytes: int
    files: tuple[RememberedFile, ...]


class JudgedAs(msgspec.Struct, frozen=True, array_like=True):
    """As much of a verdict as people are shown in one line."""

    outcome: Outcome
    checked_at: str
    place_damaged: bool
    content: Outcome | None
    reason: str


class MemoRow(msgspec.Struct, frozen=True, array_like=True):
    """What the records say of one checkpoint. `stamp` is of the records that it came from. `sealed` is None where no
    manifest can be read, `judged` where there is no verdict. Without `has_files` the files were left out."""

    series: str
    step: int | None
    generation: int
    stamp: bytes
    sealed: SealedAs | None
    judged: JudgedAs | None
    has_files: bool

    @property
    def id(self) -> CheckpointId:
        """Which checkpoint it is about."""
        return CheckpointId(self.series, self.step, self.generation)


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: str
    run: str
    rows: tuple[MemoRow, ...]


class StateMemo:
    """The rows of one run, in memory. Safe from any thread."""

    def __init__(self, rows: Collection[MemoRow] = ()) -> None:
        self._lock = threading.Lock()
        self._rows = {row.id: row for row in rows}
        self._changed = False

    def row(self, id: CheckpointId, stamp: bytes) -> MemoRow | None:
        """What is remembered of a checkpoint, if it came from the records that have this stamp."""
        with self._lock:
            row = self._rows.get(id)
        return row if row is not None and row.stamp == stamp else None

    def put(self, row: MemoRow) -> None:
        """Remember what the records say of a checkpoint."""
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
        """All rows, if any changed since this was made; else None."""
        with self._lock:
            return tuple(self._rows.values()) if self._changed else None


@contextlib.contextmanager
def remembered(run: Run) -> Iterator[StateMemo]:
    """The memo of a run from this user's file of it. What was learned is written there at the end of the block.

    A file that is damaged, not ours or of another version is none. Where none can be written, none is.
    """
    path = _path(run)
    memo = StateMemo(_load(path, run) if path is not None else ())
    yield memo
    rows = memo.news()
    if path is not None and rows is not None:
        _save(path, _Stored(__version__, _name_of(run), rows))


def _name_of(run: Run) -> str:
    """The run without its URL, which may hold a password."""
    return hashlib.sha256(run.url.encode("utf-8", "surrogateescape")).hexdigest()


def _path(run: Run) -> str | None:
    try:
        return os.path.join(private_runtime_folder(os.environ), f"{_PREFIX}{_name_of(run)[:32]}{_SUFFIX}")
    except OSError:
        return None


def _load(path: str, run: Run) -> tuple[MemoRow, ...]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size > _LARGEST:
                return ()
            stored = msgspec.msgpack.decode(file.read(_LARGEST + 1), type=_Stored)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return ()
    ours = stored.version == __version__ and stored.run == _name_of(run)
    return stored.rows if ours else ()


def _save(path: str, stored: _Stored) -> None:
    """Replace the file; other readers see the old one or the new one. It is a cache, so nothing is synced."""
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
    except (OSError, ValueError):  # no room, or a name that is no Unicode
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _forget_old(folder: str) -> None:
    """Of many runs the memos that were written last are kept."""
    with os.scandir(folder) as entries:
        own = [e for e in entries if e.name.startswith(_PREFIX) and e.name.endswith((_SUFFIX, ".tmp"))]
        ages = sorted(((e.stat(follow_symlinks=False).st_mtime_ns, e.path) for e in own), reverse=True)
    for _, path in ages[_MOST_RUNS:]:
        with contextlib.suppress(OSError):
            os.unlink(path)

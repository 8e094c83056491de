"""Find files in a run that may be training state and that nothing verifies, because no format of ours explains them.

A file with an unknown name is known by its first bytes. They are read once for each size and time. On an object store
that is a request, so of a few files only: the others are named as not understood.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import msgspec

from ckptguard.errors import ObjectMissingError, StorageError
from ckptguard.formats.table import (
    FIRST_BYTES,
    begins_like_folder,
    begins_like_no_state,
    format_of,
    is_pickle_name,
    may_hold_state,
    promises_state,
    suffixes_of,
)
from ckptguard.records.run import Run
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import escape, is_temporary
from ckptguard.values.patterns import is_ignored

SMALLEST = 1024  # bytes; what is smaller is no training state
_MOST_READ = 5000  # files of one listing whose first bytes are read; of more only the names are known
_MOST_REQUESTS = 64  # the same on an object store
_MOST_NAMED = 20
_REMEMBERED = 100_000  # files
WHAT_TO_DO = (
    "name them in [[patterns]] with a list of checksums or ckptguard.seal, or with ignore = true if they are no state"
)


class NotUnderstood(msgspec.Struct, frozen=True):
    """How many files of a run may be state that nothing verifies, their size, and the paths of the first."""

    files: int
    bytes: int
    paths: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What people are told."""
        names = ", ".join(map(escape, self.paths[:3])) + (f" and {self.files - 3} more" if self.files > 3 else "")
        what = "1 file is" if self.files == 1 else f"{self.files} files are"
        return f"{what} not understood, so nothing verifies what may be training state: {names}"

    @property
    def notes(self) -> tuple[str, str]:
        """The sentence, and what to do."""
        return self.sentence, WHAT_TO_DO


def find_not_understood(run: Run, files: Iterable[Entry]) -> NotUnderstood | None:
    """Return which of the files that belong to no checkpoint may be state, or None."""
    found = [e for e, head in _candidates(run, files) if head is None or not begins_like_no_state(head)]
    if not found:
        return None
    return NotUnderstood(len(found), sum(e.size for e in found), tuple(e.key for e in found[:_MOST_NAMED]))


def state_files(run: Run, files: Iterable[Entry]) -> frozenset[str]:
    """Return the keys of those files that hold training state, by their first bytes. Their names say nothing."""
    heads = ((entry, head) for entry, head in _candidates(run, files) if head is not None)
    return frozenset(entry.key for entry, head in heads if _holds_state(run, entry, head))


def _holds_state(run: Run, entry: Entry, head: bytes) -> bool:
    """True for what torch or llama.cpp wrote, for an archive with files of state, and for what a plugin reads."""
    name = format_of(entry.key, head).name
    if name == "opaque" and not run.no_plugins and run.storage.root is not None and not begins_like_no_state(head):
        from ckptguard.plugins.installed import format_plugin  # looks at what is installed

        return format_plugin(entry.key) is not None
    if name in ("torch_zip", "gguf") or begins_like_folder(head):
        return True
    place = _place(run, entry)
    if name not in ("zip", "tar") or place in _without_state:
        return False
    from ckptguard.formats.containers import lists_state  # for few files

    try:
        with run.storage.open_listed(entry) as reader:
            if lists_state(reader):
                return True
    except StorageError:
        return False
    with _lock:
        while len(_without_state) >= _REMEMBERED:
            _without_state.pop()
        _without_state.add(place)
    return False


def _candidates(run: Run, files: Iterable[Entry]) -> Iterator[tuple[Entry, bytes | None]]:
    """Yield the files whose names do not say what they are, and their first bytes; None if they were not read."""
    known = suffixes_of("tensors", "arrays", "pieces")
    room = _MOST_READ if run.storage.root is not None else _MOST_REQUESTS
    for entry in files:
        if entry.size > SMALLEST and _may_be_state(run, entry, known):
            head = _heads.get(_place(run, entry))
            if head is None and room > 0:
                head, room = first_bytes(run, entry), room - 1
            yield entry, head


def _may_be_state(run: Run, entry: Entry, known: tuple[str, ...]) -> bool:
    """True if its name does not say what it is, and the user has not said that it is no state. A pickle may hold
    anything: one counts if the rest of its name promises state (``replay_buffer.pkl`` of a model)."""
    if entry.name.startswith(".") or entry.name.lower().endswith(known) or not may_hold_state(entry.key):
        return False
    if is_pickle_name(entry.key) and not promises_state(entry.key):
        return False
    return not any(map(is_temporary, entry.key.split("/"))) and not is_ignored(run.patterns, entry.key)


_heads: dict[tuple[object, ...], bytes] = {}
_without_state: set[tuple[object, ...]] = set()  # archives
_lock = threading.Lock()


def _place(run: Run, entry: Entry) -> tuple[object, ...]:
    return (run.url, entry.key, *entry.signature)


def first_bytes(run: Run, entry: Entry) -> bytes | None:
    """Return the first bytes of a file. They are read again once its size or time changes. None if they cannot
    be read."""
    place = _place(run, entry)
    with _lock:
        head = _heads.get(place)
    if head is not None:
        return head
    try:
        with run.storage.open_listed(entry) as reader:
            head = reader.read(0, min(reader.entry.size, FIRST_BYTES))
            same = reader.entry.signature == entry.signature
    except ObjectMissingError:
        return b""  # it went meanwhile
    except StorageError:
        return None
    with _lock:
        while len(_heads) >= _REMEMBERED:
            del _heads[next(iter(_heads))]
        if same:
            _heads[place] = head
    return head

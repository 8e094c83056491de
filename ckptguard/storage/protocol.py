"""What ckptguard needs of a storage: bytes under keys. The contract that every implementation must keep.

A key is a ``/``-separated path relative to the storage's root, without ``.``, ``..``, empty parts or NUL;
``""`` is the root itself. Only `StorageError` and its kinds (and `ChangedWhileReadError` from readers) come out of
these methods: a foreign exception is an implementation's bug. Implementations inherit from these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import msgspec

from ckptguard.errors import DeniedError, ObjectMissingError
from ckptguard.values.ids import escape

Enter = Callable[[str], bool]  # whether a listing goes into the folder of this key


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One object in a listing. Links are never followed: `kind` of a link is "link", `target` its text."""

    key: str
    kind: str  # "file" | "folder" | "link" | "other" (FIFO, socket, device, unreadable name)
    size: int = 0
    mtime_ns: int | None = None
    inode: int | None = None
    etag: str | None = None
    target: str | None = None

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def signature(self) -> tuple[int, int | None, int | None, str | None]:
        """Equal signatures mean: nothing that the storage reports has changed. Never proof of equal bytes."""
        return (self.size, self.mtime_ns, self.inode, self.etag)


class Reader(Protocol):
    """Random access to one object that was opened once. Safe to call from several threads."""

    entry: Entry  # what the storage said about the opened object (kind "file") at open time

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes; ChangedWhileReadError when the object ends earlier."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the writable byte `buffer` completely; ChangedWhileReadError when the object ends earlier."""

    def check_unchanged(self) -> None:
        """ChangedWhileReadError unless the object under the key is still the opened one, with an equal signature."""

    def done_with(self, offset: int, length: int) -> None:
        """The caller will not read this range again: a hint to drop it from caches that training needs."""

    def close(self) -> None:
        """Free the handle; calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a storage can do, as it says itself; what it cannot, its users must do without."""

    exclusive_create: bool  # of racing creators of a key exactly one wins; if not, only one process may write
    exclusive_upload: bool  # the same for uploads; if not, what was there when the upload began is still never replaced
    links: bool  # `copy(how="link")` may share bytes with its source
    folders: bool  # a folder is a thing of its own; if not, it is there while something is in it, and a file may
    #                have its name
    etags: bool  # entries carry a tag of their content
    any_name: bool  # every plain name can be stored; if not, odd ones are refused (DeniedError)


class Upload(Protocol):
    """An object that is being written, invisible until `commit`. Leaving the block without a commit aborts."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; the buffer may be used again on return. Blocks while too much is under way."""

    def commit(self) -> None:
        """Make the object visible, whole and durable; ObjectExistsError if the key was taken meanwhile."""

    def abort(self) -> None:
        """Leave nothing behind. Calling it again, or after a commit, does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


class Storage(Protocol):
    """Bytes under keys: `LocalStorage`, `RemoteStorage`, `SftpStorage`, and `RetryingStorage` around the latter two."""

    url: str  # the normalised URL (or absolute path) of the root
    root: str | None = None  # its absolute local path; None where the storage is not a local file system

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def list(self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None) -> list[Entry]:
        """Entries under a folder, sorted by key; an absent folder lists as empty, but an absent root is an error.

        Recursive listings hold files, links and others, no folders; `enter(key)` says whether to go into a folder
        (an object store may list what lies below anyway, but must not return it). Not recursive: one level,
        folders included. Never a cached answer.
        """

    def names(self, prefix: str = "") -> Sequence[str]:
        """The keys that a recursive listing has, in any order: for those who want to know nothing else of so many."""
        return [entry.key for entry in self.list(prefix, recursive=True)]

    def stat(self, key: str) -> Entry:
        """The entry of a file, link or folder; ObjectMissingError if there is none."""

    def open(self, key: str) -> Reader:
        """Open a regular file for reading. Refuses links, FIFOs, sockets and devices (DeniedError), never blocks."""

    def create(self, key: str, data: bytes) -> None:
        """Write a whole new object, durably; missing folders are made.

        Exclusive: ObjectExistsError if the key is taken, also between racing writers, of which exactly one wins.
        No reader ever sees a part of it.
        """

    def upload(self, key: str, *, replace: bool = False) -> Upload:
        """Begin to write an object of any length in bounded memory; missing folders are made.

        ObjectExistsError if the key is taken, here or at the commit; with `replace` a file there is replaced, in one
        step for every reader. No reader ever sees a part of it, also when the writer is killed.
        """

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        """Copy one file to a key that must not exist; returns how it was done: "link", "reflink" or "copy".

        `how`: "copy" (independent bytes), "clone" (reflink, else copy), "link" (reflink, else hard link, else copy).
        The target appears whole or not at all; its folders are made.
        """

    def move(self, source: str, target: str) -> None:
        """Move a file or a whole folder to a key that must not exist (ObjectExistsError).

        One rename on a local file system; on an object store copy and delete, object by object, sources last.
        """

    def settle_names(self, key: str) -> None:
        """Finish what a killed `move` of a folder to here left of giving its files the names that they have here."""
        return

    def path_of(self, key: str) -> str:
        """An absolute path or URL of a key, usable outside."""
        return f"{self.url.rstrip('/')}/{key}".rstrip("/")

    def remove(self, key: str) -> None:
        """Remove a file or a whole folder (never through links). An absent key is no error."""

    def capabilities(self) -> Capabilities:
        """What this storage can do. Where only a trial tells, the first call writes and removes an object of ours."""

    def free_space(self) -> int | None:
        """Bytes that can still be written here; None where nobody can say (object stores)."""
        return None


def is_encodable(name: str) -> bool:
    """True if the name is valid Unicode; names that a file system holds as other bytes carry surrogates."""
    return name.isascii() or not any("\ud800" <= c <= "\udfff" for c in name)


def is_plain(name: str) -> bool:
    """True if one listed name can be a part of a key."""
    return name not in ("", ".", "..") and "\0" not in name and "/" not in name and is_encodable(name)


def parts_of(key: str) -> list[str]:
    """The parts of a key; DeniedError for anything that could lead outside the root. The root has no parts."""
    parts = key.split("/") if key else []
    if not all(map(is_plain, parts)):
        raise DeniedError(f"not a key: {escape(key)!r}", key=escape(key))
    return parts


def parts_below(root: str, key: str) -> list[str]:
    """The same where the root itself is no answer; DeniedError names it."""
    parts = parts_of(key)
    if not parts:
        raise DeniedError(f"{escape(root)}: the root itself cannot be used so", key=key)
    return parts


def join(folder: str, name: str) -> str:
    """The key of a name in a folder."""
    return f"{folder}/{name}" if folder else name


def find_entry(storage: Storage, key: str) -> Entry | None:
    """The entry of a file, link or folder; None if there is none."""
    try:
        return storage.stat(key)
    except ObjectMissingError:
        return None

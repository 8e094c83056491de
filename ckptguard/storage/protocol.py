"""What ckptguard needs from a storage: bytes at keys. The contract that every implementation must keep.

A key is a ``/``-separated path relative to the storage's root, without ``.``, ``..``, empty parts or NUL. ``""`` is the
root itself. These methods raise only `StorageError` and its kinds, and readers `ChangedWhileReadError`: a foreign
exception is a bug of the implementation. Implementations inherit from these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import msgspec

from ckptguard.errors import DeniedError, ObjectMissingError, StorageError
from ckptguard.values.ids import escape

Enter = Callable[[str], bool]  # whether a listing enters the folder with this key


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One object in a listing. Links are never followed: their `kind` is "link", and `target` is their text.

    `ctime_ns` (of files) is not part of the signature: chmod, links and renames change it, and no write can put it
    back.
    """

    key: str
    # "file" | "folder" | "link" | "unnamed" (no valid Unicode) | "unread" (a folder that cannot be listed, and `target`
    # says why) | "other" (FIFO, socket, device)
    kind: str
    size: int = 0
    mtime_ns: int | None = None
    inode: int | None = None
    etag: str | None = None
    target: str | None = None
    ctime_ns: int | None = None

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def signature(self) -> tuple[int, int | None, int | None, str | None]:
        """Equal signatures mean that nothing the storage reports has changed. They never prove equal bytes."""
        return (self.size, self.mtime_ns, self.inode, self.etag)


class Reader(Protocol):
    """Random access to one object that was opened once. Several threads may call it."""

    entry: Entry  # the storage's description of the object (kind "file") when it was opened

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes. ChangedWhileReadError if the object ends earlier."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the writable byte `buffer` completely. ChangedWhileReadError if the object ends earlier."""

    def check_unchanged(self) -> None:
        """Raise ChangedWhileReadError unless the key still has the opened object, with an equal signature."""

    def done_with(self, offset: int, length: int) -> None:
        """Hint that this range is not read again, so that caches that training needs can drop it. Nothing to do without
        such caches."""
        return

    def close(self) -> None:
        """Close the handle, if there is one. A second call does nothing."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a storage can do, as it reports. Users must do without the rest."""

    exclusive_create: bool  # of concurrent creators of a key exactly one wins; if False, only one process may write
    exclusive_upload: bool  # the same for uploads; if False, what existed when the upload began is still never replaced
    links: bool  # `copy(how="link")` may share bytes with its source
    folders: bool  # a folder exists by itself; if False, it exists while it has content, and a file may
    # have its name
    etags: bool  # entries have a tag of their content
    any_name: bool  # every plain name can be stored; if False, odd ones are refused (DeniedError)


class Upload(Protocol):
    """An object that is being written, invisible until `commit`. Leaving the block without a commit aborts."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes. The buffer may be reused on return. Blocks while too much is in flight."""

    def commit(self) -> None:
        """Make the object visible, whole and durable. ObjectExistsError if the key was taken meanwhile."""

    def abort(self) -> None:
        """Leave nothing behind. A second call, or one after a commit, does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


class Storage(Protocol):
    """Bytes at keys: `LocalStorage`, `RemoteStorage`, `SftpStorage`, and `RetryingStorage` around the latter two."""

    url: str  # the normalised URL (or absolute path) of the root
    root: str | None = None  # its absolute local path; None if the storage is not a local file system
    copies_itself: bool = False  # no bytes pass through here when it copies, or links

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> list[Entry]:
        """Return the entries in a folder, sorted by key. An absent folder is empty, but an absent root is an error.

        Recursive listings hold files, links and others, but no folders. `enter(key)` says whether to enter a folder. An
        object store may list what is in there anyway, but must not return it. Otherwise it returns one level, with
        folders. Never cached.

        A folder that may not be listed is an error. With `unread` it is an entry of that kind, unless it is the root.
        """

    def names(self, prefix: str = "") -> Sequence[str]:
        """Return the keys of a recursive listing, in any order, for callers that need only the keys."""
        return [entry.key for entry in self.list(prefix, recursive=True)]

    def stat(self, key: str) -> Entry:
        """Return the entry of a file, link or folder. ObjectMissingError if there is none."""

    def open(self, key: str) -> Reader:
        """Open a regular file for reading. Refuses links, FIFOs, sockets and devices (DeniedError), and never
        blocks."""

    def create(self, key: str, data: bytes) -> None:
        """Write a whole new object, durably. Missing folders are created.

        Exclusive: ObjectExistsError if the key is taken. Of concurrent writers exactly one wins. No reader sees a part
        of it.
        """

    def upload(self, key: str, *, replace: bool = False) -> Upload:
        """Begin to write an object of any length with bounded memory. Missing folders are created.

        ObjectExistsError if the key is taken, here or at the commit. With `replace` an existing file is replaced in one
        step. No reader ever sees a part of it, even if the writer is killed.
        """

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        """Copy one file to a key that must not exist. Returns how it was done: "link", "reflink" or "copy".

        `how`: "copy" (independent bytes), "clone" (reflink, else copy), "link" (reflink, else hard link, else copy).
        The target appears whole or not at all. Its folders are created.
        """

    def move(self, source: str, target: str) -> None:
        """Move a file or a whole folder to a key that must not exist (ObjectExistsError).

        A local file system renames it once. An object store copies and deletes, object by object, sources last.
        """

    def settle_names(self, key: str) -> None:
        """Finish renaming the files of a moved folder after a killed `move`."""
        return

    def path_of(self, key: str) -> str:
        """Return an absolute path or URL of a key for other programs."""
        return f"{self.url.rstrip('/')}/{key}".rstrip("/")

    def remove(self, key: str) -> None:
        """Remove a file or a whole folder, never through links. A missing key is no error."""

    def capabilities(self) -> Capabilities:
        """Return what this storage can do. If only a trial shows it, the first call writes and removes an object of
        ours."""

    def free_space(self) -> int | None:
        """Return the bytes that can still be written, or None if unknown (object stores)."""
        return None

    # What a look at an object store needs to ask nothing twice; see `remote.listed_storage`.

    def renew(self, *folders: str, beside: str | None = None) -> bool:
        """List again what is below some folders, and the files directly in `beside`. True if all was listed. Nothing to
        do where no listing is remembered."""
        return False

    def now(self) -> Storage:
        """Return the storage that answers as of now, without anything remembered."""
        return self

    def open_listed(self, entry: Entry) -> Reader:
        """Open a file that was listed a moment ago. If it is another one now, reading fails, or `check_unchanged`."""
        return self.open(entry.key)

    def copy_listed(self, entry: Entry, target: str, *, how: str = "copy") -> str:
        """Copy a file that was listed a moment ago to a key that was free then."""
        return self.copy(entry.key, target, how=how)

    def remove_listed(self, keys: Sequence[str]) -> None:
        """Remove files that were listed a moment ago. A missing one is no error."""
        for key in keys:
            self.remove(key)


def unread_folder(key: str, error: StorageError, mtime_ns: int | None = None) -> Entry:
    """Return the entry of a folder that cannot be listed."""
    return Entry(key=key, kind="unread", mtime_ns=mtime_ns, target=error.message)


UNNAMED = "its name is not valid Unicode; rename it"


def is_encodable(name: str) -> bool:
    """True if the name is valid Unicode. Names with other bytes in a file system have surrogates."""
    return name.isascii() or not any("\ud800" <= c <= "\udfff" for c in name)


def is_plain(name: str) -> bool:
    """True if one listed name can be a part of a key."""
    return name not in ("", ".", "..") and "\0" not in name and "/" not in name and is_encodable(name)


def parts_of(key: str, *, below: str = "") -> list[str]:
    """Return the parts of a key. DeniedError for anything that could lead outside the root. The root has no parts: with
    `below`, which names it, it is refused, too."""
    parts = key.split("/") if key else []
    if not is_encodable(key):
        raise DeniedError(f"{escape(key)} cannot be read: {UNNAMED}", key=escape(key))
    if "\0" in key or not {"", ".", ".."}.isdisjoint(parts):
        raise DeniedError(f"not a key: {escape(key)!r}", key=escape(key))
    if below and not parts:
        raise DeniedError(f"{escape(below)}: this is not possible for the root itself", key=key)
    return parts


def join(folder: str, name: str) -> str:
    """Return the key of a name in a folder."""
    return f"{folder}/{name}" if folder else name


def require_file(entry: Entry) -> Entry:
    """Return the entry of a regular file. DeniedError for anything else."""
    if entry.kind != "file":
        raise DeniedError(f"{escape(entry.key)} is not a regular file", key=entry.key)
    return entry


def entering(prefix: str, enter: Enter | None) -> Enter:
    """Return whether a listing of `prefix` shows what is in a folder: it and all above it are entered, each asked
    once."""
    entered = {prefix: True}

    def shown(folder: str) -> bool:
        if folder not in entered:
            entered[folder] = shown(folder.rpartition("/")[0]) and (enter is None or enter(folder))
        return entered[folder]

    return shown


def find_entry(storage: Storage, key: str) -> Entry | None:
    """Return the entry of a file, link or folder, or None."""
    try:
        return storage.stat(key)
    except ObjectMissingError:
        return None

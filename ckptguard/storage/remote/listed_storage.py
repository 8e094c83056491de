"""A run on an object store, as one look sees it: one listing answers what is there, and nothing is asked twice.

A request to a store costs money and a round trip. So a look lists the run once, and answers listings, existence and
sizes from that. What the look itself writes and removes is added to it. `renew` lists again, and `now` asks the store
itself: what removes files of others uses them.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import msgspec

from ckptguard.errors import ChangedWhileReadError, ObjectExistsError, ObjectMissingError, StorageError
from ckptguard.storage.memory_reader import MemoryReader
from ckptguard.storage.protocol import Capabilities, Enter, Entry, Reader, Storage, Upload, entering, require_file
from ckptguard.values.ids import escape
from ckptguard.values.remembered import Remembered
from ckptguard.values.storage_options import PAGE

_SMALL = 1 << 20  # bytes of a record that is worth remembering
_MOST_REMEMBERED = 64 << 20  # bytes, of all runs together
_KEY = attrgetter("key")

Entries = list[Entry]  # inside the class, `list` is the method


class ListedRun:
    """The storages of a run and of the records in it, for one thread that looks again and again.

    Between `begin` and `end` they answer from one listing. Otherwise they pass everything on.
    """

    def __init__(self, storage: Storage, records: Storage, folder: str) -> None:
        self._listing = _Listing(storage)
        self.storage = ListedStorage(storage, self._listing, "")
        self.records = ListedStorage(records, self._listing, f"{folder}/")

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """List the run, and answer from that until the block ends. Raises StorageError."""
        self._listing.begin()
        try:
            yield
        finally:
            self._listing.end()


class ListedStorage(Storage):
    """One of the storages of a `ListedRun`. `prefix` is that of its keys in the run."""

    def __init__(self, storage: Storage, listing: _Listing, prefix: str) -> None:
        self._storage, self._listing, self._prefix = storage, listing, prefix
        self.url, self.root, self.copies_itself = storage.url, storage.root, storage.copies_itself

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> Entries:
        if not self._listing.is_valid:
            return self._storage.list(prefix, recursive=recursive, enter=enter, unread=unread)
        found: dict[tuple[str, str], Entry] = {}
        wanted = entering(prefix, enter)
        start = f"{prefix}/" if prefix else ""
        for entry in self._below(prefix):
            below = entry.key[len(start) :]
            if not recursive and "/" in below:
                key = start + below.partition("/")[0]
                found[key, "folder"] = Entry(key=key, kind="folder")
            elif "/" not in below or wanted(entry.key.rpartition("/")[0]):
                found[entry.key, entry.kind] = entry
        if not found:
            self._root_must_exist()
        return sorted(found.values(), key=_KEY)

    def names(self, prefix: str = "") -> Sequence[str]:
        if not self._listing.is_valid:
            return self._storage.names(prefix)
        found = [entry.key for entry in self._below(prefix)]
        if not found:
            self._root_must_exist()
        return found

    def stat(self, key: str) -> Entry:
        if not self._listing.is_valid:
            return self._storage.stat(key)
        found = self._listing.get(self._prefix + key) if key else None
        if found is not None:  # of what was just written nobody knows the time
            return self._own(found) if found.etag is not None else self._storage.stat(key)
        if next(self._below(key), None) is None:
            raise ObjectMissingError(f"{escape(self.url)}/{escape(key)}: there is no such object", key=key)
        return Entry(key=key, kind="folder")

    def open(self, key: str) -> Reader:
        if not self._listing.is_valid:
            return self._storage.open(key)
        listed = self._listing.get(self._prefix + key)
        entry = require_file(self.stat(key) if listed is None else self._own(listed))
        data = _remembered(self._place(key), entry) if self._prefix else None
        if data is not None:
            return MemoryReader(_sized(entry, data), memoryview(data))
        if entry.etag is None:
            return self._storage.open(key)
        reader = self._storage.open_listed(entry)
        if not self._prefix or entry.size > _SMALL:
            return reader
        try:
            with reader:
                data = reader.read(0, reader.entry.size)
        except ChangedWhileReadError:
            return self._storage.open(key)  # it was replaced or removed since the listing
        if (reader.entry.size, reader.entry.etag) == (entry.size, entry.etag):
            _remember(self._place(key), entry, data)
        return MemoryReader(_sized(reader.entry, data), memoryview(data))

    def open_listed(self, entry: Entry) -> Reader:
        return self._storage.open_listed(entry)  # `open` would read what there is now

    def create(self, key: str, data: bytes) -> None:
        with self._listed_again_after_trouble():
            self._storage.create(key, data)
        entry = Entry(key=key, kind="file", size=len(data))  # the store will say when, and with which tag
        self._listing.add(self._prefix, entry)
        _remember(self._place(key), entry, data)

    def upload(self, key: str, *, replace: bool = False) -> Upload:
        return _ListedUpload(self._storage.upload(key, replace=replace), self._listing.forget)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        if not self._listing.is_valid:
            return self._storage.copy(source, target, how=how)
        entry = self.stat(source)
        with contextlib.suppress(ObjectMissingError):
            self.stat(target)
            raise ObjectExistsError(f"{escape(self.url)}/{escape(target)}: exists already", key=target)
        with self._listed_again_after_trouble():
            done = self._storage.copy_listed(entry, target, how=how)
        _REMEMBERED.drop(self._place(target))
        self._listing.add(self._prefix, Entry(key=target, kind="file", size=entry.size))
        return done

    def move(self, source: str, target: str) -> None:
        try:
            self._storage.move(source, target)
        finally:
            self._listing.forget()

    def remove(self, key: str) -> None:
        own = self._listing.get(self._prefix + key)
        keys = [*([key] if own is not None else ()), *(entry.key for entry in self._below(key))]
        with self._listed_again_after_trouble():
            if not self._prefix or not self._listing.is_valid:
                self._storage.remove(key)  # more may be there than was listed
            else:
                self._storage.remove_listed(keys)
        for name in keys:
            _REMEMBERED.drop(self._place(name))
        self._listing.drop(self._prefix + key)

    def capabilities(self) -> Capabilities:
        return self._storage.capabilities()

    def free_space(self) -> int | None:
        return self._storage.free_space()

    def path_of(self, key: str) -> str:
        return self._storage.path_of(key)

    def renew(self, *folders: str, beside: str | None = None) -> bool:
        places = [(self._prefix + folder).rstrip("/") for folder in folders]
        return self._listing.renew(places, None if beside is None else (self._prefix + beside).rstrip("/"))

    def now(self) -> Storage:
        return self._storage

    @contextlib.contextmanager
    def _listed_again_after_trouble(self) -> Iterator[None]:
        """Something may have been done all the same, or another process was faster."""
        try:
            yield
        except StorageError:
            self._listing.forget()
            raise

    def _place(self, key: str) -> str:
        return f"{self._listing.url}/{self._prefix}{key}"

    def _below(self, folder: str) -> Iterator[Entry]:
        start = f"{self._prefix}{folder}/" if folder else self._prefix
        return map(self._own, self._listing.below(start))

    def _own(self, entry: Entry) -> Entry:
        return _renamed(entry, entry.key.removeprefix(self._prefix)) if self._prefix else entry

    def _root_must_exist(self) -> None:
        if next(self._below(""), None) is None:
            raise ObjectMissingError(f"{escape(self.url)}: there is no such object", key="")


class _Listing:
    """What lies in a run, by key. Threads that scan may ask it while its own thread waits for them."""

    def __init__(self, storage: Storage) -> None:
        self.url, self._storage = storage.url, storage
        self._entries: dict[str, Entry] | None = None  # None: no look is under way
        self._keys: list[str] = []  # the same, sorted
        self._is_old = False
        self._lock = threading.RLock()

    @property
    def is_valid(self) -> bool:
        """True while a look is under way."""
        return self._entries is not None

    def begin(self) -> None:
        """List all. Nothing at all is no error here: who opens the run says so."""
        with self._lock:
            found: list[Entry] = []
            with contextlib.suppress(ObjectMissingError):
                found = self._storage.list("", recursive=True)
            self._take({entry.key: entry for entry in found})

    def renew(self, folders: Sequence[str] = (), beside: str | None = None) -> bool:
        """List again: all, if that is one request or nothing is named; otherwise what is below some folders, and the
        files directly in the folder `beside`. True if all was listed. While no look is under way, do nothing."""
        with self._lock:
            if self._entries is None:
                return False
            if not folders or self._is_old or len(self._entries) <= PAGE:
                self.begin()
                return True
            kept, found = dict(self._entries), []
            for folder in folders:
                for entry in self.below(f"{folder}/"):
                    del kept[entry.key]
                found += self._storage.list(folder, recursive=True)
            if beside is not None:
                level = [entry for entry in self._storage.list(beside) if entry.kind != "folder"]
                start = f"{beside}/" if beside else ""
                for key in [key for key in kept if key.startswith(start) and "/" not in key[len(start) :]]:
                    del kept[key]
                found += level
            self._take(kept | {entry.key: entry for entry in found})
            return False

    def _take(self, entries: dict[str, Entry]) -> None:
        self._entries, self._keys, self._is_old = entries, sorted(entries), False

    def end(self) -> None:
        """Forget all, until the next `begin`."""
        with self._lock:
            self._entries, self._keys, self._is_old = None, [], False

    def forget(self) -> None:
        """List again before anything is answered: it is not known what will be there."""
        self._is_old = True

    def get(self, key: str) -> Entry | None:
        """Return the entry of an object."""
        with self._lock:
            return self._known().get(key)

    def below(self, start: str) -> list[Entry]:
        """Return the entries whose keys begin with this text, in the order of their keys."""
        with self._lock:
            entries, keys = self._known(), self._keys
            first = bisect_left(keys, start)
            last = first
            while last < len(keys) and keys[last].startswith(start):
                last += 1
            return [entries[key] for key in keys[first:last]]

    def add(self, prefix: str, entry: Entry) -> None:
        """Add what was just written."""
        with self._lock:
            if self._entries is None:
                return
            key = prefix + entry.key
            if key not in self._entries:
                self._keys.insert(bisect_left(self._keys, key), key)
            self._entries[key] = _renamed(entry, key)

    def drop(self, key: str) -> None:
        """Leave out what was just removed: an object, and what is below it."""
        with self._lock:
            if self._entries is not None:
                gone = {key, *(entry.key for entry in self.below(f"{key}/"))}
                self._take({k: entry for k, entry in self._entries.items() if k not in gone})

    def _known(self) -> dict[str, Entry]:
        if self._is_old and self._entries is not None:
            self.begin()
        return self._entries or {}


_REMEMBERED = Remembered(_MOST_REMEMBERED)  # (entry, bytes) of records, by their place


def _remembered(place: str, entry: Entry) -> bytes | None:
    """Return the bytes of an object that certainly has those that are remembered, or None. One without a tag was
    written by this look."""
    before, data = _REMEMBERED.get(place) or (None, b"")
    same = before is not None and (before.signature == entry.signature or _is_md5_of(entry, data))
    return data if same else None


def _remember(place: str, entry: Entry, data: bytes) -> None:
    """Remember the bytes of an object, unless its tag says that others were sent."""
    sent_others = len((entry.etag or "").strip('"')) == 32 and not _is_md5_of(entry, data)
    if len(data) <= _SMALL and not sent_others:
        _REMEMBERED.put(place, (entry, data), len(data))


class _ListedUpload(Upload):
    """An upload after which the run is listed again."""

    def __init__(self, upload: Upload, forget: Callable[[], None]) -> None:
        self._upload, self._forget = upload, forget

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._upload.write(data)

    def commit(self) -> None:
        try:
            self._upload.commit()
        finally:
            self._forget()

    def abort(self) -> None:
        self._upload.abort()


def _is_md5_of(entry: Entry, data: bytes) -> bool:
    tag = (entry.etag or "").strip('"')
    return len(tag) == 32 and len(data) == entry.size and tag == hashlib.md5(data, usedforsecurity=False).hexdigest()


def _sized(entry: Entry, data: bytes) -> Entry:
    return msgspec.structs.replace(entry, size=len(data))


def _renamed(entry: Entry, key: str) -> Entry:
    return msgspec.structs.replace(entry, key=key)

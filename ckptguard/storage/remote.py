"""Any fsspec file system as a `Storage`: object stores, SFTP, and ``memory://``.

Nothing here relies on renames, folders, modification times or cached listings, which an object store does not
offer or gets wrong. The one guarantee that must come from the store is the conditional put; a store that ignores
the condition is found by a probe, and then only one writer at a time is safe.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckptguard.errors import DeniedError, ObjectExistsError, ObjectMissingError, StorageError, TransientError
from ckptguard.names import escape
from ckptguard.storage.failures import storage_error, translated
from ckptguard.storage.keys import is_plain, join, parts_of
from ckptguard.storage.parts import Parts, parts_for, protocols
from ckptguard.storage.protocol import Capabilities, Entry
from ckptguard.storage.remote_entries import entry_of, one_level
from ckptguard.storage.remote_reader import RemoteReader
from ckptguard.storage.remote_upload import RemoteUpload
from ckptguard.storage.retries import Retries

# Stores whose file systems list everything below a prefix in one go, and say so when that fails.
_FLAT = {"s3", "gs", "abfs"}
# What a store, or its library, would silently take for another name.
_MANGLED = {"abfs": re.compile(r"[\x00-\x1f\x7f\\?]|^\s|\s$")}
# fsspec's memory file system checks and then writes; its one store is global to the process, and so is this lock.
_MEMORY_LOCK = threading.RLock()

Entries = list[Entry]  # inside the class, `list` is the method


class RemoteStorage:
    """Bytes under a prefix of an fsspec file system. Folders need not exist: a prefix is there while objects are.

    `connect` opens the file system, and does so again in a forked process, where the old connections are not ours.
    """

    def __init__(self, url: str, connect: Callable[[], tuple[Any, str]], retries: Retries | None = None) -> None:
        self._url = url
        self._connect = connect
        self._retries = retries if retries is not None else Retries()
        self._process = os.getpid()
        self._file_system, root = connect()
        self._base = root.rstrip("/")
        names = set(protocols(self._file_system))
        self._in_memory = "memory" in names
        self._flat = bool(names & _FLAT)
        self._mangled = next((_MANGLED[name] for name in sorted(names & _MANGLED.keys())), None)
        self._conditional: bool | None = True if self._in_memory else None
        self._conditional_parts: bool | None = True if self._in_memory else None

    def __repr__(self) -> str:
        return f"RemoteStorage({self._url!r})"

    @property
    def _fs(self) -> Any:
        if self._process != os.getpid():
            self._left_alone = self._file_system  # closing it here would close the parent's connections
            self._file_system, _ = self._connect()
            self._process = os.getpid()
        return self._file_system

    @property
    def url(self) -> str:
        return self._url

    @property
    def root(self) -> str | None:
        return None

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Callable[[str], bool] | None = None
    ) -> list[Entry]:
        with translated(prefix, self._url):
            if recursive and self._flat:
                found = self._everything(prefix, enter)
            else:
                found = self._by_levels(prefix, recursive, enter)
        return sorted(found, key=lambda entry: entry.key)

    def _everything(self, prefix: str, enter: Callable[[str], bool] | None) -> Entries:
        """All below a prefix by one flat listing."""
        path = self._path(prefix)
        listed = self._fs.find(self._cut_above(path) or path, detail=True)
        entered = {prefix: True}

        def wanted(folder: str) -> bool:
            if folder not in entered:
                above = folder.rpartition("/")[0]
                entered[folder] = wanted(above) and (enter is None or enter(folder))
            return entered[folder]

        found = []
        for name, info in listed.items():
            below = name.removeprefix(path + "/")
            if below == name or info.get("type") != "file" or name.endswith("/"):
                continue  # the object under the prefix itself; a folder's marker
            *folders, last = below.split("/")
            folder = join(prefix, "/".join(map(_part, folders))) if folders else prefix
            if not wanted(folder):
                continue
            if all(map(is_plain, [*folders, last])):
                found.append(entry_of(join(folder, last), info))
            else:
                found.append(Entry(key=join(folder, _part(last)), kind="other"))
        if not found and not listed:
            self._root_must_exist()
        return found

    def _by_levels(self, prefix: str, recursive: bool, enter: Callable[[str], bool] | None) -> Entries:
        """Folder by folder: fsspec's own recursion leaves out what it fails to list."""
        found: Entries = []
        pending = [prefix]
        while pending:
            folder = pending.pop()
            entries = self._level(folder)
            if entries is None and folder == prefix:
                self._root_must_exist()
            for entry in entries or ():
                if recursive and entry.kind == "folder":
                    if enter is None or enter(entry.key):
                        pending.append(entry.key)
                else:
                    found.append(entry)
        return found

    def names(self, prefix: str = "") -> Sequence[str]:
        return [entry.key for entry in self.list(prefix, recursive=True)]

    def stat(self, key: str) -> Entry:
        with translated(key, self._url):
            if self._cut_above(self._path(key)) is None:
                return entry_of(key, self._fs.info(self._path(key)))
            if not self._present(key):
                raise FileNotFoundError(key)
            return Entry(key=key, kind="folder")

    def open(self, key: str) -> RemoteReader:
        entry = self.stat(key)
        if entry.kind != "file":
            raise DeniedError(f"{escape(key)} is not a regular file", key=key)
        return RemoteReader(lambda: self._fs, self._path(key), entry, self._url, self.stat)

    def create(self, key: str, data: bytes) -> None:
        """See `Storage.create`. An answer can get lost between a store and us, so where the store reports a conflict
        the object is read back, and the same bytes count as ours: what must have one winner needs a nonce in it."""
        with translated(key, self._url), self._exclusive():
            path = self._object_path(key)
            if not self._store_is_conditional() and self._fs.exists(path):
                raise FileExistsError(key)
            try:
                self._fs.pipe_file(path, data, mode="create")
            except OSError as error:
                present = None
                with contextlib.suppress(FileNotFoundError):
                    present = self._fs.cat_file(path)
                if present is None:
                    raise
                if self._in_memory or present != data:
                    raise ObjectExistsError(f"{escape(self._url)}/{escape(key)}: exists already", key=key) from error

    def upload(self, key: str, *, replace: bool = False) -> RemoteUpload:
        path = self._object_path(key)

        def refuse_taken() -> None:
            try:
                taken = self.stat(key).kind
            except ObjectMissingError:
                return
            if taken != "file" or not replace:
                raise ObjectExistsError(f"{escape(self._url)}/{escape(key)}: exists already", key=key)

        def put_whole(data: bytes) -> None:
            if replace:
                self._fs.pipe_file(path, data)
            else:
                self.create(key, data)

        self._refuse_root(key)
        refuse_taken()
        return RemoteUpload(
            key,
            self._url,
            lambda: parts_for(self._fs, path, exclusive=not replace),
            put_whole,
            refuse_taken,
            replace=replace,
            retries=self._retries,
        )

    def capabilities(self) -> Capabilities:
        with translated("", self._url):
            return Capabilities(
                exclusive_create=self._store_is_conditional(),
                exclusive_upload=self._parts_are_conditional(),
                atomic_move=False,
                links=False,
                folders=self._in_memory,
                server_copy=True,
                etags=self._flat,
                any_name=self._mangled is None,
            )

    def free_space(self) -> int | None:
        return None

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        del how  # a store has no links; its own copy is independent
        with translated(source, self._url), self._exclusive():
            entry = entry_of(source, self._fs.info(self._path(source)))
            if entry.kind != "file":
                raise DeniedError(f"{escape(source)} is not a regular file", key=source)
            with translated(target, self._url):
                self._copy_object(entry, target)
        return "copy"

    def move(self, source: str, target: str) -> None:
        parts_of(target)
        with translated(source, self._url), self._exclusive():
            moved = self._below(source)
            if not moved:
                raise FileNotFoundError(source)
            if self._present(target):
                raise ObjectExistsError(f"{escape(self._url)}/{escape(target)}: exists already", key=target)
            for entry in moved:
                self._copy_step(entry, target + entry.key.removeprefix(source))
            self._retries.run(source, lambda: self.remove(source))  # last: killed before this line, nothing is lost

    def remove(self, key: str) -> None:
        self._refuse_root(key)
        with translated(key, self._url), self._exclusive():
            folders: set[str] = {key}
            for entry in self._below(key):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(entry.key))
                parts = entry.key.split("/")
                folders.update("/".join(parts[:n]) for n in range(key.count("/") + 1, len(parts)))
            for folder in sorted(folders, reverse=True):
                with contextlib.suppress(Exception):  # only file systems that have real folders leave any behind
                    self._fs.rmdir(self._path(folder))

    def _path(self, key: str) -> str:
        parts = parts_of(key)
        if self._mangled is not None and any(map(self._mangled.search, parts)):
            raise DeniedError(f"{escape(self._url)} cannot hold the name {escape(key)}", key=key)
        return "/".join([self._base, *parts]) if parts else self._base

    def _object_path(self, key: str) -> str:
        path = self._path(key)
        if self._cut_above(path) is not None:
            raise DeniedError(f"{escape(self._url)} cannot hold an object named {escape(key)}", key=key)
        return path

    def _refuse_root(self, key: str) -> None:
        if not key:
            raise DeniedError(f"{escape(self._url)}: the root itself cannot be used so", key=key)

    def place(self, key: str) -> tuple[Any, str]:
        """The file system and the path of a key in it, for what only one kind of store can do."""
        return self._fs, self._path(key)

    def _level(self, folder: str) -> Entries | None:
        """One level, or None where there is nothing (a store cannot tell an empty folder from an absent one)."""
        path = self._path(folder)
        if self._cut_above(path) is not None:
            return one_level(folder, self._everything(folder, None)) or None
        try:
            listed = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        own = self._fs._strip_protocol(path).rstrip("/")
        found = []
        for info in listed:
            whole = info["name"].rstrip("/")
            stripped = self._fs._strip_protocol(whole).rstrip("/")
            name = whole if whole.startswith(stripped) else stripped
            if name == own:
                continue  # a folder's own marker object, or a file that was listed as a folder
            last = name.rpartition("/")[2]
            if is_plain(last):
                found.append(entry_of(join(folder, last), info))
            else:
                found.append(Entry(key=join(folder, _part(last)), kind="other"))
        return found or (None if not self._fs.isdir(path) else [])

    def _cut_above(self, path: str) -> str | None:
        """The folder around a path that adlfs would cut short (it drops a "#" at the end); None for all others."""
        left = self._fs._strip_protocol(path).rstrip("/")
        return left.rpartition("/")[0] if left != path and path.startswith(left) else None

    def _root_must_exist(self) -> None:
        if not self._present(""):
            raise FileNotFoundError(self._url)

    def _below(self, key: str) -> Entries:
        """Every object at or below a key."""
        if self._cut_above(self._path(key)) is not None:
            return self._everything(key, None)
        try:
            entry = entry_of(key, self._fs.info(self._path(key)))
        except FileNotFoundError:
            return []
        if entry.kind != "folder":
            return [entry]
        return self._everything(key, None) if self._flat else self._by_levels(key, True, None)

    def _present(self, key: str) -> bool:
        if self._cut_above(self._path(key)) is not None:
            return bool(self._everything(key, None))
        try:
            self._fs.info(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _copy_step(self, entry: Entry, target: str) -> None:
        """One copy of a move, tried again by itself: a move as a whole cannot be, once some of it is done."""
        unclear = False

        def attempt() -> None:
            nonlocal unclear
            try:
                with translated(target, self._url):
                    self._copy_object(entry, target)
            except TransientError:
                unclear = True
                raise
            except ObjectExistsError:
                there = self.stat(target)
                if not unclear or (there.size, there.etag) != (entry.size, entry.etag):
                    raise

        self._retries.run(target, attempt)

    def _copy_object(self, entry: Entry, target: str) -> None:
        path = self._object_path(target)
        if self._present(target):
            raise ObjectExistsError(f"{escape(self._url)}/{escape(target)}: exists already", key=target)
        try:
            self._fs.cp_file(self._path(entry.key), path)
        except NotImplementedError as error:
            raise StorageError(f"{escape(self._url)} cannot copy objects", key=target) from error
        if self._fs.info(path).get("size") != entry.size:
            raise StorageError(f"{escape(target)}: the copy has another size than its source", key=target)

    def _store_is_conditional(self) -> bool:
        """Whether the store keeps `mode="create"` exclusive, found out once with an object of our own."""
        if self._conditional is None:
            with self._probe() as probe:
                self._fs.pipe_file(probe, b"1", mode="create")
                try:
                    self._fs.pipe_file(probe, b"2", mode="create")
                except OSError as error:
                    if isinstance(storage_error(error, "", self._url), TransientError | DeniedError):
                        raise  # no answer
                self._conditional = self._fs.cat_file(probe) == b"1"
        return self._conditional

    def _parts_are_conditional(self) -> bool:
        """The same for objects that are put together from parts."""
        if self._conditional_parts is None:
            with self._probe() as probe:
                self._fs.pipe_file(probe, b"1")
                parts: Parts | None = None
                try:
                    parts = parts_for(self._fs, probe, exclusive=True)
                    parts.put(0, b"2")
                    parts.finish(exclusive=True)
                except OSError as error:
                    if parts is not None:
                        parts.abandon()
                    if isinstance(storage_error(error, "", self._url), TransientError | DeniedError):
                        raise  # no answer
                self._conditional_parts = self._fs.cat_file(probe) == b"1"
        return self._conditional_parts

    @contextlib.contextmanager
    def _probe(self) -> Iterator[str]:
        """The path of an object of our own, gone afterwards."""
        probe = self._path(f".tmp-{secrets.token_hex(8)}")
        try:
            yield probe
        finally:
            with contextlib.suppress(Exception):
                self._fs.rm_file(probe)

    def _exclusive(self) -> contextlib.AbstractContextManager[object]:
        return _MEMORY_LOCK if self._in_memory else contextlib.nullcontext()


def _part(name: str) -> str:
    """A listed name as a part of a key, escaped where it cannot be one."""
    return name if is_plain(name) else escape(name) or "%"

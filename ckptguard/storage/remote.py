"""Any fsspec file system as a `Storage`: object stores, SFTP, and ``memory://``.

Nothing here relies on renames, folders, modification times or cached listings, which an object store does not
offer or gets wrong. The one guarantee that must come from the store is the conditional put; a store that ignores
the condition is found by a probe, and then only one writer at a time is safe.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Callable
from typing import Any

from ckptguard.errors import (
    DeniedError,
    ObjectExistsError,
    SettingsError,
    StorageError,
)
from ckptguard.names import escape
from ckptguard.storage.failures import storage_error, translated
from ckptguard.storage.keys import is_plain, join, parts_of
from ckptguard.storage.protocol import Entry
from ckptguard.storage.remote_reader import RemoteReader

_KINDS = {"file": "file", "directory": "folder", "link": "link"}
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_ETAGS = ("ETag", "etag", "generation", "version", "md5Hash", "content_md5")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "sftp": "sftp"}

# fsspec's memory file system checks and then writes; its one store is global to the process, and so is this lock.
_MEMORY_LOCK = threading.RLock()

Entries = list[Entry]  # inside the class, `list` is the method


def open_remote(url: str) -> RemoteStorage:
    """The storage behind an fsspec URL; SettingsError when no installed file system opens it."""
    import fsspec

    protocol = url.partition(":")[0]
    try:
        # Cached listings and shared instances gave wrong answers about existence, in both directions.
        file_system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(protocol)
        raise SettingsError(
            f"cannot open {escape(url)}: {escape(str(error))}",
            hint=f'pip install "ckptguard[{extra}]"' if extra else "use a path or a URL that fsspec knows",
        ) from error
    except Exception as error:
        raise storage_error(error, "", url) from error
    return RemoteStorage(url, file_system, root)


class RemoteStorage:
    """Bytes under a prefix of an fsspec file system. Folders need not exist: a prefix is there while objects are."""

    def __init__(self, url: str, file_system: Any, root: str) -> None:
        self._url = url
        self._fs = file_system
        self._base = root.rstrip("/")
        protocol = file_system.protocol
        self._in_memory = "memory" in ((protocol,) if isinstance(protocol, str) else protocol)
        self._conditional: bool | None = True if self._in_memory else None

    def __repr__(self) -> str:
        return f"RemoteStorage({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def root(self) -> str | None:
        return None

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Callable[[str], bool] | None = None
    ) -> list[Entry]:
        found: list[Entry] = []
        with translated(prefix, self._url):
            # Folder by folder: fsspec's own recursion leaves out what it fails to list.
            pending = [prefix]
            while pending:
                folder = pending.pop()
                entries = self._level(folder)
                if entries is None and folder == prefix and prefix:
                    self._level_of_root()
                elif entries is None and not folder:
                    raise FileNotFoundError(self._url)
                for entry in entries or ():
                    if recursive and entry.kind == "folder":
                        if enter is None or enter(entry.key):
                            pending.append(entry.key)
                    else:
                        found.append(entry)
        return sorted(found, key=lambda entry: entry.key)

    def stat(self, key: str) -> Entry:
        with translated(key, self._url):
            return self._entry(key, self._fs.info(self._path(key)))

    def open(self, key: str) -> RemoteReader:
        entry = self.stat(key)
        if entry.kind != "file":
            raise DeniedError(f"{escape(key)} is not a regular file", key=key)
        return RemoteReader(self._fs, self._path(key), entry, self._url, self.stat)

    def create(self, key: str, data: bytes) -> None:
        """See `Storage.create`. An answer can get lost between a store and us, so where the store reports a conflict
        the object is read back, and the same bytes count as ours: what must have one winner needs a nonce in it."""
        with translated(key, self._url), self._exclusive():
            path = self._path(key)
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

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        del how  # a store has no links; its own copy is independent
        with translated(source, self._url), self._exclusive():
            entry = self._entry(source, self._fs.info(self._path(source)))
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
                self._copy_object(entry, target + entry.key.removeprefix(source))
            self.remove(source)  # last: killed before this line, nothing is lost

    def remove(self, key: str) -> None:
        if not key:
            raise DeniedError(f"{escape(self._url)}: the root itself cannot be removed", key=key)
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
        return "/".join([self._base, *parts]) if parts else self._base

    def _entry(self, key: str, info: dict[str, Any]) -> Entry:
        kind = "link" if info.get("islink") else _KINDS.get(info.get("type", ""), "other")
        if kind != "file":
            return Entry(key=key, kind=kind)
        etag = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
        time = next((info[name] for name in _TIMES if info.get(name)), None)
        return Entry(key=key, kind=kind, size=int(info.get("size") or 0), mtime_ns=_nanoseconds(time), etag=etag)

    def _level(self, folder: str) -> Entries | None:
        """One level, or None where there is nothing (a store cannot tell an empty folder from an absent one)."""
        path = self._path(folder)
        try:
            listed = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        own = self._fs._strip_protocol(path).rstrip("/")
        found = []
        for info in listed:
            name = self._fs._strip_protocol(info["name"]).rstrip("/")
            if name == own:
                continue  # a folder's own marker object, or a file that was listed as a folder
            last = name.rpartition("/")[2]
            if is_plain(last):
                found.append(self._entry(join(folder, last), info))
            else:
                found.append(Entry(key=join(folder, escape(last) or "%"), kind="other"))
        return found or (None if not self._fs.isdir(path) else [])

    def _level_of_root(self) -> None:
        if self._level("") is None:
            raise FileNotFoundError(self._url)

    def _below(self, key: str) -> Entries:
        """Every object at or below a key."""
        try:
            entry = self._entry(key, self._fs.info(self._path(key)))
        except FileNotFoundError:
            return []
        if entry.kind != "folder":
            return [entry]
        found: Entries = []
        pending = [key]
        while pending:
            level = self._level(pending.pop()) or []
            pending += [e.key for e in level if e.kind == "folder"]
            found += [e for e in level if e.kind != "folder"]
        return found

    def _present(self, key: str) -> bool:
        try:
            self._fs.info(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _copy_object(self, entry: Entry, target: str) -> None:
        path = self._path(target)
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
            probe = self._path(f".tmp-{secrets.token_hex(8)}")
            self._fs.pipe_file(probe, b"1", mode="create")
            try:
                self._fs.pipe_file(probe, b"2", mode="create")
                self._conditional = False
            except OSError:
                self._conditional = True
            finally:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(probe)
        return self._conditional

    def _exclusive(self) -> contextlib.AbstractContextManager[object]:
        return _MEMORY_LOCK if self._in_memory else contextlib.nullcontext()


def _nanoseconds(time: object) -> int | None:
    if isinstance(time, datetime.datetime):
        time = time.timestamp()
    if isinstance(time, str):
        try:
            time = datetime.datetime.fromisoformat(time).timestamp()
        except ValueError:
            return None
    return int(time * 1e9) if isinstance(time, int | float) else None

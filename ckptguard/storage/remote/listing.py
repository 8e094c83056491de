"""The root of a remote storage and its listing, without trust in folders, caches or fsspec's own recursion."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

from ckptguard.errors import DeniedError
from ckptguard.storage.failures import is_refused_without_reason
from ckptguard.storage.protocol import Enter, Entry, entering, is_plain, join, parts_of
from ckptguard.storage.ranged_reader import listed_by_levels
from ckptguard.storage.traits import traits_of
from ckptguard.values.ids import escape

_KINDS = {"file": "file", "directory": "folder", "link": "link"}
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_ETAGS = ("ETag", "etag", "generation", "version", "md5Hash", "content_md5")


class RemoteRoot:
    """A prefix of an fsspec file system.

    `connect` opens the file system. A forked process calls it again, because it must not use the parent's connections.
    """

    def __init__(self, url: str, connect: Callable[[], tuple[Any, str]]) -> None:
        self.url = url
        self._connect = connect
        self._process = os.getpid()
        self._file_system, root = connect()
        self._base = root.rstrip("/")
        self.traits = traits_of(self._file_system)

    @property
    def fs(self) -> Any:
        """The file system for this process."""
        if self._process != os.getpid():
            self._left_alone = self._file_system  # closing it here would close the parent's connections
            self._file_system, _ = self._connect()
            self._process = os.getpid()
        return self._file_system

    def path(self, key: str) -> str:
        """Return the path of a key. DeniedError if the store would silently mean another one."""
        parts = parts_of(key)
        if not all(map(self.traits.holds, parts)):
            raise DeniedError(f"{escape(self.url)} cannot hold the name {escape(key)}", key=key)
        return "/".join([self._base, *parts]) if parts else self._base

    def object_path(self, key: str) -> str:
        """Return the same for an object to write, if the library does not cut its name."""
        path = self.path(key)
        if self.cut_above(path) is not None:
            raise DeniedError(f"{escape(self.url)} cannot hold an object named {escape(key)}", key=key)
        return path

    def cut_above(self, path: str) -> str | None:
        """Return the folder of a path that adlfs would cut (it drops a "#" at the end), else None."""
        left = self.fs._strip_protocol(path).rstrip("/")
        return left.rpartition("/")[0] if left != path and path.startswith(left) else None

    def under(self, prefix: str, *, recursive: bool, enter: Enter | None, unread: bool = False) -> list[Entry]:
        """List as `Storage.list` does, unsorted."""
        if recursive and self.traits.flat_listing:
            return self._everything(prefix, enter)

        def level(folder: str) -> list[Entry]:
            entries = self._level(folder)
            if entries is None and folder == prefix:
                self._root_must_exist()
            return entries or []

        # Folder by folder: fsspec's own recursion leaves out what it fails to list.
        return listed_by_levels(prefix, level, self.url, recursive=recursive, enter=enter, unread=unread)

    def at_or_below(self, key: str) -> list[Entry]:
        """Return every object at or below a key."""
        if self.cut_above(self.path(key)) is not None:
            return self._everything(key, None)
        try:
            entry = entry_of(key, self.info(key))
        except FileNotFoundError:
            return []
        return self.under(key, recursive=True, enter=None) if entry.kind == "folder" else [entry]

    def is_present(self, key: str) -> bool:
        """True if anything exists there, even if only as a prefix of objects."""
        if self.cut_above(self.path(key)) is not None:
            return bool(self._everything(key, None))
        try:
            self.info(key)
        except FileNotFoundError:
            return False
        return True

    def info(self, key: str) -> dict[str, Any]:
        """Return fsspec's information about a key. FileNotFoundError if there is nothing."""
        try:
            return dict(self.fs.info(self.path(key)))
        except OSError as error:
            if is_refused_without_reason(error):
                self.has_objects(key)  # raises with the reason, unless listing is allowed
            raise

    def has_objects(self, folder: str = "") -> bool:
        """True if one listing, whose refusal says why, shows anything in a folder. False where only more requests can
        tell."""
        if not self.traits.lists_by_prefix:
            return False
        bucket, key, _ = self.fs.split_path(self.path(folder))
        listed = self.fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{key}/" if key else "", MaxKeys=1)
        return bool(listed.get("Contents"))

    def _everything(self, prefix: str, enter: Enter | None) -> list[Entry]:
        """Return everything below a prefix from one flat listing."""
        path = self.path(prefix)
        if self.traits.lists_by_prefix and prefix and self.cut_above(path) is None:
            listed = self.fs.find(self._base, prefix=f"{prefix}/", detail=True)  # asks nothing else if there is nothing
        else:
            listed = self.fs.find(self.cut_above(path) or path, detail=True)
        wanted, found = entering(prefix, enter), []
        for name, info in listed.items():
            below = name.removeprefix(path + "/")
            if below == name or info.get("type") != "file" or name.endswith("/"):
                continue  # the object at the prefix itself; a folder's marker
            *folders, last = below.split("/")
            folder = join(prefix, "/".join(map(_part, folders))) if folders else prefix
            if not wanted(folder):
                continue
            if all(map(is_plain, [*folders, last])):
                found.append(entry_of(join(folder, last), info))
            else:
                found.append(Entry(key=join(folder, _part(last)), kind="unnamed"))
        if not found and not listed:
            self._root_must_exist()
        return found

    def _level(self, folder: str) -> list[Entry] | None:
        """List one level; None if there is nothing (a store cannot distinguish an empty folder from an absent one)."""
        fs, path = self.fs, self.path(folder)
        if self.cut_above(path) is not None:
            return _one_level(folder, self._everything(folder, None)) or None
        try:
            listed = self._ask_for_level(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not listed and self.traits.lists_by_prefix:
            return None
        own = fs._strip_protocol(path).rstrip("/")
        found = []
        for info in listed:
            whole = info["name"].rstrip("/")
            stripped = fs._strip_protocol(whole).rstrip("/")
            name = whole if whole.startswith(stripped) else stripped
            if name == own:
                continue  # a folder's own marker object, or a file that was listed as a folder
            last = name.rpartition("/")[2]
            if is_plain(last):
                found.append(entry_of(join(folder, last), info))
            else:
                found.append(Entry(key=join(folder, _part(last)), kind="unnamed"))
        return found or (None if not fs.isdir(path) else [])

    def _ask_for_level(self, path: str) -> list[dict[str, Any]]:
        if not self.traits.lists_by_prefix:
            return list(self.fs.ls(path, detail=True))
        from fsspec.asyn import sync  # it takes long to import, and local runs need none of this

        return list(sync(self.fs.loop, self.fs._lsdir, path))  # `ls` lists the folder above, too, if there is nothing

    def _root_must_exist(self) -> None:
        if not (self.has_objects() or self.is_present("")):
            raise FileNotFoundError(self.url)


def _part(name: str) -> str:
    """Return a listed name as a part of a key, escaped if it cannot be one."""
    return name if is_plain(name) else escape(name) or "%"


def entry_of(key: str, info: dict[str, Any]) -> Entry:
    """Return the entry for one of fsspec's info dictionaries."""
    kind = "link" if info.get("islink") else _KINDS.get(info.get("type", ""), "other")
    if kind != "file":
        return Entry(key=key, kind=kind)
    etag = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
    time = _nanoseconds(next((info[name] for name in _TIMES if info.get(name)), None))
    if "LastModified" in info and time is not None:
        # S3 reports the time of one object in whole seconds, and in listings sometimes finer.
        time -= time % 10**9
    return Entry(key=key, kind=kind, size=int(info.get("size") or 0), mtime_ns=time, etag=etag)


def _one_level(folder: str, below: list[Entry]) -> list[Entry]:
    """Return the entries directly in a folder, from all files below it."""
    found: dict[str, Entry] = {}
    for entry in below:
        first, deeper, _ = entry.key.removeprefix(folder + "/").partition("/")
        key = f"{folder}/{first}"
        found[key] = Entry(key=key, kind="folder") if deeper else entry
    return [*found.values()]


def _nanoseconds(time: object) -> int | None:
    if isinstance(time, datetime.datetime):
        time = time.timestamp()
    if isinstance(time, str):
        try:
            time = datetime.datetime.fromisoformat(time).timestamp()
        except ValueError:
            return None
    return int(time * 1e9) if isinstance(time, int | float) else None

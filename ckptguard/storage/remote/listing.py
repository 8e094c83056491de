"""What lies below a key of a remote storage, found without trust in folders, caches or fsspec's own recursion."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from ckptguard.storage.keys import is_plain, join
from ckptguard.storage.protocol import Entry
from ckptguard.storage.remote.root import RemoteRoot
from ckptguard.values.ids import escape

Enter = Callable[[str], bool]
_KINDS = {"file": "file", "directory": "folder", "link": "link"}
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_ETAGS = ("ETag", "etag", "generation", "version", "md5Hash", "content_md5")


class RemoteListing:
    """Listings of a remote root, as fsspec tells of them: its exceptions come out as they are."""

    def __init__(self, root: RemoteRoot) -> None:
        self._root = root

    def under(self, prefix: str, *, recursive: bool, enter: Enter | None) -> list[Entry]:
        """See `Storage.list`, unsorted."""
        if recursive and self._root.traits.flat_listing:
            return self._everything(prefix, enter)
        return self._by_levels(prefix, recursive, enter)

    def at_or_below(self, key: str) -> list[Entry]:
        """Every object at or below a key."""
        if self._root.cut_above(self._root.path(key)) is not None:
            return self._everything(key, None)
        try:
            entry = entry_of(key, self._root.fs.info(self._root.path(key)))
        except FileNotFoundError:
            return []
        return self.under(key, recursive=True, enter=None) if entry.kind == "folder" else [entry]

    def is_present(self, key: str) -> bool:
        """Whether anything is there, be it only a prefix of objects."""
        if self._root.cut_above(self._root.path(key)) is not None:
            return bool(self._everything(key, None))
        try:
            self._root.fs.info(self._root.path(key))
        except FileNotFoundError:
            return False
        return True

    def _everything(self, prefix: str, enter: Enter | None) -> list[Entry]:
        """All below a prefix by one flat listing."""
        path = self._root.path(prefix)
        listed = self._root.fs.find(self._root.cut_above(path) or path, detail=True)
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

    def _by_levels(self, prefix: str, recursive: bool, enter: Enter | None) -> list[Entry]:
        """Folder by folder: fsspec's own recursion leaves out what it fails to list."""
        found: list[Entry] = []
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

    def _level(self, folder: str) -> list[Entry] | None:
        """One level, or None where there is nothing (a store cannot tell an empty folder from an absent one)."""
        fs, path = self._root.fs, self._root.path(folder)
        if self._root.cut_above(path) is not None:
            return _one_level(folder, self._everything(folder, None)) or None
        try:
            listed = fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
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
                found.append(Entry(key=join(folder, _part(last)), kind="other"))
        return found or (None if not fs.isdir(path) else [])

    def _root_must_exist(self) -> None:
        if not self.is_present(""):
            raise FileNotFoundError(self._root.url)


def _part(name: str) -> str:
    """A listed name as a part of a key, escaped where it cannot be one."""
    return name if is_plain(name) else escape(name) or "%"


def entry_of(key: str, info: dict[str, Any]) -> Entry:
    """The entry for one of fsspec's info dictionaries."""
    kind = "link" if info.get("islink") else _KINDS.get(info.get("type", ""), "other")
    if kind != "file":
        return Entry(key=key, kind=kind)
    etag = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
    time = _nanoseconds(next((info[name] for name in _TIMES if info.get(name)), None))
    if "LastModified" in info and time is not None:
        # S3 tells the time of one object in whole seconds, and in listings finer where the server pleases.
        time -= time % 10**9
    return Entry(key=key, kind=kind, size=int(info.get("size") or 0), mtime_ns=time, etag=etag)


def _one_level(folder: str, below: list[Entry]) -> list[Entry]:
    """The entries right under a folder, from all files that lie below it."""
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

"""What fsspec's file systems say about an object, each in its own words, as an `Entry`."""

from __future__ import annotations

import datetime
from typing import Any

from ckptguard.storage.protocol import Entry

_KINDS = {"file": "file", "directory": "folder", "link": "link"}
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_ETAGS = ("ETag", "etag", "generation", "version", "md5Hash", "content_md5")


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


def one_level(folder: str, below: list[Entry]) -> list[Entry]:
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

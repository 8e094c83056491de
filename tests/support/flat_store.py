"""An object store in a dictionary: no folders, and a file may have the name of one."""

from __future__ import annotations

import hashlib
import itertools
from types import TracebackType

from ckptguard.errors import DeniedError, ObjectExistsError, ObjectMissingError
from ckptguard.storage.protocol import Capabilities, Enter, Entry, Reader, Storage, Upload

_CLOCK = itertools.count(1)
Objects = dict[str, tuple[bytes, int]]  # by their whole names, each with the time of its writing


class FlatStore(Storage):
    """What lies below a prefix of some objects, which other storages may share."""

    def __init__(self, objects: Objects, prefix: str = "") -> None:
        self.url, self.objects, self.prefix = f"flat://{prefix}", objects, prefix

    def _entry(self, key: str) -> Entry:
        data, at = self.objects[self.prefix + key]
        tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return Entry(key=key, kind="file", size=len(data), mtime_ns=at * 10**9, etag=f'"{tag}"')

    def _below(self, folder: str) -> list[str]:
        start = self.prefix + (f"{folder}/" if folder else "")
        return [name.removeprefix(self.prefix) for name in self.objects if name.startswith(start)]

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> list[Entry]:
        if not self._below(""):
            raise ObjectMissingError("nothing is there", key="")
        start, found = f"{prefix}/" if prefix else "", {}
        for key in self._below(prefix):
            first, deeper, _ = key.removeprefix(start).partition("/")
            if deeper and not recursive:
                found[start + first, "folder"] = Entry(key=start + first, kind="folder")
            elif recursive or not deeper:
                found[key, "file"] = self._entry(key)
        return [found[one] for one in sorted(found)]

    def stat(self, key: str) -> Entry:
        if key and self.prefix + key in self.objects:
            return self._entry(key)
        if not self._below(key):
            raise ObjectMissingError("nothing is there", key=key)
        return Entry(key=key, kind="folder")

    def open(self, key: str) -> Reader:
        if self.stat(key).kind != "file":
            raise DeniedError("a folder", key=key)
        return _Bytes(self._entry(key), self.objects[self.prefix + key][0])

    def create(self, key: str, data: bytes) -> None:
        if self.prefix + key in self.objects:
            raise ObjectExistsError("taken", key=key)
        self._put(key, data)

    def _put(self, key: str, data: bytes) -> None:
        self.objects[self.prefix + key] = data, next(_CLOCK)

    def upload(self, key: str, *, replace: bool = False) -> Upload:
        return _Sending(self, key, replace=replace)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        with self.open(source) as reader:
            if self.prefix + target in self.objects or self._below(target):
                raise ObjectExistsError("taken", key=target)
            self._put(target, reader.read(0, reader.entry.size))
        return "copy"

    def move(self, source: str, target: str) -> None:
        moved = [source] if self.prefix + source in self.objects else self._below(source)
        if not moved:
            raise ObjectMissingError("nothing is there", key=source)
        if self.prefix + target in self.objects or self._below(target):
            raise ObjectExistsError("taken", key=target)
        for key in moved:
            self._put(target + key.removeprefix(source), self.objects[self.prefix + key][0])
        self.remove(source)

    def remove(self, key: str) -> None:
        for name in (key, *self._below(key)):
            self.objects.pop(self.prefix + name, None)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            exclusive_create=True, exclusive_upload=True, links=False, folders=False, etags=True, any_name=True
        )


class _Bytes(Reader):
    def __init__(self, entry: Entry, data: bytes) -> None:
        self.entry, self._data = entry, data

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def check_unchanged(self) -> None:
        pass

    def done_with(self, offset: int, length: int) -> None:
        pass

    def close(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Sending(Upload):
    def __init__(self, store: FlatStore, key: str, *, replace: bool) -> None:
        self._store, self._key, self._replace, self._data = store, key, replace, b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += bytes(data)

    def commit(self) -> None:
        if self._replace:
            self._store._put(self._key, self._data)
        else:
            self._store.create(self._key, self._data)

    def abort(self) -> None:
        pass

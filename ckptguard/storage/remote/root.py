"""The root of a remote storage: an open fsspec file system, and the paths in it that keys stand for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ckptguard.errors import DeniedError
from ckptguard.storage.keys import parts_of
from ckptguard.storage.traits import traits_of
from ckptguard.values.ids import escape


class RemoteRoot:
    """A prefix of an fsspec file system.

    `connect` opens the file system, and does so again in a forked process, where the old connections are not ours.
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
        """The file system, as this process may use it."""
        if self._process != os.getpid():
            self._left_alone = self._file_system  # closing it here would close the parent's connections
            self._file_system, _ = self._connect()
            self._process = os.getpid()
        return self._file_system

    def path(self, key: str) -> str:
        """The path of a key; DeniedError where the store would silently take it for another one."""
        parts = parts_of(key)
        if not all(map(self.traits.holds, parts)):
            raise DeniedError(f"{escape(self.url)} cannot hold the name {escape(key)}", key=key)
        return "/".join([self._base, *parts]) if parts else self._base

    def object_path(self, key: str) -> str:
        """The same for an object that is to be written, of which the library must not cut the name."""
        path = self.path(key)
        if self.cut_above(path) is not None:
            raise DeniedError(f"{escape(self.url)} cannot hold an object named {escape(key)}", key=key)
        return path

    def cut_above(self, path: str) -> str | None:
        """The folder around a path that adlfs would cut short (it drops a "#" at the end); None for all others."""
        left = self.fs._strip_protocol(path).rstrip("/")
        return left.rpartition("/")[0] if left != path and path.startswith(left) else None

    def refuse(self, key: str) -> None:
        """DeniedError if a key is the root itself."""
        if not key:
            raise DeniedError(f"{escape(self.url)}: the root itself cannot be used so", key=key)

"""How an object that is too large for one request is put together, store by store.

`parts_for` picks the way. Every way keeps the object invisible until `finish`, and `abandon` leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from ckptguard.storage.remote.blocks_azure import AzureParts
from ckptguard.storage.remote.multipart_s3 import S3Parts
from ckptguard.storage.traits import StoreTraits


class MultipartUpload(Protocol):
    """One object on its way. `put` may be called from several threads where `parallel` is more than 1."""

    parallel: int

    def put(self, number: int, data: bytes) -> None:
        """Store part `number`, counted from 0."""

    def finish(self, *, exclusive: bool) -> None:
        """Join the parts; with `exclusive`, FileExistsError where the store can tell that the key is taken."""

    def abandon(self) -> None:
        """Forget the parts."""


def parts_for(traits: StoreTraits, file_system: Any, path: str, *, exclusive: bool) -> MultipartUpload:
    """The way for this kind of store; `exclusive`: the object must be new."""
    if traits.multipart == "held":
        return HeldParts(file_system, path, exclusive=exclusive)
    ways: dict[str, Callable[[Any, str], MultipartUpload]]
    ways = {"parts": S3Parts, "blocks": AzureParts, "joined": JoinedParts, "moved": MovedParts}
    return ways[traits.multipart](file_system, path)


class JoinedParts:
    """For stores that are memory themselves: all parts in one put."""

    parallel = 1

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs, self._path, self._data = file_system, path, bytearray()

    def put(self, number: int, data: bytes) -> None:
        del number
        self._data += data

    def finish(self, *, exclusive: bool) -> None:
        self._fs.pipe_file(self._path, bytes(self._data), mode="create" if exclusive else "overwrite")

    def abandon(self) -> None:
        self._data.clear()


class HeldParts:
    """For file systems whose files can be held back until they are committed (fsspec's transactions)."""

    parallel = 1

    def __init__(self, file_system: Any, path: str, *, exclusive: bool) -> None:
        mode = "xb" if exclusive else "wb"
        self._file = file_system.open(path, mode, autocommit=False, block_size=8 << 20)

    def put(self, number: int, data: bytes) -> None:
        del number
        self._file.write(data)

    def finish(self, *, exclusive: bool) -> None:
        del exclusive  # said at its beginning
        self._file.close()
        self._file.commit()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()


class MovedParts:
    """For all others: a temporary object that is moved to its name, as atomic as the file system's own move."""

    parallel = 1

    def __init__(self, file_system: Any, path: str) -> None:
        folder, _, _ = path.rpartition("/")
        self._fs, self._path, self._temporary = file_system, path, f"{folder}/.tmp-{secrets.token_hex(8)}"
        file_system.makedirs(folder, exist_ok=True)
        self._file = file_system.open(self._temporary, "wb")

    def put(self, number: int, data: bytes) -> None:
        del number
        self._file.write(data)

    def finish(self, *, exclusive: bool) -> None:
        self._file.close()
        if exclusive and self._fs.exists(self._path):
            raise FileExistsError(self._path)
        self._fs.mv(self._temporary, self._path)

    def abandon(self) -> None:
        for attempt in (self._file.close, lambda: self._fs.rm_file(self._temporary)):
            with contextlib.suppress(Exception):
                attempt()

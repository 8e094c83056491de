"""torch.distributed.checkpoint's own writer, with a digest of every byte taken while it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from blake3 import blake3
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter


class HashingWriter(FileSystemWriter):
    """Writes one file for this rank. Afterwards `digests` has the BLAKE3 of each file this rank wrote, by name."""

    def __init__(self, path: str) -> None:
        super().__init__(path, sync_files=True, overwrite=False)
        self.digests: dict[str, str] = {}
        self.fs = _HashingFileSystem(self.digests)


class _HashingFileSystem(FileSystem):
    def __init__(self, digests: dict[str, str]) -> None:
        self._digests = digests

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            try:
                yield cast(io.IOBase, hashing)
            except Exception as error:
                raise hashing.failure or error from error  # torch would only say where it stopped
            self._digests[os.path.basename(path)] = hashing.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._digests[os.path.basename(new_path)] = self._digests.pop(os.path.basename(path))


class _HashingStream:
    """A file that is only ever written to its end. Seeking is refused: the digest would be that of other bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hasher = blake3()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += self._stream.write(view[written:])
        except OSError as error:
            self.failure = error
            raise
        self._hasher.update(view)
        return written

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def tell(self) -> int:
        return int(self._stream.tell())

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self._stream.close()

"""A storage that tries again what may pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptguard.errors import ObjectMissingError, TransientError
from ckptguard.storage.protocol import Capabilities, Entry, Reader, Storage, Upload
from ckptguard.storage.retries import Retries

_BLOCK = 4 << 20

Entries = list[Entry]  # inside the class, `list` is the method


class RetryingStorage(Storage):
    """Another storage, whose transient failures are met by further tries; permanent ones are passed on at once.

    An upload's data is gone once it is handed over, so it is not repeated here: the storage below repeats its parts
    and its commit.
    """

    def __init__(self, storage: Storage, retries: Retries) -> None:
        self.inner, self.retries = storage, retries
        self.url, self.root = storage.url, storage.root

    def __repr__(self) -> str:
        return f"RetryingStorage({self.inner!r})"

    def list(self, prefix: str = "", *, recursive: bool = False, enter: Callable[[str], bool] | None = None) -> Entries:
        return self.retries.run(prefix, lambda: self.inner.list(prefix, recursive=recursive, enter=enter))

    def names(self, prefix: str = "") -> Sequence[str]:
        return self.retries.run(prefix, lambda: self.inner.names(prefix))

    def stat(self, key: str) -> Entry:
        return self.retries.run(key, lambda: self.inner.stat(key))

    def open(self, key: str) -> RetryingReader:
        return RetryingReader(self.retries.run(key, lambda: self.inner.open(key)), self.retries)

    def create(self, key: str, data: bytes) -> None:
        """As `Storage.create`. After a lost answer our own bytes under the key count as ours: so what must have one
        winner needs a nonce in it."""
        self.retries.run_exclusive(key, lambda: self.inner.create(key, data), lambda: self._holds(key, data))

    def upload(self, key: str, *, replace: bool = False) -> RetryingUpload:
        return RetryingUpload(self.retries.run(key, lambda: self.inner.upload(key, replace=replace)), key, self.retries)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        # What is there then is ours, or somebody's: only bytes that were read and found the same count as the copy.
        done = self.retries.run_exclusive(
            source, lambda: self.inner.copy(source, target, how=how), lambda: self._same(source, target)
        )
        return done or "copy"

    def move(self, source: str, target: str) -> None:
        """As `Storage.move`, tried once: after an unclear end nobody can say what was already moved. An object store
        tries its steps again."""
        self.inner.move(source, target)

    def remove(self, key: str) -> None:
        self.retries.run(key, lambda: self.inner.remove(key))

    def capabilities(self) -> Capabilities:
        return self.retries.run("", self.inner.capabilities)

    def free_space(self) -> int | None:
        return self.retries.run("", self.inner.free_space)

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            with self.inner.open(key) as reader:
                return reader.entry.size == len(data) and reader.read(0, len(data)) == data
        except ObjectMissingError as error:  # removed again, or not listed yet
            raise TransientError(f"{key}: cannot tell who created it", key=key) from error

    def _same(self, source: str, target: str) -> bool:
        with self.open(source) as one, self.open(target) as other:
            size = one.entry.size
            if other.entry.size != size:
                return False
            return all(
                one.read(at, min(_BLOCK, size - at)) == other.read(at, min(_BLOCK, size - at))
                for at in range(0, size, _BLOCK)
            )


class RetryingReader(Reader):
    """A reader whose transient failures are met by further tries."""

    def __init__(self, reader: Reader, retries: Retries) -> None:
        self.entry, self._reader, self._retries = reader.entry, reader, retries

    def read(self, offset: int, length: int) -> bytes:
        return self._retries.run(self.entry.key, lambda: self._reader.read(offset, length))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._retries.run(self.entry.key, lambda: self._reader.read_into(offset, buffer))

    def check_unchanged(self) -> None:
        self._retries.run(self.entry.key, self._reader.check_unchanged)

    def done_with(self, offset: int, length: int) -> None:
        self._reader.done_with(offset, length)

    def close(self) -> None:
        self._reader.close()


class RetryingUpload(Upload):
    """An upload that ends when it is called off, and that is then never committed."""

    def __init__(self, upload: Upload, key: str, retries: Retries) -> None:
        self._upload, self._key, self._retries = upload, key, retries

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._retries.once(self._key, lambda: self._upload.write(data))

    def commit(self) -> None:
        self._retries.once(self._key, self._upload.commit)

    def abort(self) -> None:
        self._upload.abort()

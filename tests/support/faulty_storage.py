"""Storages with faults, for campaigns: the N-th operation fails, or listings are late.

::

    faults = Faults(Fault.EIO, nth=3)
    with injected(faults):                  # every storage that is opened from now on, below the retries
        keep(open_run("memory://..."), ...)
    assert faults.reached                   # else the operation passed untouched: the campaign is over
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self
from unittest import mock

import ckptguard.storage
from ckptguard.errors import ObjectMissingError, StorageError, TransientError
from ckptguard.storage import Capabilities, Entry, Reader, Storage, Upload
from ckptguard.storage.failures import storage_error
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.storage.opening import open_remote
from ckptguard.storage.retries import Retries, RetryClock, RetryingStorage
from ckptguard.values.storage_options import StorageOptions


class Fault(enum.Enum):
    """What happens to an operation."""

    EIO = OSError(errno.EIO, os.strerror(errno.EIO))
    ENOSPC = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    EACCES = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    TIMEOUT = TimeoutError("timed out")
    UNAVAILABLE = OSError(errno.EBUSY, "503 Slow Down")
    RESET = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    LOST_ANSWER = "done, and then the connection is reset"
    WRONG_BYTES = "the right length, one bit of it wrong, and no error"
    TRUNCATED = "half of the bytes, and 200"

    @property
    def passes(self) -> bool:
        """Whether another try may succeed."""
        return self in (Fault.TIMEOUT, Fault.UNAVAILABLE, Fault.RESET, Fault.LOST_ANSWER)


WRITES = frozenset({"create", "write", "commit", "copy", "move", "remove"})
OPERATIONS = WRITES | {"list", "stat", "open", "read", "upload"}
_STRIKES = {
    Fault.ENOSPC: frozenset({"create", "upload", "write", "commit", "copy"}),
    Fault.LOST_ANSWER: WRITES,
    Fault.WRONG_BYTES: frozenset({"read", "create", "write", "copy"}),
    Fault.TRUNCATED: frozenset({"read", "create", "write", "copy"}),
}


class Faults:
    """Which operation fails, counted over all storages that this is given to, from 1; once, or for ever from there.

    Only operations that `kind` can strike are counted, and of them those that `only(operation, key)` wants.
    """

    def __init__(
        self,
        kind: Fault,
        nth: int,
        *,
        forever: bool = False,
        only: Callable[[str, str], bool] = lambda operation, key: True,
    ) -> None:
        self.kind, self.nth, self.forever = kind, nth, forever
        self.count = 0
        self.struck: list[tuple[str, str]] = []
        self._only = only
        self._lock = threading.Lock()

    @property
    def reached(self) -> bool:
        """Whether anything failed."""
        return bool(self.struck)

    def strikes(self, operation: str, key: str) -> bool:
        """Count one operation; whether it is to fail."""
        if operation not in _STRIKES.get(self.kind, OPERATIONS) or not self._only(operation, key):
            return False
        with self._lock:
            self.count += 1
            hit = self.count == self.nth or (self.forever and self.count > self.nth)
            if hit:
                self.struck.append((operation, key))
        return hit

    def error(self, key: str, url: str) -> StorageError:
        """The error of a struck operation, as a storage's own mapping makes it."""
        cause = self.kind.value if isinstance(self.kind.value, Exception) else Fault.RESET.value
        return storage_error(cause, key, url)

    def spoil(self, data: bytes) -> bytes:
        """What a lying store makes of bytes."""
        if self.kind is Fault.TRUNCATED:
            return data[: len(data) // 2]
        spoilt = bytearray(data)
        if spoilt:
            spoilt[len(spoilt) // 2] ^= 0x10
        return bytes(spoilt)


class FaultyStorage(Storage):
    """A storage over another one, some of whose operations fail."""

    def __init__(self, inner: Storage, faults: Faults) -> None:
        self.inner, self.faults = inner, faults

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def root(self) -> str | None:
        return self.inner.root

    def path_of(self, key: str) -> str:
        return self.inner.path_of(key)

    def settle_names(self, key: str) -> None:
        self.inner.settle_names(key)

    def list(
        self,
        prefix: str = "",
        *,
        recursive: bool = False,
        enter: Callable[[str], bool] | None = None,
        unread: bool = False,
    ) -> list[Entry]:
        return self._do(
            "list", prefix, lambda: self.inner.list(prefix, recursive=recursive, enter=enter, unread=unread)
        )

    def names(self, prefix: str = "") -> Sequence[str]:
        return [entry.key for entry in self.list(prefix, recursive=True)]

    def stat(self, key: str) -> Entry:
        return self._do("stat", key, lambda: self.inner.stat(key))

    def open(self, key: str) -> Reader:
        return _FaultyReader(self._do("open", key, lambda: self.inner.open(key)), self)

    def create(self, key: str, data: bytes) -> None:
        self._do("create", key, lambda: self.inner.create(key, data), lambda: self.inner.create(key, self._spoil(data)))

    def upload(self, key: str, *, replace: bool = False) -> Upload:
        return _FaultyUpload(self._do("upload", key, lambda: self.inner.upload(key, replace=replace)), key, self)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        def copy_badly() -> str:
            with self.inner.open(source) as reader:
                self.inner.create(target, self._spoil(reader.read(0, reader.entry.size)))
            return "copy"

        return self._do("copy", target, lambda: self.inner.copy(source, target, how=how), copy_badly)

    def move(self, source: str, target: str) -> None:
        self._do("move", source, lambda: self.inner.move(source, target))

    def remove(self, key: str) -> None:
        self._do("remove", key, lambda: self.inner.remove(key))

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def free_space(self) -> int | None:
        return self.inner.free_space()

    def renew(self, *folders: str, beside: str | None = None) -> bool:
        return False

    def now(self) -> Storage:
        return self

    def open_listed(self, entry: Entry) -> Reader:
        return self.open(entry.key)

    def _spoil(self, data: bytes) -> bytes:
        return self.faults.spoil(data)

    def _do(self, operation: str, key: str, act: Callable[[], Any], spoilt: Callable[[], Any] | None = None) -> Any:
        if not self.faults.strikes(operation, key):
            return act()
        if self.faults.kind in (Fault.WRONG_BYTES, Fault.TRUNCATED) and spoilt is not None:
            return spoilt()
        if self.faults.kind is Fault.LOST_ANSWER:
            act()
        raise self.faults.error(key, self.url)


class _FaultyReader:
    def __init__(self, inner: Reader, storage: FaultyStorage) -> None:
        self._inner, self._storage = inner, storage

    @property
    def entry(self) -> Entry:
        return self._inner.entry

    def read(self, offset: int, length: int) -> bytes:
        key = self.entry.key

        def spoilt() -> bytes:
            data = self._storage.faults.spoil(self._inner.read(offset, length))
            if len(data) != length:  # which no storage may return
                raise TransientError(f"{key}: asked for {length} bytes, got {len(data)}", key=key)
            return data

        data = self._storage._do("read", key, lambda: self._inner.read(offset, length), spoilt)
        assert isinstance(data, bytes)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def check_unchanged(self) -> None:
        self._inner.check_unchanged()

    def done_with(self, offset: int, length: int) -> None:
        self._inner.done_with(offset, length)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _FaultyUpload:
    def __init__(self, inner: Upload, key: str, storage: FaultyStorage) -> None:
        self._inner, self._key, self._storage = inner, key, storage

    def write(self, data: bytes | bytearray | memoryview) -> None:
        def spoilt() -> None:
            self._inner.write(self._storage.faults.spoil(bytes(data)))

        self._storage._do("write", self._key, lambda: self._inner.write(data), spoilt)

    def commit(self) -> None:
        self._storage._do("commit", self._key, self._inner.commit)

    def abort(self) -> None:
        self._inner.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


class FakeClock(RetryClock):
    """Time that passes only when somebody waits or says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.time = now
        self.waits: list[float] = []

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds

    def pause(self, seconds: float, stop: threading.Event) -> bool:
        """A wait on this clock, never called off."""
        del stop
        self.waits.append(seconds)
        self.time += seconds
        return False

    def retries(self, **settings: Any) -> Retries:
        """Retries that wait on this clock and do not draw lots."""
        return Retries(clock=self, **settings)

    def chance(self) -> float:
        return 0.0


class LateListing(FaultyStorage):
    """A storage whose listings lag: what was created or removed `delay(key)` seconds ago or less (by the clock) is
    not yet listed, or still is. Everything else is up to date, as it is on the stores that were known for this."""

    def __init__(self, inner: Storage, clock: FakeClock, delay: Callable[[str], float]) -> None:
        super().__init__(inner, Faults(Fault.EIO, nth=0))
        self._clock, self._delay = clock, delay
        self._created: dict[str, float] = {}
        self._removed: dict[str, tuple[float, Entry]] = {}

    def list(
        self,
        prefix: str = "",
        *,
        recursive: bool = False,
        enter: Callable[[str], bool] | None = None,
        unread: bool = False,
    ) -> list[Entry]:
        present = {entry.key: entry for entry in self.inner.list("", recursive=True)}
        now = self._clock.now()
        seen = {key: e for key, e in present.items() if now >= self._created.get(key, now)}
        late = {key: e for key, (until, e) in self._removed.items() if now < until and key not in present}
        return _folded({**seen, **late}, prefix, recursive, enter)

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        self._shows_later(key)

    def upload(self, key: str, *, replace: bool = False) -> Upload:
        return _LateUpload(self.inner.upload(key, replace=replace), key, self)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        done = super().copy(source, target, how=how)
        self._shows_later(target)
        return done

    def move(self, source: str, target: str) -> None:
        before = self._below(source)
        super().move(source, target)
        for entry in before:
            self._goes_later(entry)
            self._shows_later(target + entry.key.removeprefix(source))

    def remove(self, key: str) -> None:
        before = self._below(key)
        super().remove(key)
        for entry in before:
            self._goes_later(entry)

    def _below(self, key: str) -> list[Entry]:
        with contextlib.suppress(ObjectMissingError):
            entry = self.inner.stat(key)
            return [entry] if entry.kind != "folder" else self.inner.list(key, recursive=True)
        return []

    def _shows_later(self, key: str) -> None:
        self._created[key] = self._clock.now() + self._delay(key)

    def _goes_later(self, entry: Entry) -> None:
        self._removed[entry.key] = (self._clock.now() + self._delay(entry.key), entry)


class _LateUpload(_FaultyUpload):
    def commit(self) -> None:
        super().commit()
        assert isinstance(self._storage, LateListing)
        self._storage._shows_later(self._key)


def _folded(
    entries: dict[str, Entry], prefix: str, recursive: bool, enter: Callable[[str], bool] | None
) -> list[Entry]:
    """A listing made from a flat one."""
    found: dict[str, Entry] = {}
    start = f"{prefix}/" if prefix else ""
    for key, entry in entries.items():
        if not key.startswith(start):
            continue
        *folders, _ = key[len(start) :].split("/")
        above = [start + "/".join(folders[: n + 1]) for n in range(len(folders))]
        if not recursive and above:
            found[above[0]] = Entry(key=above[0], kind="folder")
        elif enter is None or all(map(enter, above)):
            found[key] = entry
    return sorted(found.values(), key=lambda entry: entry.key)


@contextlib.contextmanager
def injected(faults: Faults, retries: Callable[[], Retries] = lambda: FakeClock().retries()) -> Iterator[None]:
    """Every storage that is opened in this block has these faults, below the retries, which wait on a fake clock.

    Storages that were opened before have none.
    """
    with wrapped(lambda inner: FaultyStorage(inner, faults), retries):
        yield


@contextlib.contextmanager
def wrapped(
    wrap: Callable[[Storage], Storage], retries: Callable[[], Retries] = lambda: FakeClock().retries()
) -> Iterator[None]:
    """Every storage that is opened in this block is `wrap` of itself, below the retries."""

    def opened(place: str, given: Retries | None, options: StorageOptions) -> Storage:
        if "://" not in place:
            return wrap(LocalStorage(place))
        own = retries()
        own.stop = given.stop if given is not None else own.stop
        return RetryingStorage(wrap(open_remote(place, own, options)), own)

    with mock.patch.object(ckptguard.storage, "_opened", opened):
        yield

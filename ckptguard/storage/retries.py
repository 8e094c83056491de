"""Retry what may pass: limited in number and time, with jitter, and stopped at once on request."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ckptguard.errors import ObjectExistsError, ObjectMissingError, StoppedError, TransientError
from ckptguard.storage.protocol import Capabilities, Enter, Entry, Reader, Storage, Upload

T = TypeVar("T")


class RetryClock:
    """The time and the randomness that `Retries` uses."""

    def now(self) -> float:
        """Return the seconds of a clock that is never set."""
        return time.monotonic()

    def pause(self, seconds: float, stop: threading.Event) -> bool:
        """Wait this long, or until `stop` is set. Returns whether it is set."""
        return stop.wait(seconds)

    def chance(self) -> float:
        """Return a random number from 0 to 1."""
        return random.random()


_waiting: dict[object, float] = {}  # when each request that is not answered yet began


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    request = object()
    _waiting[request] = time.monotonic()
    try:
        yield
    finally:
        del _waiting[request]


def waits_since() -> float | None:
    """Return since when, on the monotonic clock, a request of this process waits for its answer. None if none does."""
    return min(list(_waiting.values()), default=None)


class Retries:
    """How often and how long to retry. Waits grow from `first` to `longest` seconds.

    Each wait is shortened at random by up to half, so that many clients do not return together. Setting `stop` ends a
    wait at once, and no further attempt begins.
    """

    def __init__(
        self,
        *,
        attempts: int = 8,
        first: float = 0.25,
        longest: float = 15.0,
        total: float = 90.0,
        stop: threading.Event | None = None,
        clock: RetryClock | None = None,
    ) -> None:
        self.stop = stop if stop is not None else threading.Event()
        self._attempts, self._first, self._longest, self._total = attempts, first, longest, total
        self._clock = clock if clock is not None else RetryClock()

    def run(self, key: str, act: Callable[[], T]) -> T:
        """Return the result of `act`. Only a TransientError is retried. Raises StoppedError when stopped."""
        begun = self._clock.now()
        with _noted():
            return self._run(key, act, begun)

    def _run(self, key: str, act: Callable[[], T], begun: float) -> T:
        for attempt in range(1, self._attempts + 1):
            try:
                return self.once(key, act)
            except TransientError as error:
                wait = min(self._first * 2 ** (attempt - 1), self._longest) * (1 - self._clock.chance() / 2)
                if attempt == self._attempts or self._clock.now() - begun + wait > self._total:
                    times = "once" if attempt == 1 else f"{attempt} times"
                    raise TransientError(f"{error.message} (tried {times})", key=error.key, hint=error.hint) from error
                if self._clock.pause(wait, self.stop):
                    raise StoppedError(f"{error.message}; stopped while waiting to try again", key=key) from error
        raise AssertionError("attempts must be at least 1")

    def run_exclusive(self, key: str, act: Callable[[], T], is_ours: Callable[[], bool]) -> T | None:
        """Do the same for an action that creates something at a free key. None: an earlier attempt had succeeded.

        An attempt whose answer was lost may have succeeded, and the next one finds the key taken. `is_ours` checks
        that.
        """
        unclear = False

        def attempt() -> T | None:
            nonlocal unclear
            try:
                return act()
            except TransientError:
                unclear = True
                raise
            except ObjectExistsError:
                if not unclear or not is_ours():
                    raise
                return None

        return self.run(key, attempt)

    def once(self, key: str, act: Callable[[], T]) -> T:
        """Return the result of `act`, unless stopped before."""
        if self.stop.is_set():
            raise StoppedError(f"{key}: stopped before the request", key=key)
        return act()


_BLOCK = 4 << 20

Entries = list[Entry]  # inside the class, `list` is the method


class RetryingStorage(Storage):
    """Another storage with retries after transient failures. Permanent ones are raised at once.

    An upload is not repeated here, because its data is gone: the inner storage repeats its parts and its commit.
    """

    def __init__(self, storage: Storage, retries: Retries) -> None:
        self.inner, self.retries = storage, retries
        self.url, self.root, self.copies_itself = storage.url, storage.root, storage.copies_itself

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> Entries:
        return self.retries.run(
            prefix, lambda: self.inner.list(prefix, recursive=recursive, enter=enter, unread=unread)
        )

    def names(self, prefix: str = "") -> Sequence[str]:
        return self.retries.run(prefix, lambda: self.inner.names(prefix))

    def stat(self, key: str) -> Entry:
        return self.retries.run(key, lambda: self.inner.stat(key))

    def open(self, key: str) -> RetryingReader:
        return RetryingReader(self.retries.run(key, lambda: self.inner.open(key)), self.retries)

    def create(self, key: str, data: bytes) -> None:
        """Create. After a lost answer equal bytes count as ours, so a record that needs one winner must contain a
        nonce."""
        self.retries.run_exclusive(key, lambda: self.inner.create(key, data), lambda: self._holds(key, data))

    def upload(self, key: str, *, replace: bool = False) -> RetryingUpload:
        return RetryingUpload(self.retries.run(key, lambda: self.inner.upload(key, replace=replace)), key, self.retries)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        # An existing target may be another's: only bytes that are read and equal count as the copy.
        done = self.retries.run_exclusive(
            source, lambda: self.inner.copy(source, target, how=how), lambda: self._same(source, target)
        )
        return done or "copy"

    def move(self, source: str, target: str) -> None:
        """Move, without a retry: after an unclear end nobody knows what was moved. An object store retries its
        steps."""
        self.inner.move(source, target)

    def remove(self, key: str) -> None:
        self.retries.run(key, lambda: self.inner.remove(key))

    def capabilities(self) -> Capabilities:
        return self.retries.run("", self.inner.capabilities)

    def free_space(self) -> int | None:
        return self.retries.run("", self.inner.free_space)

    def open_listed(self, entry: Entry) -> RetryingReader:
        return RetryingReader(self.inner.open_listed(entry), self.retries)

    def copy_listed(self, entry: Entry, target: str, *, how: str = "copy") -> str:
        done = self.retries.run_exclusive(
            entry.key,
            lambda: self.inner.copy_listed(entry, target, how=how),
            lambda: self._same(entry.key, target),
        )
        return done or "copy"

    def remove_listed(self, keys: Sequence[str]) -> None:
        self.retries.run(keys[0] if keys else "", lambda: self.inner.remove_listed(keys))

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            with self.inner.open(key) as reader:
                return reader.entry.size == len(data) and reader.read(0, len(data)) == data
        except ObjectMissingError as error:  # removed again, or not listed yet
            raise TransientError(f"{key}: could not find out who created it", key=key) from error

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
    """A reader with retries after transient failures."""

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
    """An upload that ends when it is stopped, and is then never committed."""

    def __init__(self, upload: Upload, key: str, retries: Retries) -> None:
        self._upload, self._key, self._retries = upload, key, retries

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._retries.once(self._key, lambda: self._upload.write(data))

    def commit(self) -> None:
        self._retries.once(self._key, self._upload.commit)

    def abort(self) -> None:
        self._upload.abort()

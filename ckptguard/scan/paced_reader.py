"""Read a file front to back, once, block by block, at a given pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptguard.errors import StoppedError
from ckptguard.scan.options import Progress
from ckptguard.storage.protocol import Reader
from ckptguard.storage.read_ahead import IN_FLIGHT, ReadAhead

CATCH_UP = 0.25  # seconds of reading to catch up at most: more would be a burst that training feels
REMOTE_BLOCK = 8 << 20  # each is one request, and one part of an upload
_TICK = 0.1  # seconds between checks for a stop while waiting


class Rate:
    """Limits reading to a number of bytes per second. Threads may share it.

    Lost time, from a slow disk or a long sleep, is caught up by at most `CATCH_UP`. Idle time is not saved beyond that.
    """

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, length: int) -> float:
        """Count bytes that were read. Returns how many seconds to wait before reading more."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - CATCH_UP) + length / self._per_second
            return max(0.0, self._free_at - now)


class Pace:
    """The pace of everything that shares it or its `rate`. `hold` is called before each block and while waiting.

    `hold` may wait, or raise to end the reading. `progress` is called for every byte.
    """

    def __init__(
        self, rate: float | Rate | None = None, hold: Callable[[], None] | None = None, progress: Progress | None = None
    ) -> None:
        self._rate = Rate(rate, time.monotonic) if isinstance(rate, float | int) else rate
        self._hold = hold
        self._progress = progress

    def until(self, over: threading.Event) -> Pace:
        """Return the same pace, which raises StoppedError once `over` is set."""

        def hold() -> None:
            self.before()
            if over.is_set():
                raise StoppedError("another file failed", key="")

        return Pace(self._rate, hold, self._progress)

    @property
    def is_limited(self) -> bool:
        """True if there is a rate."""
        return self._rate is not None

    def before(self) -> None:
        """Wait until a block may be read."""
        if self._hold is not None:
            self._hold()

    def passed(self, length: int) -> None:
        """Count bytes that were read. Returns when the rate allows more."""
        if self._progress is not None:
            self._progress(length)
        if self._rate is None:
            return
        end = time.monotonic() + self._rate.take(length)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK))
            self.before()


def read_through(
    reader: Reader, take: Callable[[bytes], None], pace: Pace, *, block: int, remote: bool, ahead: int = IN_FLIGHT
) -> None:
    """Give every byte of a file to `take`, in order. The next blocks of a remote file are requested ahead.

    At most `ahead` blocks are in memory; with a rate, one and the current one.
    """
    if not remote or reader.entry.size <= block:
        _blocks(reader, take, pace, block)
        return
    ahead = 1 if pace.is_limited else ahead
    with (
        ThreadPoolExecutor(ahead, thread_name_prefix="ckptguard-read") as threads,
        ReadAhead(reader, threads, chunk=block, in_flight=lambda: ahead) as source,
    ):
        _blocks(source, take, pace, block)


def _blocks(reader: Reader, take: Callable[[bytes], None], pace: Pace, block: int) -> None:
    size = reader.entry.size
    for at in range(0, size, block):
        length = min(block, size - at)
        pace.before()
        take(reader.read(at, length))
        reader.done_with(at, length)
        pace.passed(length)

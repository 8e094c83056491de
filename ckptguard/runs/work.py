"""How to do a piece of work: the scanner, the progress callback, the rate, and when to stop."""

from __future__ import annotations

import threading

import msgspec

from ckptguard.scan import Progress, Scanner, scan_files


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """`progress` is called for every byte read, `rate` is the most bytes per second, `stop` ends the work once it is
    set."""

    scanner: Scanner = scan_files
    progress: Progress | None = None
    rate: float | None = None
    stop: threading.Event | None = None

    def is_stopped(self) -> bool:
        """True if the work should end early."""
        return self.stop is not None and self.stop.is_set()


PLAIN = Work()

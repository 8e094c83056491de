"""How a piece of work is done, whatever it is: by which scanner, told to whom, at which rate, until when."""

from __future__ import annotations

import threading

import msgspec

from ckptguard.scan import Progress, Scanner, scan_files


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """`progress` is told of every byte read, `rate` are bytes a second at most, `stop` ends work once it is set."""

    scanner: Scanner = scan_files
    progress: Progress | None = None
    rate: float | None = None
    stop: threading.Event | None = None

    def is_stopped(self) -> bool:
        """Whether to end early."""
        return self.stop is not None and self.stop.is_set()


PLAIN = Work()

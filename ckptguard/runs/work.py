"""How to do a piece of work: the scanner, the progress callback, the rate, and when to stop or to yield."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError
from ckptguard.layouts import Checkpoint
from ckptguard.runs.results import Checked
from ckptguard.scan import Progress, Scanner, scan_files

if TYPE_CHECKING:  # its threads are not for everybody
    from ckptguard.scan.paced_reader import Rate


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """How work is done.

    - `progress` is called for every byte read.
    - `rate` is the most bytes per second. Pieces of work may share a `Rate`.
    - `stop` ends the work once it is set.
    - `may_begin` says whether this number of bytes may be read next. If not, the work ends early, and the caller
      repeats it.
    - `on_verdict` is called with each verdict of a pass at once.
    - `on_early` is called with a checkpoint that was read before its turn, and what to say of it.
    - `yield_for`: seconds for which a scan may yield to everything else; see `ScanOptions`.
    """

    scanner: Scanner = scan_files
    progress: Progress | None = None
    rate: float | Rate | None = None
    stop: threading.Event | None = None
    may_begin: Callable[[int], bool] = lambda size: True
    on_verdict: Callable[[Checked], None] = lambda checked: None
    on_early: Callable[[Checkpoint, str], None] = lambda checkpoint, words: None
    yield_for: float | None = None

    def is_stopped(self) -> bool:
        """True if the work should end early."""
        return self.stop is not None and self.stop.is_set()


PLAIN = Work()


@contextlib.contextmanager
def noted(troubles: list[str], what: str) -> Iterator[None]:
    """Add a problem as a sentence that begins with `what`, so that it stops nothing else."""
    try:
        yield
    except (BusyError, CouldNotTellError) as error:
        troubles.append(f"{what}: {error.message}")

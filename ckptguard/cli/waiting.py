"""Say on a terminal that a store does not answer: nobody should have to guess why nothing happens."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from ckptguard.terminal.output import trouble

LONGEST_SILENCE = 5.0  # seconds
_LOOK = 0.5


def report_waits(words: Sequence[str]) -> None:
    """Say it once while a command line of these `words` works on a store, and somebody watches."""
    watched = sys.stderr is not None and sys.stderr.isatty() and "--json" not in words
    # supervise holds the signals: it must be the first to start threads.
    if watched and "supervise" not in words[:1]:
        threading.Thread(target=tell_of_wait, daemon=True).start()


def tell_of_wait() -> None:
    """Look until a request takes long, or the process ends."""
    while True:
        time.sleep(_LOOK)
        retries = sys.modules.get("ckptguard.storage.retries")  # absent until a store is opened
        began = None if retries is None else retries.waits_since()
        if began is not None and time.monotonic() - began > LONGEST_SILENCE:
            trouble("waiting for the storage to answer; Ctrl-C ends it")
            return

"""Say on a terminal that a store does not answer: nobody should have to guess why nothing happens."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from ckptguard.terminal.output import trouble

LONGEST_SILENCE = 5.0  # seconds
_LOOK = 0.5


@contextlib.contextmanager
def waits_reported(words: Sequence[str]) -> Iterator[None]:
    """Say it once while a command line of these `words` works on a store, and somebody watches."""
    watched = sys.stderr is not None and sys.stderr.isatty() and "--json" not in words
    # supervise holds the signals: it must be the first to start threads.
    if not watched or "supervise" in words[:1] or not any("://" in word for word in words):
        yield
        return
    ended = threading.Event()
    threading.Thread(target=tell_of_wait, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def tell_of_wait(ended: threading.Event) -> None:
    """Look until a request takes long, or all is done."""
    while not ended.wait(_LOOK):
        retries = sys.modules.get("ckptguard.storage.retries")  # absent until a store is opened
        began = None if retries is None else retries.waits_since()
        if began is not None and time.monotonic() - began > LONGEST_SILENCE:
            trouble("waiting for the storage to answer; Ctrl-C ends it")
            return

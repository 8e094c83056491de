"""Python's garbage collector, kept quiet while large structures grow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No automatic collection inside. What readers build has no cycles to find, but looking for them again and again
    takes as long as the reading itself. A collector that was off stays off."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()

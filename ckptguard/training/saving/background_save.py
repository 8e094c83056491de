"""One save behind training's back: it is sealed, or fails, or is abandoned and then never counts."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("ckptguard")
EXIT_SECONDS = 60.0

_in_flight: set[BackgroundSave] = set()


class SaveAbandoned(Exception):
    """Raised inside of a save that was given up."""


class Gate:
    """Between a save and whoever may abandon it: both cannot have their way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._abandoned = False
        self._waits_for_room = False

    def check_stop(self) -> None:
        """SaveAbandoned, if nobody waits for this save any more."""
        if self._abandoned:
            raise SaveAbandoned

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the save any more."""
        return self._abandoned

    @property
    def waits_for_room(self) -> bool:
        """Whether nothing is written for want of space."""
        return self._waits_for_room

    def tell_whether_it_waits(self, waits: bool) -> None:
        """The save begins to wait for room, or has it."""
        self._waits_for_room = waits

    def abandon(self) -> bool:
        """Nobody waits for the save any more; False if it is sealed already and counts."""
        with self._lock:
            self._abandoned = not self._over
            return self._abandoned

    def end(self) -> bool:
        """The save is sealed; False if it had been abandoned before that, and must not be trusted."""
        with self._lock:
            self._over = not self._abandoned
            return self._over


class BackgroundSave:
    """Runs `write(gate)` in a thread. When something goes wrong `failed(error)` is called there, before it is over;
    then it is the `error`."""

    def __init__(self, step: int, write: Callable[[Gate], object], *, failed: Callable[[Exception], None]) -> None:
        self.step = step
        self.error: Exception | None = None
        self._write, self._failed = write, failed
        self._gate = Gate()
        self._owner = os.getpid()
        self._over = threading.Event()
        # A daemon thread: the interpreter would wait for any other without end. `_wait_at_exit` does, within bounds.
        self._thread = threading.Thread(target=self._run, name=f"ckptguard-save-{step}", daemon=True)
        _in_flight.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads: other ranks count on this one's part all the same
            _log.warning("step %s is saved while training waits: %s", step, error)
            self._run()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the save is over, after it had `seconds` for that (None: as long as it takes)."""
        if self._owner != os.getpid():
            return True  # forked: the thread lives on in the parent only
        return self._over.wait(seconds)

    @property
    def waits_for_room(self) -> bool:
        """Whether it has not begun to write, because the storage is full."""
        return self._gate.waits_for_room

    def abandon(self) -> bool:
        """Wait for it no longer, and never let it count; False if it is sealed already."""
        _in_flight.discard(self)
        return self._gate.abandon()

    def _run(self) -> None:
        try:
            self._write(self._gate)
        except SaveAbandoned:
            pass
        except Exception as error:
            if not self._gate.abandoned:  # its end was told when it was abandoned
                self.error = error
                self._failed(error)
        finally:
            self._over.set()
            _in_flight.discard(self)


def _wait_at_exit() -> None:
    """What is in flight when the interpreter ends gets a minute. Then it stays unsealed, which is never good."""
    end = time.monotonic() + EXIT_SECONDS
    for save in list(_in_flight):
        if not save.wait(max(0.0, end - time.monotonic())) and save.abandon():
            _log.error("the save of step %s was not finished when the interpreter ended: it does not count", save.step)


atexit.register(_wait_at_exit)

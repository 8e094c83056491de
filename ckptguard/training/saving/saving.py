"""When a guard's checkpoints are written, and what becomes of those that fail.

A save behind training's back is sealed, or fails, or is abandoned and then never counts.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import CouldNotTellError, RanksError, SettingsError, SickTrainingError, StorageFullError
from ckptguard.training.ranks import Ranks
from ckptguard.training.saving.destinations import Gate, SaveAbandoned
from ckptguard.training.saving.stores import CopyingStore, Store

_log = logging.getLogger("ckptguard")
EXIT_SECONDS = 60.0
_in_flight: set[BackgroundSave] = set()


class BackgroundSave:
    """Runs `write(gate)` in a thread. When something goes wrong `failed(error)` is called there, before it is over;
    then it is the `error`."""

    def __init__(self, step: int, write: Callable[[Gate], object], *, failed: Callable[[Exception], None]) -> None:
        self.step = step
        self.error: Exception | None = None
        self.gate = Gate()
        self._write, self._failed = write, failed
        self._owner = os.getpid()
        self._over = threading.Event()
        # A daemon thread: the interpreter would wait for any other without end. `_wait_at_exit` does, within bounds.
        thread = threading.Thread(target=self._run, name=f"ckptguard-save-{step}", daemon=True)
        _in_flight.add(self)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: other ranks count on this one's part all the same
            _log.warning("step %s is saved while training waits: %s", step, error)
            self._run()

    def wait(self, seconds: float | None = None) -> bool:
        """True if the save is over, after it had `seconds` for that (None: as long as it takes)."""
        if self._owner != os.getpid():
            return True  # forked: the thread lives on in the parent only
        return self._over.wait(seconds)

    def abandon(self) -> bool:
        """Wait for it no longer, and never let it count; False if it is sealed already."""
        _in_flight.discard(self)
        return self.gate.abandon()

    def _run(self) -> None:
        try:
            self._write(self.gate)
        except SaveAbandoned:
            pass
        except Exception as error:
            if not self.gate.abandoned:  # its end was told when it was abandoned
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


class Saves:
    """The saves of one guard, one after the other. `last` is the step that was saved or loaded last. `tell(step,
    error)` is called when a save behind training's back fails, in the thread where that happens. Of several ranks all
    call the same, in the same order, except for `close`; what became of a save is known to all at once, when they
    ask."""

    def __init__(self, store: Store, tell: Callable[[int, Exception], None], ranks: Ranks | None = None) -> None:
        self._store, self._tell, self._ranks = store, tell, ranks if ranks is not None else Ranks()
        self._in_flight: BackgroundSave | None = None
        self._asked = False  # whether the user asked for what is in flight
        self._before: int | None = None  # `last`, if that fails
        self._unheard: list[Exception] = []
        self.last: int | None = None
        self.found_sick = False  # a copy turned out to hold NaN: training should be looked at

    def must_copy(self) -> CopyingStore:
        """The store, if it can save behind training's back; else SettingsError."""
        if not isinstance(self._store, CopyingStore):
            raise SettingsError(
                "a save= of your own cannot go on behind training: it reads the state that training changes",
                hint="leave out blocking=False",
            )
        return self._store

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        return not self.wait(0)

    def begin(self, step: int, extra: Mapping[str, Any], *, blocking: bool = True, asked: bool = False) -> str:
        """Save, once no other save is in flight; returns the checkpoint's path in the run. Whatever goes wrong is
        raised. Not `blocking`: it returns as soon as everything is copied, and what goes wrong later is told. If the
        user `asked` for this save it is also kept for `raise_unheard`. One before it that found no room yet gives way:
        training never waits for room behind its back."""
        current = self._in_flight
        if current is not None and self._ranks.size == 1 and current.gate.waits_for_room and current.abandon():
            self._in_flight = None
            self._tell_abandoned(current, StorageFullError("there was no room for it until the next was due", key=""))
        self.drain()
        path = None if blocking else self._begin_behind(step, extra, asked=asked)
        if path is None:
            path = self._store.write(step, extra)
            self.last = step
        return path

    def wait(self, seconds: float | None = None) -> bool:
        """True if no save is in flight any more, after it had `seconds` to end (None: as long as it takes)."""
        current = self._in_flight
        if current is None:
            return True
        if self._ranks.any(not current.wait(seconds)):
            return False
        self._in_flight = None
        answers = self._ranks.gather(None if current.error is None else str(current.error))
        if answers[0] is not None:  # rank 0 seals: what it says holds for all
            self._failed(current, current.error or RanksError(f"rank 0: {answers[0]}"))
        return True

    def drain(self, seconds: float | None = None) -> None:
        """Return once no save is in flight; one that takes longer than `seconds` is abandoned: it will never count.
        RanksError if a rank is gone."""
        current = self._in_flight
        if current is not None and not self.wait(seconds):
            self._in_flight = None
            if self._ranks.tell(current.abandon()):
                self._tell_abandoned(current, _too_long(seconds))

    def close(self, seconds: float) -> None:
        """The same on this rank alone, whatever the others do; never raises."""
        current, self._in_flight = self._in_flight, None
        if current is not None and current.wait(seconds):
            if current.error is not None:
                self._failed(current, current.error)
        elif current is not None and current.abandon():
            self._tell_abandoned(current, _too_long(seconds))

    def raise_unheard(self) -> None:
        """Raise the failure of a save that the user asked for and that has not been raised yet."""
        self.wait(0)
        if self._unheard:
            raise self._unheard.pop(0)

    def _begin_behind(self, step: int, extra: Mapping[str, Any], *, asked: bool) -> str | None:
        store = self.must_copy()
        try:
            copied = store.copy(step, extra)
        except MemoryError as error:
            _log.warning("step %s is saved while training waits: %s", step, error)
            return None

        def failed(error: Exception) -> None:
            self.found_sick |= isinstance(error, SickTrainingError)
            self._tell(step, error)

        self._asked, self._before, self.last = asked, self.last, step
        self._in_flight = BackgroundSave(step, copied.write, failed=failed)
        return copied.path

    def _failed(self, save: BackgroundSave, error: Exception) -> None:
        self._forget(save)
        if self._asked:
            self._unheard.append(error)

    def _tell_abandoned(self, save: BackgroundSave, why: Exception) -> None:
        self._forget(save)
        if save.error is None:
            self._tell(save.step, why)

    def _forget(self, save: BackgroundSave) -> None:
        if self.last == save.step:
            self.last = self._before


def _too_long(seconds: float | None) -> CouldNotTellError:
    return CouldNotTellError(f"it took longer than {seconds:g} s more and was abandoned unsealed")

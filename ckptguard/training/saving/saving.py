"""When a guard writes checkpoints, and what happens to failed ones.

A background save is sealed, or fails, or is abandoned and then never counts.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import CouldNotTellError, RanksError, SickTrainingError, StorageFullError
from ckptguard.training.ranks import Ranks
from ckptguard.training.saving.destinations import SaveAbandoned, SaveTurn
from ckptguard.training.saving.stores import PreparedSave, Store
from ckptguard.values.own_log import log as _log

EXIT_SECONDS = 60.0
_in_flight: set[BackgroundSave] = set()


class BackgroundSave:
    """Runs `write(turn)` in a thread. After an error it calls `failed(error)` there, before it is over, and keeps
    `error`."""

    def __init__(
        self, step: int, write: Callable[[SaveTurn], object], *, failed: Callable[[Exception], None], full: bool = True
    ) -> None:
        self.step, self.full = step, full
        self.error: Exception | None = None
        self.turn = SaveTurn()
        self._write, self._failed = write, failed
        self._owner = os.getpid()
        self._over = threading.Event()
        # A daemon thread: the interpreter would wait for any other forever. `_wait_at_exit` waits with a limit.
        thread = threading.Thread(target=self._run, name=f"ckptguard-save-{step}", daemon=True)
        _in_flight.add(self)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: other ranks rely on this one's part
            _log.warning("step %s is saved while training waits: %s", step, error)
            self._run()

    def wait(self, seconds: float | None = None) -> bool:
        """True if the save ended within `seconds` (None: unlimited)."""
        if self._owner != os.getpid():
            return True  # forked: the thread exists only in the parent
        return self._over.wait(seconds)

    def abandon(self) -> bool:
        """Stop waiting for it, and never let it count. False if it is already sealed."""
        _in_flight.discard(self)
        return self.turn.abandon()

    def _run(self) -> None:
        try:
            self._write(self.turn)
        except SaveAbandoned:
            pass
        except Exception as error:
            if not self.turn.abandoned:  # its end was reported when it was abandoned
                self.error = error
                self._failed(error)
        finally:
            self._over.set()
            _in_flight.discard(self)


def _wait_at_exit() -> None:
    """Give saves in flight a minute when the interpreter ends. An unfinished one stays unsealed, which is never
    good."""
    end = time.monotonic() + EXIT_SECONDS
    for save in list(_in_flight):
        if not save.wait(max(0.0, end - time.monotonic())) and save.abandon():
            _log.error("the save of step %s was not finished when the interpreter ended: it does not count", save.step)


atexit.register(_wait_at_exit)


class SaveQueue:
    """The saves of one guard, one after another. `last` is the step that was saved or loaded last.

    `tell(step, error)` is called in the background thread when a background save fails. All ranks call the same methods
    in the same order, except for `close`. They learn the result of a save together, when they ask.
    """

    def __init__(self, store: Store, tell: Callable[[int, Exception], None], ranks: Ranks) -> None:
        self._store, self._tell, self._ranks = store, tell, ranks
        self._in_flight: BackgroundSave | None = None
        self._asked = False  # whether the user asked for the save in flight
        self._before: int | None = None  # `last`, if that fails
        self._unheard: list[Exception] = []
        self._since_full: int | None = None  # saves without the optimizer since one with it; None: the next has it
        self.last: int | None = None
        self.found_sick = False  # a copy held NaN: training should be checked

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        return not self.wait(0)

    def full_is_due(self, every: int) -> bool:
        """True if the next save should hold the optimizer, so that each save of `every` does. The first one after a
        load does, and the one after a full save that failed."""
        return self._since_full is None or self._since_full + 1 >= every

    def went_to(self, step: int) -> None:
        """Note that training goes on from what was loaded."""
        self.last, self._since_full = step, None

    def begin(
        self, step: int, extra: Mapping[str, Any], *, blocking: bool = True, asked: bool = False, full_every: int = 1
    ) -> str:
        """Save once no other save is in flight, without the optimizer unless a full save of `full_every` is due.
        Returns the checkpoint's path in the run. Errors are raised.

        Without `blocking` it returns after the copy, and later errors go to `tell`. If the user `asked` for this save,
        they are also kept for `raise_unheard`. An earlier save that still waits for free space is dropped: training
        never waits for space in the background.
        """
        current = self._in_flight
        if current is not None and self._ranks.size == 1 and current.turn.waits_for_room and current.abandon():
            self._in_flight = None
            self._tell_abandoned(
                current, StorageFullError("there was no space for it until the next save was due", key="")
            )
        self.drain()  # of the save before it is known now whether it stands
        full = self.full_is_due(full_every)
        copied = None if blocking else self._copied(step, extra, full)
        save = copied or self._store.prepare(step, extra, full=full)
        if copied is None:
            save.write(SaveTurn())
        else:
            self._asked, self._before = asked, self.last
            failed = functools.partial(self._failed_behind, step)
            self._in_flight = BackgroundSave(step, save.write, failed=failed, full=full)
        self.last = step
        self._since_full = 0 if full else (self._since_full or 0) + 1
        return save.path

    def wait(self, seconds: float | None = None) -> bool:
        """True if no save is in flight, after waiting up to `seconds` (None: unlimited)."""
        current = self._in_flight
        if current is None:
            return True
        if self._ranks.any(not current.wait(seconds)):
            return False
        self._in_flight = None
        answers = self._ranks.gather(None if current.error is None else str(current.error))
        if answers[0] is not None:  # rank 0 seals: its result holds for all
            self._failed(current, current.error or RanksError(f"rank 0: {answers[0]}"))
        return True

    def drain(self, seconds: float | None = None) -> None:
        """Return once no save is in flight. One that takes longer than `seconds` is abandoned and will never count.

        Raises RanksError if a rank is gone.
        """
        current = self._in_flight
        if current is not None and not self.wait(seconds):
            self._in_flight = None
            if self._ranks.tell(current.abandon()):
                self._tell_abandoned(current, _too_long(seconds))

    def close(self, seconds: float) -> None:
        """Do the same on this rank alone, whatever the others do. Never raises."""
        current, self._in_flight = self._in_flight, None
        if current is not None and current.wait(seconds):
            if current.error is not None:
                self._failed(current, current.error)
        elif current is not None and current.abandon():
            self._tell_abandoned(current, _too_long(seconds))

    def raise_unheard(self) -> None:
        """Raise the error of a save that the user asked for, if it was not raised yet."""
        self.wait(0)
        if self._unheard:
            raise self._unheard.pop(0)

    def _copied(self, step: int, extra: Mapping[str, Any], full: bool) -> PreparedSave | None:
        try:
            return self._store.prepare(step, extra, copy=True, full=full)
        except MemoryError as error:
            _log.warning("step %s is saved while training waits: %s", step, error)
            return None

    def _failed_behind(self, step: int, error: Exception) -> None:
        self.found_sick |= isinstance(error, SickTrainingError)
        self._tell(step, error)

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
        if save.full:
            self._since_full = None


def _too_long(seconds: float | None) -> CouldNotTellError:
    return CouldNotTellError(f"it took more than {seconds:g} s longer and was abandoned unsealed")

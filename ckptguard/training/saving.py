"""When a guard's checkpoints are written, and what becomes of those that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import CouldNotTellError, SettingsError, SickTrainingError
from ckptguard.training.background_save import BackgroundSave
from ckptguard.training.stores import CopyingStore, Store

_log = logging.getLogger("ckptguard")


class Saving:
    """The saves of one guard, one after the other. `last` is the step that was saved or loaded last.

    `tell(step, error)` is called when a save behind training's back fails, in the thread where that happens.
    """

    def __init__(self, store: Store, tell: Callable[[int, Exception], None]) -> None:
        self._store, self._tell = store, tell
        self._in_flight: BackgroundSave | None = None
        self._unheard: list[Exception] = []
        self.last: int | None = None
        self.found_sick = False  # a copy turned out to hold NaN: training should be looked at

    def must_copy(self) -> CopyingStore:
        """The store, if it can save behind training's back; else SettingsError."""
        if not isinstance(self._store, CopyingStore):
            raise SettingsError("these saves cannot go on behind training", hint="leave out blocking=False")
        return self._store

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return not self.wait(0)

    def begin(self, step: int, extra: Mapping[str, Any], *, blocking: bool = True, asked: bool = False) -> str:
        """Save, once no other save is in flight; returns the checkpoint's path in the run.

        Whatever goes wrong is raised. Not `blocking`: it returns as soon as everything is copied, and what goes wrong
        later is told, and if the user `asked` for this save it is kept for `raise_unheard`.
        """
        self.drain()
        path = None if blocking else self._begin_behind(step, extra, asked=asked)
        if path is None:
            path = self._store.write(step, extra)
            self.last = step
        return path

    def wait(self, seconds: float | None = None) -> bool:
        """Whether no save is in flight any more, after it had `seconds` to end."""
        return self._in_flight is None or self._in_flight.wait(seconds)

    def drain(self, seconds: float | None = None) -> None:
        """Return once no save is in flight; one that takes longer than `seconds` is abandoned: it will never count.
        Never raises."""
        current = self._in_flight
        if current is not None and not current.wait(seconds) and current.abandon():
            error = CouldNotTellError(f"it took longer than {seconds:g} s more and was abandoned unsealed")
            self._tell(current.step, error)
        self._in_flight = None

    def raise_unheard(self) -> None:
        """Raise the failure of a save that the user asked for and that has not been raised yet."""
        if self._unheard:
            raise self._unheard.pop(0)

    def _begin_behind(self, step: int, extra: Mapping[str, Any], *, asked: bool) -> str | None:
        store, before = self.must_copy(), self.last
        try:
            copied = store.copy(step, extra)
        except MemoryError as error:
            _log.warning("step %s is saved while training waits: %s", step, error)
            return None

        def failed(error: Exception) -> None:
            if self.last == step:
                self.last = before
            self.found_sick |= isinstance(error, SickTrainingError)
            if asked:
                self._unheard.append(error)
            self._tell(step, error)

        self.last = step
        self._in_flight = BackgroundSave(step, copied.write, failed=failed)
        return copied.path

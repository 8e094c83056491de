"""When a guard's checkpoints are written, and what becomes of those that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import CouldNotTellError, SettingsError
from ckptguard.training.background_save import BackgroundSave
from ckptguard.training.stores import CopyingStore, Store

_log = logging.getLogger("ckptguard")


def _log_failure(step: int, error: Exception) -> None:
    _log.error("step %s could not be saved: %s", step, error, exc_info=error)


class Saving:
    """The saves of one guard, one after the other. `last` is the step that was saved or loaded last.

    `tell(step, error)` is called when a save behind training's back fails, in the thread where that happens.
    """

    def __init__(self, store: Store, tell: Callable[[int, Exception], None] = _log_failure) -> None:
        self._store, self._tell = store, tell
        self._in_flight: BackgroundSave | None = None
        self._unheard: list[Exception] = []
        self.last: int | None = None

    @property
    def can_copy(self) -> bool:
        """Whether saves behind training's back are possible."""
        return isinstance(self._store, CopyingStore)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._in_flight is not None and not self._in_flight.wait(0)

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

    def drain(self, seconds: float | None = None) -> None:
        """Return once no save is in flight; one that takes longer than `seconds` is abandoned: it will never count.
        Never raises."""
        current = self._in_flight
        if current is not None and not current.wait(seconds) and current.abandon():
            error = CouldNotTellError(f"it took longer than {seconds:g} s more and was abandoned unsealed")
            self._tell(current.step, error)
        self._in_flight = None

    def failed(self) -> list[tuple[int, Exception]]:
        """Nothing: failures are told where they happen."""
        return []

    def raise_unheard(self) -> None:
        """Raise the failure of a save that the user asked for and that has not been raised yet."""
        if self._unheard:
            raise self._unheard.pop(0)

    def _begin_behind(self, step: int, extra: Mapping[str, Any], *, asked: bool) -> str | None:
        if not isinstance(self._store, CopyingStore):
            raise SettingsError("saves with save= cannot go on behind training", hint="leave out blocking=False")
        try:
            copied = self._store.copy(step, extra)
        except MemoryError as error:
            _log.warning("step %s is saved while training waits: %s", step, error)
            return None

        def failed(error: Exception) -> None:
            if asked:
                self._unheard.append(error)
            self._tell(step, error)

        self._in_flight = BackgroundSave(step, copied.write, failed=failed)
        return copied.path

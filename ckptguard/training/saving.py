"""When a guard's checkpoints are written, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.training.stores import Store


class Saving:
    """The saves of one guard, one after the other. `last` is the step that was saved or loaded last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.last: int | None = None

    def begin(self, step: int, extra: Mapping[str, Any]) -> str:
        """Save now; returns the checkpoint's path in the run. Whatever goes wrong is raised."""
        path = self._store.write(step, extra)
        self.last = step
        return path

    def drain(self, seconds: float | None = None) -> None:
        """Return once no save is in flight; one that takes longer than `seconds` is abandoned unsealed. Never
        raises: what failed is told by `failed`."""

    def failed(self) -> list[tuple[int, Exception]]:
        """The saves that failed behind training's back since the last call: (step, error)."""
        return []

"""A storage that counts what is asked of it, by verb."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from ckptguard.records.run import Run
from ckptguard.storage.protocol import Entry, Storage

VERBS = ("list", "names", "stat", "open", "create", "upload", "copy", "move", "remove", "capabilities", "free_space")


class CountingStorage:
    """Hands every call on to the storage that it wraps, and counts it under ``<name>.<verb>``."""

    def __init__(self, storage: Storage, name: str, requests: Counter[str]) -> None:
        self._storage, self._name, self._requests = storage, name, requests

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._storage, verb)
        return self._counted(verb, found) if verb in VERBS else found

    def now(self) -> CountingStorage:
        return self

    def open_listed(self, entry: Entry) -> Any:
        return self.open(entry.key)

    def _counted(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._requests[f"{self._name}.{verb}"] += 1
            return call(*args, **kwargs)

        return counting


def counted(run: Run) -> tuple[Run, Counter[str]]:
    """The same run, and what was asked of its storages since it was cleared, as ``run.list`` or ``records.open``."""
    requests: Counter[str] = Counter()
    wrapped = msgspec.structs.replace(
        run,
        storage=CountingStorage(run.storage, "run", requests),
        records=CountingStorage(run.records, "records", requests),
    )
    return wrapped, requests

"""Being killed before the n-th step that changes anything on storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ckptguard.storage.local import LocalStorage
from ckptguard.storage.remote import RemoteStorage

STEPS = ("create", "move", "remove")


class Killed(BaseException):
    """The process is gone: nothing of it runs on."""


@contextlib.contextmanager
def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Be killed before the n-th step that changes anything on storage."""
    left = [number]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for storage in (LocalStorage, RemoteStorage):
            for name in STEPS:
                patched.setattr(storage, name, counted(getattr(storage, name)))
        yield

"""Being killed before the n-th step that changes anything on storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ckptguard.repair import replace_files
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.storage.remote.remote_storage import RemoteStorage

STEPS = ("create", "move", "remove")
READS = ("list", "stat", "open")


class Killed(BaseException):
    """The process is gone: nothing of it runs on."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> contextlib.AbstractContextManager[None]:
    """Be killed before the n-th step that changes anything on storage."""
    return _raise_at(monkeypatch, number, STEPS, Killed(), for_ever=True)


def fail_at(
    monkeypatch: pytest.MonkeyPatch, number: int, error: Exception, *, for_ever: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Have the n-th operation on storage fail, once or from then on."""
    return _raise_at(monkeypatch, number, STEPS + READS, error, for_ever=for_ever)


@contextlib.contextmanager
def _raise_at(
    monkeypatch: pytest.MonkeyPatch, number: int, names: tuple[str, ...], error: BaseException, *, for_ever: bool
) -> Iterator[None]:
    left = [number]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 or (left[0] < 0 and for_ever):
                raise error
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for storage in (LocalStorage, RemoteStorage):
            for name in names:
                patched.setattr(storage, name, counted(getattr(storage, name)))
        patched.setattr(replace_files, "swap_files", counted(replace_files.swap_files))
        yield

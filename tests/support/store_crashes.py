"""A process that ends, or is overtaken, at its n-th call of a storage, without a process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ckptguard.records.who_and_when import Owner, this_process
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.storage.remote.remote_storage import RemoteStorage

CALLS = ("list", "stat", "open", "create", "upload", "copy", "move", "remove")


class Killed(BaseException):
    """The process is gone: nothing of it runs on."""


@contextlib.contextmanager
def at_call(number: int, act: Callable[[], None], *, again: bool = False) -> Iterator[None]:
    """Do something right before the n-th call of a storage, once, or from then on."""
    left = [number]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 or (left[0] < 0 and again):
                act()
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for storage in (LocalStorage, RemoteStorage):
            for name in CALLS:
                patches.enter_context(mock.patch.object(storage, name, counted(getattr(storage, name))))
        yield


def die() -> None:
    raise Killed


def gone() -> Owner:
    """A process like this one that has ended."""
    found = this_process()
    return Owner(host=found.host, boot_id=found.boot_id, pid=2**30, namespace=found.namespace, started="1")

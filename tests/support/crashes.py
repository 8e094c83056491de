"""Being killed, failing, or being overtaken at the n-th call of a storage, without a process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ckptguard.records.who_and_when import Owner, this_process
from ckptguard.repair import one_place
from ckptguard.runs import publish
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.storage.remote.remote_storage import RemoteStorage
from ckptguard.upkeep import write_anew

CALLS = ("list", "stat", "open", "create", "upload", "copy", "move", "remove")
WRITES = ("create", "move", "remove")
STEPS = (*WRITES, "swap_files")


class Killed(BaseException):
    """The process is gone: nothing of it runs on."""


@contextlib.contextmanager
def at_call(
    number: int, act: Callable[[], None], *, again: bool = False, calls: tuple[str, ...] = CALLS
) -> Iterator[None]:
    """Do something right before the n-th of these calls of a storage, once, or from then on."""
    left = [number]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 or (left[0] < 0 and again):
                act()
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for owner in (LocalStorage, RemoteStorage, one_place, publish, write_anew):
            for name in calls:
                if hasattr(owner, name):
                    patches.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield


def die() -> None:
    raise Killed


def kill_at(number: int) -> contextlib.AbstractContextManager[None]:
    """Be killed before the n-th step that changes anything on storage."""
    return at_call(number, die, again=True, calls=STEPS)


def fail_at(number: int, error: Exception, *, for_ever: bool = False) -> contextlib.AbstractContextManager[None]:
    """Have the n-th operation on storage fail, once or from then on."""

    def fail() -> None:
        raise error

    return at_call(number, fail, again=for_ever, calls=(*STEPS, "list", "stat", "open"))


def gone() -> Owner:
    """A process like this one that has ended."""
    found = this_process()
    return Owner(host=found.host, boot_id=found.boot_id, pid=2**30, namespace=found.namespace, started="1")

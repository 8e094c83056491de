"""Make names and links durable: each at once, or many together, which a journal writes in one go."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from contextvars import ContextVar

from ckptguard.storage.failures import translated

_UNABLE = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)  # a file system that cannot sync a folder
_MOST = 64  # descriptors that stay open until the end, if the limit allows that many
_Pending = dict[tuple[int, int], int]
_pending: ContextVar[_Pending | None] = ContextVar("pending", default=None)


def sync(descriptor: int) -> None:
    """Make a file or folder durable, as far as the file system can: now, or at the end of `synced_together`."""
    pending = _pending.get()
    if pending is None:
        _sync_now(descriptor)
        return
    info = os.fstat(descriptor)
    if (info.st_dev, info.st_ino) not in pending:
        pending[info.st_dev, info.st_ino] = os.dup(descriptor)
    may_be_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if len(pending) >= (_MOST if may_be_open == resource.RLIM_INFINITY else min(_MOST, may_be_open // 4)):
        _sync_all(pending)


@contextlib.contextmanager
def synced_together(where: str) -> Iterator[None]:
    """Delay this thread's calls of `sync` to the end of the block. StorageError names `where`.

    Use it for files that count only after something else is written.
    """
    pending: _Pending = {}
    token = _pending.set(pending)
    try:
        yield
        with translated("", where):
            _sync_all(pending)
    finally:
        _pending.reset(token)
        for descriptor in pending.values():
            os.close(descriptor)


def _sync_all(pending: _Pending) -> None:
    while pending:
        _, descriptor = pending.popitem()
        try:
            _sync_now(descriptor)
        finally:
            os.close(descriptor)


def _sync_now(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise

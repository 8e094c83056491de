"""A connection to an SFTP server that survives forks and lost connections, and speaks plain OSErrors."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

# SFTP's answers by the names of asyncssh's classes; a server of version 3 has few words, and says "failure" else.
_ERRNOS = {
    "SFTPNoSuchFile": errno.ENOENT,
    "SFTPNoSuchPath": errno.ENOENT,
    "SFTPNotADirectory": errno.ENOTDIR,
    "SFTPFileAlreadyExists": errno.EEXIST,
    "SFTPPermissionDenied": errno.EACCES,
    "SFTPWriteProtect": errno.EROFS,
    "SFTPNoSpaceOnFilesystem": errno.ENOSPC,
    "SFTPQuotaExceeded": errno.EDQUOT,
    "SFTPLinkLoop": errno.ELOOP,
    "SFTPOpUnsupported": errno.EOPNOTSUPP,
    "SFTPInvalidHandle": errno.EBADF,
    "SFTPFailure": errno.EIO,
    "SFTPConnectionLost": errno.ECONNRESET,
    "SFTPNoConnection": errno.ENOTCONN,
    "ConnectionLost": errno.ECONNRESET,
    "ChannelOpenError": errno.ECONNRESET,
}
_LOST = {errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE}


class SftpSession:
    """Runs coroutines with an SFTP client. `generation` changes whenever the connection does: handles of an older
    one are dead."""

    def __init__(self, connect: Callable[..., tuple[Any, str]]) -> None:
        self._connect = connect
        self._process = os.getpid()
        self.generation = 0
        self._file_system, self.base = connect()
        self._left_alone: list[Any] = []  # closing a parent's connection in its child would end it for both
        self._lost: Any = None

    def run(self, act: Callable[[Any], Awaitable[T]]) -> T:
        """What the coroutine `act(client)` returns; only OSErrors (and what is ours) come out."""
        import fsspec.asyn

        file_system = self._connected()

        async def call() -> T:
            async with file_system._pool.get() as client:
                return await act(client)

        try:
            return fsspec.asyn.sync(file_system.loop, call)  # type: ignore[no-any-return]
        except Exception as error:
            found = _as_os_error(error)
            if isinstance(found, OSError) and found.errno in _LOST:
                self._forget(file_system)
            raise found from error

    def _connected(self) -> Any:
        if self._process != os.getpid():
            self._left_alone.append(self._file_system)
            self._file_system = None
            self._process = os.getpid()
            self.generation += 1
        if self._file_system is None:
            found, _ = self._connect()
            if found is self._lost:  # others who share this connection may not have noticed yet
                found, _ = self._connect(fresh=True)
            self._file_system = found
        return self._file_system

    def _forget(self, lost: Any) -> None:
        if self._file_system is lost:
            self._file_system, self._lost = None, lost
            self.generation += 1


def _as_os_error(error: Exception) -> Exception:
    code = _ERRNOS.get(type(error).__name__)
    return error if code is None else OSError(code, os.strerror(code))

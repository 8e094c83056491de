"""A connection to an SFTP server that survives forks and lost connections, and access to one file over it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from ckptguard.errors import ObjectExistsError
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Entry, Upload
from ckptguard.storage.ranged_reader import RangedReader
from ckptguard.values.ids import escape
from ckptguard.values.temporary_names import RECORD

T = TypeVar("T")
_UNSUPPORTED = errno.EOPNOTSUPP
# SFTP's answers by the names of asyncssh's classes. A version 3 server has few codes, and otherwise says "failure".
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
    """Runs coroutines with an SFTP client. A new `generation` is a new connection, for which old handles are
    invalid."""

    def __init__(self, connect: Callable[..., tuple[Any, str]]) -> None:
        self._connect = connect
        self._process = os.getpid()
        self.generation = 0
        self._file_system, self.base = connect()
        self._left_alone: list[Any] = []  # closing a parent's connection in its child would end it for both
        self._lost: Any = None

    def run(self, act: Callable[[Any], Awaitable[T]]) -> T:
        """Return the result of the coroutine `act(client)`. It raises only OSErrors and our own errors."""
        import fsspec.asyn

        file_system = self._connected()

        async def call() -> T:
            async with file_system._pool.get() as client:
                return await act(client)

        try:
            return fsspec.asyn.sync(file_system.loop, call)  # type: ignore[no-any-return]
        except Exception as error:
            code = _ERRNOS.get(type(error).__name__)
            found = error if code is None else OSError(code, os.strerror(code))
            if isinstance(found, OSError) and found.errno in _LOST and self._file_system is file_system:
                self._file_system, self._lost = None, file_system
                self.generation += 1
            raise found from error

    def _connected(self) -> Any:
        if self._process != os.getpid():
            self._left_alone.append(self._file_system)
            self._file_system = None
            self._process = os.getpid()
            self.generation += 1
        if self._file_system is None:
            found, _ = self._connect()
            if found is self._lost:  # other users of this connection may not have noticed yet
                found, _ = self._connect(fresh=True)
            self._file_system = found
        return self._file_system


class SftpReader(RangedReader):
    """A `Reader` with one handle. After a lost connection or a fork it is reopened, if the file is still the same."""

    def __init__(
        self, session: SftpSession, path: str, entry: Entry, where: str, stat_now: Callable[[str], Entry]
    ) -> None:
        super().__init__(entry, where, stat_now)
        self._session, self._path = session, path
        self._generation = -1
        self._handle: Any = None
        with translated(entry.key, where):
            self._opened()
        self.check_unchanged()

    def _answer(self, offset: int, length: int) -> bytes:
        handle = self._opened()
        return cast("bytes", self._session.run(lambda _: handle.read(length, offset)))

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None and self._generation == self._session.generation:
            with contextlib.suppress(OSError):
                self._session.run(lambda _: handle.close())

    def _opened(self) -> Any:
        if self._handle is None or self._generation != self._session.generation:
            again = self._generation >= 0
            self._handle = self._session.run(lambda client: client.open(self._path, "rb"))
            self._generation = self._session.generation
            if again:
                self.check_unchanged()
        return self._handle


class SftpUpload(Upload):
    """An `Upload` into a temporary file, which gets its name by a hard link (exclusive) or a rename that replaces."""

    def __init__(self, session: SftpSession, path: str, key: str, where: str, *, replace: bool) -> None:
        self._session, self._path, self._key, self._where, self._replace = session, path, key, where, replace
        self._temporary = f"{path.rpartition('/')[0]}/{RECORD.new()}"
        self._length = 0
        self._over = False
        with translated(key, where):
            self._refuse_taken()
            self._handle = session.run(lambda client: client.open(self._temporary, "xb"))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        block = bytes(data)
        offset = self._length
        with translated(self._key, self._where):
            try:
                self._session.run(lambda _: self._handle.write(block, offset))
            except OSError as error:
                raise self._full_disk(len(block)) or error from error
        self._length += len(block)

    def commit(self) -> None:
        try:
            with translated(self._key, self._where):
                self._finish_file()
                self._refuse_taken()
                if self._replace:
                    self._session.run(lambda client: client.posix_rename(self._temporary, self._path))
                else:
                    publish(self._session, self._temporary, self._path)
        finally:
            self.abort()

    def abort(self) -> None:
        if self._over:
            return
        self._over = True
        for attempt in (lambda _: self._handle.close(), lambda client: client.remove(self._temporary)):
            with contextlib.suppress(OSError):
                self._session.run(attempt)

    def _finish_file(self) -> None:
        try:
            self._session.run(lambda _: self._handle.fsync())
        except OSError as error:
            if error.errno != _UNSUPPORTED:
                raise
        stored = self._session.run(lambda _: self._handle.stat()).size
        if stored != self._length:
            raise OSError(errno.EIO, f"wrote {self._length} bytes, but the server has {stored}")

    def _refuse_taken(self) -> None:
        found = attributes_of(self._session, self._path)
        if found is not None and (not self._replace or found.permissions & 0o170000 == 0o040000):
            raise ObjectExistsError(f"{escape(self._key)}: exists already", key=self._key)

    def _full_disk(self, wanted: int) -> OSError | None:
        """Version 3 of SFTP cannot report a full disk, but it can report the free space."""
        with contextlib.suppress(OSError):
            found = self._session.run(lambda client: client.statvfs(self._temporary))
            if found.bavail * found.frsize < wanted:
                return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return None


def attributes_of(session: SftpSession, path: str) -> Any:
    """Return what is at a path, without following links, or None."""
    try:
        return session.run(lambda client: client.lstat(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def publish(session: SftpSession, temporary: str, path: str) -> None:
    """Give a finished temporary file its name, exclusively. FileExistsError if it is taken."""
    try:
        try:
            session.run(lambda client: client.link(temporary, path))
        except OSError as error:
            if error.errno != _UNSUPPORTED:
                raise
            # In version 3 no rename replaces, but the server decides whether two concurrent ones can both win.
            session.run(lambda client: client.rename(temporary, path))
    except OSError as error:
        if error.errno == errno.EIO and attributes_of(session, path) is not None:
            raise FileExistsError(path) from error
        raise

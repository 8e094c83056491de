"""The Unix socket: bound by us, readable only by its owner, in a folder that nobody else can change."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptguard.errors import BusyError, SettingsError
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.values.ids import short_digest

LONGEST_PATH = 107  # the most that a socket's address can hold


@dataclass(frozen=True)
class ListeningSocket:
    """A listening socket and its path."""

    socket: socket.socket
    path: str
    identity: tuple[int, int]  # inode and time: inode numbers are reused
    made: str | None = None  # a folder made for it

    def close(self) -> None:
        """Stop listening, and remove the path if it is still ours."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _identity(self.path) == self.identity:
                os.unlink(self.path)
                if self.made is not None:
                    os.rmdir(self.made)


def listen(path: str | None, urls: Sequence[str], environ: Mapping[str, str]) -> ListeningSocket:
    """Bind and listen, at `path` or at a path of our own that follows from the runs. The path's folder is made.

    The socket of a dead daemon is replaced.

    Raises:
        BusyError: another daemon answers at the given `path`.
        SettingsError: the path is too long, or its folder is open to others.
    """
    if path is not None:
        place = os.path.abspath(path)
        with contextlib.suppress(OSError):  # it is there, or opening it says what is wrong
            os.mkdir(os.path.dirname(place), 0o700)
        return _bind(place)
    name, made = short_digest("\n".join(sorted(urls))), None
    try:
        folder = private_runtime_folder(environ)
    except OSError:  # another user was first; the address is in the records
        folder = made = _new_folder()
    try:
        return _bind(os.path.join(folder, f"{name}.sock"), made)
    except BusyError:  # two daemons on one run are harmless, each at its own address
        return _bind(os.path.join(folder, f"{name}-{os.getpid()}.sock"))


def _new_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="ckptguard-")
    except OSError as error:
        raise SettingsError(
            f"a folder for the socket cannot be created: {error.strerror}", hint="choose a path with --socket"
        ) from error


def _bind(path: str, made: str | None = None) -> ListeningSocket:
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise SettingsError(
            f"the socket's path has {len(os.fsencode(path))} bytes, but only {LONGEST_PATH} are possible: {path}",
            hint="choose a shorter path with --socket",
        )
    with _locked(os.path.dirname(path)):
        _remove_dead(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(path)
        except OSError as error:
            listening.close()
            raise SettingsError(f"cannot listen at {path}: {error.strerror}") from error
        finally:
            os.umask(before)
        listening.listen(128)
        return ListeningSocket(socket=listening, path=path, identity=_identity(path), made=made)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Let one daemon at a time replace a dead socket, if there are locks. Raises SettingsError, also for a folder in
    which other users could replace a socket."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SettingsError(f"the folder {folder} of the socket cannot be used: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o022:
            raise SettingsError(
                f"other users may write to {folder}, so they could replace a socket in it",
                hint="use a folder with mode 0700",
            )
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_ino, found.st_mtime_ns


def _remove_dead(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise SettingsError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(2.0)
        try:
            asking.connect(path)
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                return
        raise BusyError(f"another daemon answers at {path}")

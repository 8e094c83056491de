"""Local files that appear whole under their final name or not at all, and never replace anything.

Only `swap_files` changes what a name in a run holds: it exchanges two files, so that neither name is ever free.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import uuid
from collections.abc import Callable, Iterator

from ckptguard.storage.failures import translated
from ckptguard.storage.local.folders import folder_of, place_of, sync_folder
from ckptguard.storage.local.held_names import is_there
from ckptguard.storage.local.removal import make, note_lasting, ours, removed, was_lasting
from ckptguard.values.temporary_names import RECORD

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_FICLONE = 0x40049409  # _IOW(0x94, 9, int)
# Linux's error codes if the kernel or the file system does not support a call.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOTSUP})
# Lustre, NFS and FUSE may lack locks, and the kernel may run out of them.
NO_LOCKS = UNSUPPORTED | {errno.ENOLCK}
# Hard links are refused on FAT and some network file systems, and by the kernel for other users' files.
NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EACCES}

# Linux has files without a name, which are linked through /proc. Some file systems have none, or cannot link them.
_UNNAMED = getattr(os, "O_TMPFILE", 0) if os.path.isdir("/proc/self/fd") else 0
_named_only: set[int] = set()  # devices


@contextlib.contextmanager
def temporary(folder: int, mode: int = 0o666) -> Iterator[tuple[int, str]]:
    """Yield a new temporary file (descriptor, name) in a folder. It is locked while we live, and its name is
    removed."""
    name = RECORD.new()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = make(folder, name, lambda: os.open(name, flags, mode, dir_fd=folder))
    try:
        with contextlib.suppress(OSError):  # without locks, only its age can show it
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield descriptor, name
    finally:
        try:
            os.close(descriptor)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
                ours(folder)


@contextlib.contextmanager
def unnamed(folder: int, mode: int = 0o666) -> Iterator[tuple[int, str | None]]:
    """Yield a new file for `publish`, without a name where the system can do that.

    ``shutil.rmtree`` fails if a name goes that it has seen, so it should see none of ours.
    """
    descriptor = None
    if _UNNAMED and os.fstat(folder).st_dev not in _named_only:
        with contextlib.suppress(OSError):
            descriptor = os.open(".", os.O_RDWR | _UNNAMED | os.O_CLOEXEC, mode, dir_fd=folder)
    if descriptor is None:
        with temporary(folder, mode) as named:
            yield named
        return
    try:
        yield descriptor, None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def shown_as_written(folder: str) -> Iterator[None]:
    """Make `is_being_written` true for a folder meanwhile, also after a rename. It ends with this process."""
    descriptor = None
    with contextlib.suppress(OSError):  # without locks, only its age can show it
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a data loader's worker may have it open, too
            os.close(descriptor)


def has_locks(path: str) -> bool:
    """True if the kernel can lock this file, which nobody else has open."""
    with translated("", path), open(path, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
    return True


def is_being_written(path: str) -> bool:
    """True if a process of this machine still writes a temporary file or folder. False if that is unknown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def open_lock(root: str, name: str) -> int:
    """Open a file to lock in the folder `root`. Both are made if they are missing."""
    flags, path = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, os.path.join(root, name)
    with folder_of(root, [], make=True) as folder:
        try:
            descriptor = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            if was_lasting(root, path) and not is_there(folder, name):
                raise removed(root) from None
            try:
                descriptor = make(
                    folder, name, lambda: os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
                )
            except FileExistsError:  # another thread or process was faster
                descriptor = os.open(name, flags, dir_fd=folder)
        note_lasting(root, path)
        return descriptor


def publish(folder: int, descriptor: int, temporary_name: str | None, name: str) -> None:
    """Give a finished temporary file its final name, durably. FileExistsError if the name is taken."""
    os.fsync(descriptor)
    try:
        if temporary_name is None:
            place = f"/proc/self/fd/{descriptor}"
            make(folder, name, lambda: os.link(place, name, dst_dir_fd=folder, follow_symlinks=True))
        else:
            from_here = {"src_dir_fd": folder, "dst_dir_fd": folder}
            make(folder, name, lambda: os.link(temporary_name, name, **from_here, follow_symlinks=False))
    except FileExistsError:
        # NFS repeats a request whose answer was lost: two names mean that the first one had succeeded.
        if temporary_name is None or os.fstat(descriptor).st_nlink < 2:
            raise
    except OSError as error:
        # Once `make` has taken its name back, Linux gives a file without a name no other one.
        had_a_name = temporary_name is None and isinstance(error, FileNotFoundError)
        if error.errno not in NO_LINKS and not had_a_name:
            raise
        if temporary_name is None:
            if not had_a_name:
                _named_only.add(os.fstat(folder).st_dev)
            with temporary(folder, 0o600) as (other, other_name):
                give_owner_and_mode(other, os.fstat(descriptor))
                _copy_whole(descriptor, other)
                publish(folder, other, other_name, name)
            return
        move_exclusively(folder, temporary_name, folder, name, is_folder=False)
    sync_folder(folder)


def replace(folder: int, descriptor: int, temporary_name: str | None, name: str) -> None:
    """Give a finished temporary file its final name, durably, whatever has that name."""
    new = temporary_name or RECORD.new()
    if temporary_name is None:
        publish(folder, descriptor, None, new)
    else:
        os.fsync(descriptor)
    try:
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        raise
    finally:
        ours(folder)
    sync_folder(folder)


def give_owner_and_mode(descriptor: int, before: os.stat_result) -> None:
    """Give an open file the mode, and if that is allowed the owner, that a file had before."""
    with contextlib.suppress(OSError):  # who wrote it must be able to write it again
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & 0o777)


def _copy_whole(source: int, target: int) -> None:
    offset = 0
    while block := os.pread(source, 4 << 20, offset):
        write_all(target, block, offset)
        offset += len(block)


def move_exclusively(source_folder: int, source: str, target_folder: int, target: str, *, is_folder: bool) -> None:
    """Rename without replacing anything. FileExistsError if the target exists."""
    try:
        rename_exclusively(source_folder, source, target_folder, target)
        return
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    if is_folder:
        # rename() replaces an empty folder and nothing else, and mkdir is exclusive: reserve the name, then rename.
        os.mkdir(target, dir_fd=target_folder)
    else:
        # The last resort: reserve the name exclusively, then rename over it. For a moment a reader may see an empty
        # file, which every reader of records treats as absent.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target_folder))
    try:
        os.rename(source, target, src_dir_fd=source_folder, dst_dir_fd=target_folder)
    except BaseException:
        with contextlib.suppress(OSError):
            (os.rmdir if is_folder else os.unlink)(target, dir_fd=target_folder)
        raise


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write the whole buffer at an offset."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def swap_files(root: str, one: str, other: str) -> bool:
    """Exchange two files below a local root in one step, durably. False, without a change, if that is impossible."""
    with translated(other, root):
        try:
            with place_of(root, one) as (folder, name), place_of(root, other) as found:
                other_folder, other_name = found
                _rename(folder, name, other_folder, other_name, _RENAME_EXCHANGE)
                sync_folder(other_folder)
                sync_folder(folder)
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EXDEV, errno.ENOENT}:
                raise
            return False
    return True


# The few Linux calls that Python does not offer. They raise OSError with ENOSYS if they do not exist.


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def rename_exclusively(source_folder: int, source: str, target_folder: int, target: str) -> None:
    """Rename without replacing. FileExistsError if the target exists, an UNSUPPORTED errno if the call does not
    exist."""
    _rename(source_folder, source, target_folder, target, _RENAME_NOREPLACE)


def _rename(source_folder: int, source: str, target_folder: int, target: str, flag: int) -> None:
    import ctypes

    function = _renameat2()
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(source_folder, os.fsencode(source), target_folder, os.fsencode(target), flag) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def clone_into(source: int, target: int) -> bool:
    """Make the open file `target` share the blocks of `source` (copy on write). False if that is not supported."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in UNSUPPORTED | {errno.EXDEV, errno.EPERM, errno.EBADF}:
            return False
        raise
    return True


def replace_file(path: str, content: bytes, mode: int = 0o600) -> None:
    """Replace a file of ours outside of runs, or leave it as it was. Others see the old one or the new one. Nothing is
    synced. Raises OSError."""
    temporary_path = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary_path, flags, 0o600), "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(temporary_path, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary_path)
        raise

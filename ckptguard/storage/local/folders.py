"""Walk local folders by descriptors, so that no link below the root is ever followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from ckptguard.storage.failures import storage_error
from ckptguard.storage.local.held_names import DEEPEST, is_holding, lying_as, own_name, split_root
from ckptguard.storage.local.syncs import sync
from ckptguard.storage.protocol import Enter, Entry, is_encodable, join
from ckptguard.values.ids import escape

# O_PATH needs only search permission on the folders in between.
_ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def entry_of(key: str, info: os.stat_result, target: str | None = None) -> Entry:
    """Return the entry for a result of lstat or fstat."""
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
    size = info.st_size if kind == "file" else 0
    return Entry(key=key, kind=kind, size=size, mtime_ns=info.st_mtime_ns, inode=info.st_ino, target=target)


def open_root(root: str, *, make: bool = False) -> int:
    """Return the root's descriptor. The user named the root, so it may be a link."""
    try:
        return os.open(root, _ENTER)
    except FileNotFoundError:
        if not make:
            raise
    above = open_root(os.path.dirname(root), make=True)
    try:
        with contextlib.suppress(FileExistsError):  # another writer was faster
            os.mkdir(root)
            sync_folder(above)
    finally:
        os.close(above)
    return os.open(root, _ENTER)


def _enter(folder: int, name: str) -> int:
    try:
        return os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            raise OSError(errno.ELOOP, "a folder on this path is a link, and links are not followed") from None
        raise


@contextlib.contextmanager
def folder_of(root: str, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of the folder at `parts`. With `make`, missing folders are created durably."""
    root, above = split_root(root)
    parts = [*above, *parts]
    current = open_root(root, make=make)
    try:
        for depth, own in enumerate(parts):
            name = lying_as(current, own, held=is_holding(root, parts[:depth]))
            try:
                below = _enter(current, name)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # another writer was faster
                    os.mkdir(name, dir_fd=current)
                    sync_folder(current)
                below = _enter(current, name)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


@contextlib.contextmanager
def place_of(root: str, parts: Sequence[str], *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of the folder that contains `parts`, and the stored name of the last part."""
    *above, name = parts
    with folder_of(root, above, make=make) as folder:
        yield folder, lying_as(folder, name, held=is_holding(root, above))


def sync_folder(folder: int) -> None:
    """Make the names in a folder durable, as far as the file system can."""
    try:
        descriptor = os.open(".", LIST, dir_fd=folder)
    except PermissionError:
        return  # a folder that may be written but not read cannot be synced
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def entry_at(folder: int, name: str, key: str) -> Entry:
    """Return the entry of one name in a folder. A link is described, not followed."""
    info = os.lstat(name, dir_fd=folder)
    target = escape(os.readlink(name, dir_fd=folder)) if stat.S_ISLNK(info.st_mode) else None
    return entry_of(key, info, target)


_Listed = tuple[str, Entry]  # the stored name, and its entry


def _entries(folder: int, key: str, bare: bool, held: bool) -> list[_Listed]:
    """Return the entries of a folder; with `bare`, only names and which are folders, without a call for each."""
    found = []
    with os.scandir(folder) as names:
        for item in names:
            own = own_name(item.name) if held else item.name
            if not is_encodable(own):
                found.append((item.name, Entry(key=join(key, escape(own)), kind="unnamed", inode=item.inode())))
            elif bare:
                kind = "folder" if item.is_dir(follow_symlinks=False) else "other"
                found.append((item.name, Entry(key=join(key, own), kind=kind)))
            else:
                with contextlib.suppress(FileNotFoundError):  # removed between the two calls
                    found.append((item.name, entry_at(folder, item.name, join(key, own))))
    return found


def walk(folder: int, key: str, where: str, *, recursive: bool, enter: Enter | None, bare: bool = False) -> list[Entry]:
    """Return all entries below an open folder, unsorted; with `bare`, only the names of files.

    A folder that vanishes meanwhile is left out. An unreadable one is an error: a failed listing must never look empty.
    """
    found: list[Entry] = []
    stack: list[tuple[int, list[_Listed]]] = []

    def descend(parent: int, name: str, key: str) -> None:
        try:
            descriptor = os.open(name, LIST, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            if name == ".":
                raise
            return
        except PermissionError as error:
            raise storage_error(error, key, where) from error
        try:
            listed = _entries(descriptor, key, bare, is_holding(where, key.split("/") if key else []))
        except BaseException:
            os.close(descriptor)
            raise
        folders = [one for one in listed if one[1].kind == "folder"] if recursive else []
        found.extend(e for _, e in listed if not recursive or e.kind != "folder")
        stack.append((descriptor, folders))

    try:
        descend(folder, ".", key)
        while stack:
            descriptor, folders = stack[-1]
            if not folders:
                os.close(stack.pop()[0])
                continue
            name, below = folders.pop()
            if enter is not None and not enter(below.key):
                continue
            if len(stack) > DEEPEST:
                found.append(Entry(key=below.key, kind="other", mtime_ns=below.mtime_ns, inode=below.inode))
            else:
                descend(descriptor, name, below.key)
    finally:
        for descriptor, _ in stack:
            os.close(descriptor)
    return found


def remove_tree(parent: int, name: str) -> None:
    """Remove a file or a whole folder, never through links. Files that vanish meanwhile are no error."""
    stack: list[tuple[int, str]] = []  # open folders, each with its name in the one before
    try:
        _unlink_or_open(parent, name, stack)
        while stack:
            folder, own_name = stack[-1]
            with os.scandir(folder) as names:
                inside = [item.name for item in names]
            depth = len(stack)
            for item in inside:
                if depth > DEEPEST and _hoist(folder, item, stack[0][0]):
                    continue
                _unlink_or_open(folder, item, stack)
                if len(stack) > depth:
                    break  # empty that folder first
            else:
                stack.pop()
                os.close(folder)
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(own_name, dir_fd=stack[-1][0] if stack else parent)
    finally:
        for folder, _ in stack:
            os.close(folder)


def _unlink_or_open(folder: int, name: str, stack: list[tuple[int, str]]) -> None:
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            stack.append((os.open(name, LIST, dir_fd=folder), name))
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _hoist(folder: int, name: str, top: int) -> bool:
    """Move a folder that is too deep to the top, so that descriptors and time stay bounded."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        return False
    os.rename(name, f".tmp-{os.urandom(8).hex()}", src_dir_fd=folder, dst_dir_fd=top)
    return True

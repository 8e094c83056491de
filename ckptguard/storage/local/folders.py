"""Walk local folders by descriptors, so that no link below the root is ever followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from ckptguard.storage.failures import UNREADABLE, storage_error
from ckptguard.storage.local.held_names import DEEPEST, is_holding, lying_as, own_name, split_root
from ckptguard.storage.local.removal import (
    begin_again,
    is_known_run,
    is_records,
    note_lasting,
    ours,
    removed,
    was_lasting,
    were_removed,
    writing_below,
)
from ckptguard.storage.local.removal import make as make_new
from ckptguard.storage.local.syncs import sync
from ckptguard.storage.protocol import Enter, Entry, is_encodable, parts_of, unread_folder
from ckptguard.values.ids import RECORDS_FOLDER, escape
from ckptguard.values.temporary_names import RECORD

# O_PATH needs only search permission on the folders in between.
_ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_INTO = _ENTER | os.O_NOFOLLOW
LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_LASTING = 1  # levels of the records whose folders are never removed alone: <kind>
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def entry_of(key: str, info: os.stat_result, target: str | None = None) -> Entry:
    """Return the entry for a result of lstat or fstat."""
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
    size = info.st_size if kind == "file" else 0
    return Entry(
        key=key,
        kind=kind,
        size=size,
        mtime_ns=info.st_mtime_ns,
        inode=info.st_ino,
        target=target,
        ctime_ns=info.st_ctime_ns if kind == "file" else None,
    )


def _made_root(root: str) -> int:
    """Make a root that was missing, and open it."""
    if is_known_run(root) or (is_records(root) and were_removed(root)):
        raise removed(root)
    begin_again(root)
    with (
        folder_of(os.path.dirname(root), (), make=not is_records(root)) as above,  # a removed run is not made again
        contextlib.suppress(FileExistsError),  # another writer was faster
    ):
        os.mkdir(root)
        sync_folder(above)
    return os.open(root, _ENTER)


def _refuse_link(folder: int, name: str) -> None:
    if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
        raise OSError(errno.ELOOP, "a folder on this path is a link, and links are not followed") from None


@contextlib.contextmanager
def folder_of(root: str, parts: Sequence[str], *, make: bool = False, writes: bool = False) -> Iterator[int]:
    """Yield the descriptor of the folder at `parts`. With `make`, missing folders are created durably.

    With either, names in it may be made or removed; see `removal`.
    """
    writes = writes or make
    root, above = split_root(root)
    parts = [*above, *parts]
    try:
        opened = [os.open(root, _ENTER)]  # the user named the root, so it may be a link
    except FileNotFoundError:
        if not make:
            raise
        opened = [_made_root(root)]
    try:
        records, inside = root, [*opened] if writes and is_records(root) else []
        for depth, own in enumerate(parts):
            current = opened[-1]
            name = lying_as(current, own, root, parts[:depth], make=make)
            try:
                below = os.open(name, _INTO, dir_fd=current)
            except FileNotFoundError:
                if not make:
                    raise
                below = _made(current, name, os.path.join(root, *parts[:depth], own), inside, records)
            except NotADirectoryError:
                _refuse_link(current, name)
                raise
            opened.append(below)
            if not inside:
                os.close(opened.pop(0))
            elif len(inside) <= _LASTING:
                note_lasting(records, os.path.join(root, *parts[: depth + 1]))
            if inside or (writes and own == RECORDS_FOLDER):
                records = records if inside else os.path.join(root, *parts[: depth + 1])
                inside.append(below)
        with writing_below(records, inside) if inside else contextlib.nullcontext():
            yield opened[-1]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _made(folder: int, name: str, path: str, inside: Sequence[int], records: str) -> int:
    """Make a folder that was missing, and open it."""
    if was_lasting(records, path) or (is_records(path) and were_removed(path)):
        raise removed(path)
    if is_records(path):
        begin_again(path)
    with contextlib.ExitStack() as known:
        if inside:
            known.enter_context(writing_below(records, inside))
        with contextlib.suppress(FileExistsError):  # another writer was faster
            make_new(folder, name, lambda: os.mkdir(name, dir_fd=folder), is_folder=True)
            sync_folder(folder)
    try:
        below = os.open(name, _INTO, dir_fd=folder)
    except FileNotFoundError:
        if inside:
            raise removed(records) from None
        raise
    except NotADirectoryError:
        _refuse_link(folder, name)
        raise
    ours(below)
    return below


@contextlib.contextmanager
def place_of(root: str, key: str, *, make: bool = False, writes: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of the folder that contains a key, and the stored form of its last part."""
    *above, name = parts_of(key, below=root)
    with folder_of(root, above, make=make, writes=writes) as folder:
        yield folder, lying_as(folder, name, root, above, make=make)


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


def _entries(folder: int, key: str, bare: bool, held: bool) -> tuple[list[Entry], list[tuple[str, Entry]]]:
    """Return what a folder holds: first all that are no folders, then folders, each with its stored name. With `bare`,
    only names and which are folders, without a call for each."""
    found: list[Entry] = []
    below: list[tuple[str, Entry]] = []
    above = f"{key}/" if key else ""
    with os.scandir(folder) as names:
        for item in names:
            own = own_name(item.name) if held else item.name
            if not is_encodable(own):
                entry = Entry(key=above + escape(own), kind="unnamed", inode=item.inode())
            elif bare:
                entry = Entry(key=above + own, kind="folder" if item.is_dir(follow_symlinks=False) else "other")
            else:
                try:
                    entry = entry_at(folder, item.name, above + own)
                except FileNotFoundError:
                    continue  # removed between the two calls
            if entry.kind == "folder":
                below.append((item.name, entry))
            else:
                found.append(entry)
    return found, below


def walk(
    folder: int,
    key: str,
    where: str,
    *,
    recursive: bool,
    enter: Enter | None = None,
    bare: bool = False,
    unread: bool = False,
) -> list[Entry]:
    """Return all entries below an open folder, unsorted; with `bare`, only the names of files.

    A folder that vanishes meanwhile is left out. An unreadable one is an error, or an entry that says so: a failed
    listing must never look empty.
    """
    found: list[Entry] = []
    # Open folders, each with those in it that are still to be listed. The first is the caller's.
    stack = [(folder, [(".", Entry(key=key, kind="folder"))])]
    try:
        while stack:
            descriptor, folders = stack[-1]
            if not folders:
                stack.pop()
                if stack:
                    os.close(descriptor)
                continue
            name, below = folders.pop()
            if name != "." and enter is not None and not enter(below.key):
                continue
            if len(stack) > DEEPEST + 1:
                found.append(Entry(key=below.key, kind="other", mtime_ns=below.mtime_ns, inode=below.inode))
                continue
            try:
                stack.append((os.open(name, LIST, dir_fd=descriptor), []))
                held = is_holding(where, below.key.split("/") if below.key else [])
                others, inside = _entries(stack[-1][0], below.key, bare, held)
            except (FileNotFoundError, NotADirectoryError):
                if name == ".":
                    raise
                continue
            except OSError as error:
                if unread and below.key and error.errno in UNREADABLE:
                    found.append(unread_folder(below.key, storage_error(error, below.key, where), below.mtime_ns))
                    continue
                if isinstance(error, PermissionError):
                    raise storage_error(error, below.key, where) from error
                raise
            found += others
            if recursive:
                stack[-1][1].extend(inside)
            else:
                found += (entry for _, entry in inside)
    finally:
        for descriptor, _ in stack[1:]:
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
        ours(parent)
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
    os.rename(name, RECORD.new(), src_dir_fd=folder, dst_dir_fd=top)
    return True

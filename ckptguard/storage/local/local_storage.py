"""A folder of a local file system as a `Storage`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptguard.errors import (
    ChangedWhileReadError,
    DeniedError,
    ObjectExistsError,
    ObjectMissingError,
    StorageError,
)
from ckptguard.storage.failures import translated
from ckptguard.storage.local import folders
from ckptguard.storage.local.folders import entry_of, place_of
from ckptguard.storage.local.held_names import hold_names, is_holding, is_there, lying_path
from ckptguard.storage.local.removal import (
    await_quiet,
    is_being_removed,
    make,
    note_own_removal,
    note_records,
    ours,
)
from ckptguard.storage.local.syncs import sync
from ckptguard.storage.local.writes import (
    NO_LINKS,
    clone_into,
    give_owner_and_mode,
    move_exclusively,
    publish,
    replace,
    unnamed,
    write_all,
)
from ckptguard.storage.protocol import Capabilities, Enter, Entry, Reader, Storage, Upload, parts_of
from ckptguard.values.ids import RECORDS_FOLDER, escape

_OPEN = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK
_BLOCK = 4 << 20
_WRITTEN_OUT = 16 << 20  # bytes of an upload that are written to the disk together

Entries = list[Entry]  # inside the class, `list` is the method


class LocalStorage(Storage):
    """Bytes in a local folder. Links below the root are listed, never followed. Every write is durable on return."""

    copies_itself = True

    def __init__(self, root: str) -> None:
        self.url = self.root = root
        note_records(root)

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> list[Entry]:
        found = self._walk(prefix, recursive=recursive, enter=enter, unread=unread)
        return sorted(found, key=lambda entry: entry.key)

    def names(self, prefix: str = "") -> Sequence[str]:
        return [entry.key for entry in self._walk(prefix, recursive=True, bare=True)]

    def _walk(self, prefix: str, *, recursive: bool, **how: Any) -> Entries:
        with translated(prefix, self.url):
            try:
                with folders.folder_of(self.url, parts_of(prefix)) as folder:
                    return folders.walk(folder, prefix, self.url, recursive=recursive, **how)
            except (FileNotFoundError, NotADirectoryError):
                if not prefix:
                    raise
                with folders.folder_of(self.url, []):  # an absent root is an error, an absent folder is not
                    return []

    def stat(self, key: str) -> Entry:
        with translated(key, self.url):
            if not key:
                disguised = RECORDS_FOLDER in self.url  # names in the records are stored in another form
                return entry_of("", os.stat(self.path_of("") if disguised else self.url))
            with place_of(self.url, key) as (folder, name):
                return folders.entry_at(folder, name, key)

    def open(self, key: str) -> LocalReader:
        with translated(key, self.url), place_of(self.url, key) as (folder, name):
            descriptor, entry = self._open_file(folder, name, key)
        return LocalReader(descriptor, entry, self.url, self.stat)

    def create(self, key: str, data: bytes) -> None:
        with (
            translated(key, self.url),
            place_of(self.url, key, make=True) as (folder, name),
            unnamed(folder) as (descriptor, temporary_name),
        ):
            write_all(descriptor, data, 0)
            publish(folder, descriptor, temporary_name, name)

    def upload(self, key: str, *, replace: bool = False) -> LocalUpload:
        return LocalUpload(self.url, key, replace=replace)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            exclusive_create=True, exclusive_upload=True, links=True, folders=True, etags=False, any_name=True
        )

    def free_space(self) -> int | None:
        with translated("", self.url):
            place = self.url
            while not os.path.lexists(place):  # a root that the first write will create
                place = os.path.dirname(place)
            found = os.statvfs(place)
            return found.f_bavail * found.f_frsize

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        with translated(source, self.url), place_of(self.url, source) as (folder, name):
            descriptor, entry = self._open_file(folder, name, source)
            try:
                with (
                    translated(target, self.url),
                    place_of(self.url, target, make=True) as (target_folder, target_name),
                ):
                    if is_there(target_folder, target_name):  # before any work; the publication is exclusive anyway
                        raise ObjectExistsError(f"{escape(target)}: exists already", key=target)
                    done = self._copy_file(descriptor, entry, target_folder, target_name, how)
                    if done is None and _link(folder, name, descriptor, target_folder, target_name):
                        done = "link"
                    return done or str(self._copy_file(descriptor, entry, target_folder, target_name, "copy"))
            finally:
                os.close(descriptor)

    def move(self, source: str, target: str) -> None:
        with (
            translated(source, self.url),
            place_of(self.url, source) as (folder, name),
            translated(target, self.url),
        ):
            kind = folders.entry_at(folder, name, source).kind if is_there(folder, name) else None
            if kind is None:
                raise ObjectMissingError(f"{escape(source)}: there is no such file", key=source)
            with place_of(self.url, target, make=True) as (target_folder, target_name):
                await_quiet(target_folder)
                move_exclusively(folder, name, target_folder, target_name, is_folder=kind == "folder")
                folders.sync_folder(target_folder)
                ours(target_folder)
                note_own_removal(self.url, source)
                if not os.path.samestat(os.fstat(folder), os.fstat(target_folder)):
                    folders.sync_folder(folder)
                    ours(folder)
        if kind == "folder" and self._is_holding(source) != self._is_holding(target):
            self.settle_names(target)

    def settle_names(self, key: str) -> None:
        with (
            contextlib.suppress(StorageError),
            translated(key, self.url),
            place_of(self.url, key) as (above, name),
        ):
            folder = os.open(name, folders.LIST, dir_fd=above)
            try:
                hold_names(folder, self.url, parts_of(key))
            finally:
                os.close(folder)

    def path_of(self, key: str) -> str:
        return lying_path(self.url, parts_of(key))

    def _is_holding(self, key: str) -> bool:
        return is_holding(self.url, parts_of(key))

    def remove(self, key: str) -> None:
        with translated(key, self.url):
            try:
                with place_of(self.url, key, writes=True) as (folder, name):
                    if not is_being_removed(folder):
                        folders.remove_tree(folder, name)
                        note_own_removal(self.url, key)
                        folders.sync_folder(folder)
            except (FileNotFoundError, NotADirectoryError):
                with folders.folder_of(self.url, []):
                    pass

    def _open_file(self, folder: int, name: str, key: str) -> tuple[int, Entry]:
        # Opening a device can have effects, so the kind is checked before and, against races, after.
        if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
            raise DeniedError(f"{escape(key)} is not a regular file", key=key)
        descriptor = os.open(name, _OPEN, dir_fd=folder)
        entry = entry_of(key, os.fstat(descriptor))
        if entry.kind != "file":
            os.close(descriptor)
            raise DeniedError(f"{escape(key)} is not a regular file", key=key)
        return descriptor, entry

    def _copy_file(self, source: int, entry: Entry, folder: int, name: str, how: str) -> str | None:
        """Copy or reflink one file. None if only a link is left to try."""
        with unnamed(folder, 0o600) as (descriptor, temporary_name):
            done = "reflink" if how != "copy" and clone_into(source, descriptor) else None
            if done is None:
                if how == "link":
                    return None
                _copy_blocks(source, descriptor, entry)
                done = "copy"
            if entry_of(entry.key, os.fstat(source)).signature != entry.signature:
                raise ChangedWhileReadError(f"{escape(entry.key)} changed while it was copied", key=entry.key)
            before = os.fstat(source)
            give_owner_and_mode(descriptor, before)
            publish(folder, descriptor, temporary_name, name)
            return done


def _copy_blocks(source: int, target: int, entry: Entry) -> None:
    # Not copy_file_range: it may share blocks, and an independent copy must survive a damaged block.
    offset = 0
    while block := os.pread(source, _BLOCK, offset):
        write_all(target, block, offset)
        offset += len(block)
    if offset != entry.size:
        raise ChangedWhileReadError(f"{escape(entry.key)} changed while it was copied", key=entry.key)


def _link(source_folder: int, source: str, descriptor: int, folder: int, name: str) -> bool:
    try:
        make(
            folder,
            name,
            lambda: os.link(source, name, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False),
        )
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    linked, opened = os.lstat(name, dir_fd=folder), os.fstat(descriptor)
    if (linked.st_dev, linked.st_ino) != (opened.st_dev, opened.st_ino):  # the name was replaced meanwhile
        os.unlink(name, dir_fd=folder)
        raise ChangedWhileReadError(f"{escape(source)} changed while it was linked", key=source)
    sync(descriptor)  # trainers do not sync their saves; a protected one should survive a power cut
    folders.sync_folder(folder)
    return True


class LocalUpload(Upload):
    """An `Upload` into a temporary file, without a name where that is possible."""

    def __init__(self, root: str, key: str, *, replace: bool) -> None:
        self._root, self._key, self._replace, self._length = root, key, replace, 0
        with contextlib.ExitStack() as stack, translated(key, root):
            self._folder, self._name = stack.enter_context(place_of(root, key, make=True))
            self._refuse_taken()
            self._descriptor, self._temporary = stack.enter_context(unnamed(self._folder))
            self._open = stack.pop_all()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        left, before = memoryview(data).cast("B"), self._length
        with translated(self._key, self._root):
            write_all(self._descriptor, left, before)
        self._length += len(left)
        begin, end = (at - at % _WRITTEN_OUT for at in (before, self._length))
        if begin < end and hasattr(os, "posix_fadvise"):
            # Linux writes pages that are no longer needed: begin now, so that the final fsync is short.
            with contextlib.suppress(OSError):  # only a hint
                os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        try:
            with translated(self._key, self._root):
                self._refuse_taken()
                if self._replace:
                    with contextlib.suppress(FileNotFoundError):  # a user who could not read the old file still cannot
                        before = os.lstat(self._name, dir_fd=self._folder)
                        if not stat.S_ISLNK(before.st_mode):  # a link is replaced, and has no mode of its own
                            give_owner_and_mode(self._descriptor, before)
                    replace(self._folder, self._descriptor, self._temporary, self._name)
                else:
                    publish(self._folder, self._descriptor, self._temporary, self._name)
        finally:
            self.abort()

    def abort(self) -> None:
        with translated(self._key, self._root):
            self._open.close()

    def _refuse_taken(self) -> None:
        try:
            is_folder = stat.S_ISDIR(os.lstat(self._name, dir_fd=self._folder).st_mode)
        except FileNotFoundError:
            return
        if is_folder or not self._replace:
            raise ObjectExistsError(f"{escape(self._key)}: exists already", key=self._key)


@dataclass(eq=False)
class LocalReader(Reader):
    """A `Reader` with pread. No memory maps, because a writer that truncates a mapped file kills the reader."""

    _descriptor: int
    entry: Entry
    _where: str
    _stat_now: Callable[[str], Entry]

    def read(self, offset: int, length: int) -> bytes:
        # Do not allocate the requested length first: a hostile header could ask for more than the file holds.
        if offset + length > self.entry.size:
            raise self._changed("ends earlier than expected")
        with translated(self.entry.key, self._where):
            found = os.pread(self._descriptor, length, offset)  # one allocation, because it may be large
        if len(found) == length:
            return found
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        done = 0
        with translated(self.entry.key, self._where):
            while done < len(buffer):
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    raise self._changed("ends earlier than expected")
                done += count

    def check_unchanged(self) -> None:
        key = self.entry.key
        with translated(key, self._where):
            opened = entry_of(key, os.fstat(self._descriptor))
            try:
                present = self._stat_now(key)
            except ObjectMissingError as error:
                raise self._changed("vanished") from error
        if not opened.signature == present.signature == self.entry.signature or present.kind != "file":
            raise self._changed("changed")

    def done_with(self, offset: int, length: int) -> None:
        if hasattr(os, "posix_fadvise") and length > 0:
            try:
                os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)
            except OSError:
                pass  # only a hint

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _changed(self, what: str) -> ChangedWhileReadError:
        key = self.entry.key
        return ChangedWhileReadError(f"{escape(key)} {what} while it was read", key=key)

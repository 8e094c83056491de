"""Any fsspec file system as a `Storage`: object stores, ``memory://``, and whatever else has a plug-in.

Nothing here relies on renames, folders, modification times or cached listings, which an object store does not offer or
gets wrong. The one guarantee that must come from the store is the conditional put. A probe finds a store that ignores
the condition; then only one writer at a time is safe.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ckptguard.errors import DeniedError, ObjectExistsError, ObjectMissingError, StorageError
from ckptguard.storage.failures import translated
from ckptguard.storage.keys import parts_of
from ckptguard.storage.protocol import Capabilities, Entry, Storage
from ckptguard.storage.remote.conditional_put import ConditionalPuts
from ckptguard.storage.remote.listing import RemoteListing, entry_of
from ckptguard.storage.remote.multipart import parts_for
from ckptguard.storage.remote.reader import RemoteReader
from ckptguard.storage.remote.root import RemoteRoot
from ckptguard.storage.remote.upload import RemoteUpload
from ckptguard.storage.retries import Retries
from ckptguard.storage.traits import StoreTraits
from ckptguard.values.ids import escape

# fsspec's memory file system checks and then writes; its one store is global to the process, and so is this lock.
_MEMORY_LOCK = threading.RLock()


class RemoteStorage(Storage):
    """Bytes under a prefix of an fsspec file system, which `connect` opens. Folders need not exist: a prefix is there
    while objects are."""

    def __init__(self, url: str, connect: Callable[[], tuple[Any, str]], retries: Retries | None = None) -> None:
        self.url = url
        self._retries = retries if retries is not None else Retries()
        self._root = RemoteRoot(url, connect)
        self._listing = RemoteListing(self._root)
        self._conditional = ConditionalPuts(self._root)

    @property
    def _fs(self) -> Any:
        return self._root.fs

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Callable[[str], bool] | None = None
    ) -> list[Entry]:
        with translated(prefix, self.url):
            found = self._listing.under(prefix, recursive=recursive, enter=enter)
        return sorted(found, key=lambda entry: entry.key)

    def stat(self, key: str) -> Entry:
        with translated(key, self.url):
            if self._root.cut_above(self._root.path(key)) is None:
                return entry_of(key, self._fs.info(self._root.path(key)))
            if not self._listing.is_present(key):
                raise FileNotFoundError(key)
            return Entry(key=key, kind="folder")

    def open(self, key: str) -> RemoteReader:
        entry = self.stat(key)
        if entry.kind != "file":
            raise DeniedError(f"{escape(key)} is not a regular file", key=key)
        return RemoteReader(lambda: self._fs, self._root.path(key), entry, self.url, self.stat)

    def create(self, key: str, data: bytes) -> None:
        """See `Storage.create`. An answer can get lost between a store and us, so where the store reports a conflict
        the object is read back, and the same bytes count as ours: what must have one winner needs a nonce in it."""
        with translated(key, self.url), self._exclusive():
            path = self._root.object_path(key)
            if not self._conditional.of_objects() and self._fs.exists(path):
                raise FileExistsError(key)
            try:
                self._fs.pipe_file(path, data, mode="create")
            except OSError as error:
                present = None
                with contextlib.suppress(FileNotFoundError):
                    present = self._fs.cat_file(path)
                if present is None:
                    raise
                if self._root.traits.in_process or present != data:
                    raise ObjectExistsError(f"{escape(self.url)}/{escape(key)}: exists already", key=key) from error

    def upload(self, key: str, *, replace: bool = False) -> RemoteUpload:
        path = self._root.object_path(key)

        def refuse_taken() -> None:
            try:
                taken = self.stat(key).kind
            except ObjectMissingError:
                return
            if taken != "file" or not replace:
                raise ObjectExistsError(f"{escape(self.url)}/{escape(key)}: exists already", key=key)

        def put_whole(data: bytes) -> None:
            if replace:
                self._fs.pipe_file(path, data)
            else:
                self.create(key, data)

        self._root.refuse(key)
        refuse_taken()
        return RemoteUpload(
            key,
            self.url,
            lambda: parts_for(self._root.traits, self._fs, path, exclusive=not replace),
            put_whole,
            refuse_taken,
            replace=replace,
            retries=self._retries,
        )

    def capabilities(self) -> Capabilities:
        with translated("", self.url):
            return Capabilities(
                exclusive_create=self._conditional.of_objects(),
                exclusive_upload=self._conditional.of_parts(),
                links=False,
                folders=self._root.traits.in_process,
                etags=self._root.traits.etags,
                any_name=self._root.traits.mangled_names is None,
            )

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        del how  # a store has no links; its own copy is independent
        with translated(source, self.url), self._exclusive():
            entry = entry_of(source, self._fs.info(self._root.path(source)))
            if entry.kind != "file":
                raise DeniedError(f"{escape(source)} is not a regular file", key=source)
            with translated(target, self.url):
                self._copy_object(entry, target)
        return "copy"

    def move(self, source: str, target: str) -> None:
        parts_of(target)
        with translated(source, self.url), self._exclusive():
            moved = self._listing.at_or_below(source)
            if not moved:
                raise FileNotFoundError(source)
            if self._listing.is_present(target):
                raise ObjectExistsError(f"{escape(self.url)}/{escape(target)}: exists already", key=target)
            for entry in moved:
                self._copy_step(entry, target + entry.key.removeprefix(source))
            self._retries.run(source, lambda: self.remove(source))  # last: killed before this line, nothing is lost

    def remove(self, key: str) -> None:
        self._root.refuse(key)
        with translated(key, self.url), self._exclusive():
            folders: set[str] = {key}
            for entry in self._listing.at_or_below(key):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._root.path(entry.key))
                parts = entry.key.split("/")
                folders.update("/".join(parts[:n]) for n in range(key.count("/") + 1, len(parts)))
            for folder in sorted(folders, reverse=True):
                with contextlib.suppress(Exception):  # only file systems that have real folders leave any behind
                    self._fs.rmdir(self._root.path(folder))

    def place(self, key: str) -> tuple[Any, str]:
        """The file system and the path of a key in it, for what only one kind of store can do."""
        return self._fs, self._root.path(key)

    @property
    def traits(self) -> StoreTraits:
        """Which kind of store this is."""
        return self._root.traits

    def _copy_step(self, entry: Entry, target: str) -> None:
        """One copy of a move, tried again by itself: a move as a whole cannot be, once some of it is done."""

        def attempt() -> None:
            with translated(target, self.url):
                self._copy_object(entry, target)

        def is_ours() -> bool:
            there = self.stat(target)
            return (there.size, there.etag) == (entry.size, entry.etag)

        self._retries.run_exclusive(target, attempt, is_ours)

    def _copy_object(self, entry: Entry, target: str) -> None:
        path = self._root.object_path(target)
        if self._listing.is_present(target):
            raise ObjectExistsError(f"{escape(self.url)}/{escape(target)}: exists already", key=target)
        try:
            self._fs.cp_file(self._root.path(entry.key), path)
        except NotImplementedError as error:
            raise StorageError(f"{escape(self.url)} cannot copy objects", key=target) from error
        if self._fs.info(path).get("size") != entry.size:
            raise StorageError(f"{escape(target)}: the copy has another size than its source", key=target)

    def _exclusive(self) -> contextlib.AbstractContextManager[object]:
        return _MEMORY_LOCK if self._root.traits.in_process else contextlib.nullcontext()

"""Any fsspec file system as a `Storage`: object stores, ``memory://``, and everything else with a plug-in.

Nothing here relies on renames, folders, modification times or cached listings, which an object store lacks or gets
wrong. Only the conditional put must be right. A probe finds a store that ignores its condition; then only one writer at
a time is safe.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from ckptguard.errors import (
    DeniedError,
    ObjectExistsError,
    ObjectMissingError,
    StorageError,
    TransientError,
)
from ckptguard.storage.failures import is_condition_failed, storage_error, translated
from ckptguard.storage.protocol import Capabilities, Enter, Entry, Storage, parts_of, require_file
from ckptguard.storage.ranged_reader import RangedReader, changed
from ckptguard.storage.remote.listing import RemoteRoot, entry_of
from ckptguard.storage.remote.multipart import MultipartUpload, parts_for
from ckptguard.storage.remote.upload import RemoteUpload
from ckptguard.storage.retries import Retries, RetryingStorage
from ckptguard.storage.traits import StoreTraits
from ckptguard.values.ids import escape
from ckptguard.values.temporary_names import RECORD

# fsspec's memory file system checks and then writes. Its one store is global to the process, and so is this lock.
_MEMORY_LOCK = threading.RLock()
_MOST_PAGES = 1000
_SMALL = 1 << 20  # bytes of an object that is read at once
_LARGEST_COPY = 5 << 30  # bytes that one request may copy


class RemoteStorage(Storage):
    """Bytes at a prefix of an fsspec file system, which `connect` opens. A folder exists while it has objects."""

    copies_itself = True

    def __init__(self, url: str, connect: Callable[[], tuple[Any, str]], retries: Retries | None = None) -> None:
        self.url = url
        self._retries = retries if retries is not None else Retries()
        self._root = RemoteRoot(url, connect)
        self._conditional = ConditionalPuts(self._root)

    @property
    def _fs(self) -> Any:
        return self._root.fs

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> list[Entry]:
        with translated(prefix, self.url):
            found = self._root.under(prefix, recursive=recursive, enter=enter, unread=unread)
        return sorted(found, key=lambda entry: entry.key)

    def stat(self, key: str) -> Entry:
        with translated(key, self.url):
            if not key and self._root.has_objects():
                return Entry(key="", kind="folder")
            if self._root.cut_above(self._root.path(key)) is None:
                return entry_of(key, self._root.info(key))
            if not self._root.is_present(key):
                raise FileNotFoundError(key)
            return Entry(key=key, kind="folder")

    def open(self, key: str) -> RemoteReader:
        entry = require_file(self.stat(key))
        return RemoteReader(lambda: self._fs, self._root.path(key), entry, self.url, self.stat)

    def open_listed(self, entry: Entry) -> RemoteReader:
        if not self.traits.conditional_reads:
            return self.open(entry.key)
        if entry.etag is None:
            opened = self.open(entry.key)
            if (opened.entry.size, opened.entry.mtime_ns) != (entry.size, entry.mtime_ns):
                raise changed(entry.key)
            return opened
        return ConditionalReader(lambda: self._fs, self._root.path(entry.key), entry, self.url, self.stat)

    def create(self, key: str, data: bytes) -> None:
        """Create as `Storage.create` does. After a conflict the object is read back, because an answer may have been
        lost.

        Equal bytes count as ours, so a record that needs one winner must contain a nonce.
        """
        with translated(key, self.url), self._exclusive():
            path = self._root.object_path(key)
            if not self._conditional.of_objects and self._fs.exists(path):
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

        def begin() -> MultipartUpload:
            return parts_for(self.traits, self._fs, path, exclusive=not replace)

        parts_of(key, below=self.url)
        refuse_taken()
        put = (lambda data: self._fs.pipe_file(path, data)) if replace else (lambda data: self.create(key, data))
        return RemoteUpload(key, self.url, begin, put, refuse_taken, replace=replace, retries=self._retries)

    def capabilities(self) -> Capabilities:
        with translated("", self.url):
            return Capabilities(
                exclusive_create=self._conditional.of_objects,
                exclusive_upload=self._conditional.of_parts,
                links=False,
                folders=self._root.traits.in_process,
                etags=self._root.traits.etags,
                any_name=self._root.traits.mangled_names is None,
            )

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        # For every `how`: a store has no links, and its own copy is independent.
        with translated(source, self.url), self._exclusive():
            entry = require_file(entry_of(source, self._root.info(source)))
            with translated(target, self.url):
                self._copy_object(entry, target)
        return "copy"

    def copy_listed(self, entry: Entry, target: str, *, how: str = "copy") -> str:
        # A store that copies what a condition names needs no look at either side.
        if not self.traits.conditional_reads or entry.etag is None or entry.size > _LARGEST_COPY:
            return self.copy(entry.key, target, how=how)
        with translated(entry.key, self.url):
            path = self._root.object_path(target)
            bucket, key, _ = self._fs.split_path(self._root.path(entry.key))
            into, name, _ = self._fs.split_path(path)
            source = {"Bucket": bucket, "Key": key}
            with _only_unchanged(entry.key):
                self._fs.call_s3("copy_object", Bucket=into, Key=name, CopySource=source, CopySourceIfMatch=entry.etag)
        return "copy"

    def remove_listed(self, keys: Sequence[str]) -> None:
        for key in keys:
            parts_of(key, below=self.url)
            with translated(key, self.url), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._root.path(key))

    def move(self, source: str, target: str) -> None:
        parts_of(target)
        with translated(source, self.url), self._exclusive():
            moved = self._root.at_or_below(source)
            if not moved:
                raise FileNotFoundError(source)
            if self._root.is_present(target):
                raise ObjectExistsError(f"{escape(self.url)}/{escape(target)}: exists already", key=target)
            for entry in moved:
                self._copy_step(entry, target + entry.key.removeprefix(source))
            self._retries.run(
                source, lambda: self.remove(source)
            )  # last, so that a kill before this line loses nothing

    def remove(self, key: str) -> None:
        parts_of(key, below=self.url)
        with translated(key, self.url), self._exclusive():
            folders: set[str] = {key} if not self.traits.flat_listing else set()
            for entry in self._root.at_or_below(key):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._root.path(entry.key))
                if self.traits.flat_listing:
                    continue  # there are no folders
                parts = entry.key.split("/")
                folders.update("/".join(parts[:n]) for n in range(key.count("/") + 1, len(parts)))
            for folder in sorted(folders, reverse=True):
                with contextlib.suppress(Exception):  # only file systems with real folders leave any behind
                    self._fs.rmdir(self._root.path(folder))

    def place(self, key: str) -> tuple[Any, str]:
        """Return the file system and the path of a key in it, for what only one kind of store can do."""
        return self._fs, self._root.path(key)

    @property
    def traits(self) -> StoreTraits:
        """The kind of store."""
        return self._root.traits

    def _copy_step(self, entry: Entry, target: str) -> None:
        """Copy one object of a move, with its own retries: a half-done move cannot be repeated."""

        def attempt() -> None:
            with translated(target, self.url):
                self._copy_object(entry, target)

        def is_ours() -> bool:
            there = self.stat(target)
            return (there.size, there.etag) == (entry.size, entry.etag)

        self._retries.run_exclusive(target, attempt, is_ours)

    def _copy_object(self, entry: Entry, target: str) -> None:
        path = self._root.object_path(target)
        if self._root.is_present(target):
            raise ObjectExistsError(f"{escape(self.url)}/{escape(target)}: exists already", key=target)
        try:
            self._fs.cp_file(self._root.path(entry.key), path)
        except NotImplementedError as error:
            raise StorageError(f"{escape(self.url)} cannot copy objects", key=target) from error
        if self._fs.info(path).get("size") != entry.size:
            raise StorageError(f"{escape(target)}: the copy has another size than its source", key=target)

    def _exclusive(self) -> contextlib.AbstractContextManager[object]:
        return _MEMORY_LOCK if self._root.traits.in_process else contextlib.nullcontext()


class RemoteReader(RangedReader):
    """A `Reader` with ranged reads, of a small object with one. There is no handle, so only `check_unchanged` notices a
    replaced object."""

    def __init__(
        self, file_system: Callable[[], Any], path: str, entry: Entry, where: str, stat_now: Callable[[str], Entry]
    ) -> None:
        super().__init__(entry, where, stat_now)
        self._fs = file_system
        self._path = path
        self._whole: bytes | None = None
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> bytes:
        if self.entry.size > _SMALL or offset + length > self.entry.size:
            return super().read(offset, length)
        with self._lock:
            if self._whole is None:
                self._whole = super().read(0, self.entry.size)
        return self._whole[offset : offset + length]

    def _answer(self, offset: int, length: int) -> bytes:
        return cast("bytes", self._fs().cat_file(self._path, start=offset, end=offset + length))


class ConditionalReader(RemoteReader):
    """The same for an object that was listed. All bytes are of this object and of no later one: each request names its
    tag, and so must each answer, because some servers ignore the condition. The caller lists again at the end, which
    shows whether it is still there.
    """

    def _answer(self, offset: int, length: int) -> bytes:
        data, tag = self._got(offset, length)
        if self._may_be_another(data):
            again, later = self._got(offset, length)
            if again != data or _bare(later or tag) != _bare(tag):
                raise changed(self.entry.key)
            tag = None
        if _bare(tag or self._tag_now()) != _bare(self.entry.etag):
            raise changed(self.entry.key)
        return data

    def _may_be_another(self, data: bytes) -> bool:
        """True if the whole object was read, its tag looks like an MD5, and the bytes have another one. Where a store
        encrypts with keys of its own the tag only looks like one, and a second answer has the same bytes. But stores
        under load were seen to name the tag of one object with the bytes of the next, for a moment."""
        tag = _bare(self.entry.etag)
        if len(data) != self.entry.size or re.fullmatch("[0-9a-f]{32}", tag) is None:
            return False
        return hashlib.md5(data, usedforsecurity=False).hexdigest() != tag

    def _tag_now(self) -> str | None:
        """Ask for the tag by itself, where an answer has none."""
        try:
            return self._stat_now(self.entry.key).etag
        except ObjectMissingError:
            return None

    def _got(self, offset: int, length: int) -> tuple[bytes, str | None]:
        """Return one answer to a request for exactly this object: the bytes, and the tag that it names."""
        from fsspec.asyn import sync  # it takes long to import, and local runs need none of this

        fs, last = self._fs(), offset + length - 1
        with _only_unchanged(self.entry.key):
            return cast("tuple[bytes, str | None]", sync(fs.loop, self._get, fs, f"bytes={offset}-{last}"))

    async def _get(self, fs: Any, span: str) -> tuple[bytes, str | None]:
        bucket, key, _ = fs.split_path(self._path)
        found = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, IfMatch=self.entry.etag)
        try:
            return await found["Body"].read(), found.get("ETag")
        finally:
            found["Body"].close()

    def check_unchanged(self) -> None:
        """Do nothing: each read did."""


@contextlib.contextmanager
def _only_unchanged(key: str) -> Iterator[None]:
    """Raise ChangedWhileReadError if the store refuses a request because the object is another one now."""
    try:
        yield
    except Exception as error:
        if is_condition_failed(error):
            raise changed(key) from error
        raise


def _bare(tag: str | None) -> str:
    """Return a tag without what only some answers have: quotes, and a proxy's mark that it may compress."""
    return (tag or "").removeprefix("W/").strip('"')


class ConditionalPuts:
    """What a store can do, each tried once with an object of our own. An error of the store is no answer."""

    def __init__(self, root: RemoteRoot) -> None:
        self._root = root
        if root.traits.in_process:
            self.of_objects = self.of_parts = True

    @functools.cached_property
    def of_objects(self) -> bool:
        """True if `pipe_file(mode="create")` is exclusive."""
        return self._first_wins("create", lambda path: self._root.fs.pipe_file(path, b"2", mode="create"))

    @functools.cached_property
    def of_parts(self) -> bool:
        """The same for objects that are assembled from parts."""
        return self._first_wins("overwrite", self._put_parts)

    def _first_wins(self, mode: str, put_again: Callable[[str], None]) -> bool:
        fs, probe = self._root.fs, self._root.path(RECORD.new())
        try:
            fs.pipe_file(probe, b"1", mode=mode)
            try:
                put_again(probe)
            except OSError as error:
                if isinstance(storage_error(error, "", self._root.url), TransientError | DeniedError):
                    raise
            return bool(fs.cat_file(probe) == b"1")
        finally:
            with contextlib.suppress(Exception):
                fs.rm_file(probe)

    def _put_parts(self, path: str) -> None:
        parts = parts_for(self._root.traits, self._root.fs, path, exclusive=True)
        try:
            parts.put(0, b"2")
            parts.finish(exclusive=True)
        except OSError:
            parts.abandon()
            raise


def end_uploads(storage: Storage, folder: str, begun_before: Callable[[], float | None] | None = None) -> list[str]:
    """Abort unfinished multipart uploads below a folder, and return their keys. Raises StorageError.

    `begun_before` returns the latest Unix time of their start; it is called only if there are any. No listing shows
    such uploads, and a store keeps and bills them. This works only for stores that list them: Azure and Google drop
    such parts after a week, and elsewhere they are visible files. The caller knows that nobody writes there. `folder`
    is not the root.
    """
    storage = storage.now()
    while isinstance(storage, RetryingStorage):
        storage = storage.inner
    if not isinstance(storage, RemoteStorage) or not storage.traits.lists_uploads:
        return []
    fs, path = storage.place(folder)
    bucket, prefix, _ = fs.split_path(path + "/")
    root = prefix.removesuffix(f"{folder}/")
    ended = []
    with translated(folder, storage.url):
        found = _listed(fs, bucket, prefix)
        if found and begun_before is not None:
            limit = begun_before()
            found = [u for u in found if limit is not None and u["Initiated"].timestamp() < limit]
        for upload in found:
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            ended.append(upload["Key"].removeprefix(root))
    return ended


def _listed(fs: Any, bucket: str, prefix: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    marker: dict[str, str] = {}
    for _ in range(_MOST_PAGES):
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        found += [u for u in page.get("Uploads") or () if u["Key"].startswith(prefix)]
        if not page.get("IsTruncated"):
            break
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker") or ""}
    return found

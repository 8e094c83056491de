"""A folder of an SFTP server as a `Storage`: real folders, real renames, hard links if the server supports them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Any

from ckptguard.errors import ObjectExistsError, ObjectMissingError
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Capabilities, Enter, Entry, Storage, is_plain, join, parts_of, require_file
from ckptguard.storage.ranged_reader import listed_by_levels
from ckptguard.storage.sftp.files import SftpReader, SftpSession, SftpUpload, attributes_of, publish
from ckptguard.values.ids import escape
from ckptguard.values.temporary_names import RECORD

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_BLOCK = 4 << 20

# inside the class, `list` is the method
Entries = list[Entry]
Names = list[tuple[str, Any]]


class SftpStorage(Storage):
    """Bytes in a remote folder. Links below the root are listed, never followed."""

    def __init__(self, url: str, connect: Callable[[], tuple[Any, str]]) -> None:
        self.url = url
        self._session = SftpSession(connect)
        self._base = self._session.base.rstrip("/") or "/"
        self._real_base: str | None = None
        self._links: bool | None = None

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> Entries:
        def level(folder: str) -> Entries:
            try:
                return self._level(folder)
            except (FileNotFoundError, NotADirectoryError):
                if folder == prefix and self._attributes("") is None:
                    raise FileNotFoundError(self.url) from None
                return []

        with translated(prefix, self.url):
            found = listed_by_levels(prefix, level, self.url, recursive=recursive, enter=enter, unread=unread)
        return sorted(found, key=lambda entry: entry.key)

    def stat(self, key: str) -> Entry:
        with translated(key, self.url):
            found = self._attributes(key)
            if found is None:
                raise FileNotFoundError(key)
            return self._entry(key, found)

    def open(self, key: str) -> SftpReader:
        entry = require_file(self.stat(key))
        with translated(key, self.url):
            return SftpReader(self._session, self._path(key), entry, self.url, self.stat)

    def create(self, key: str, data: bytes) -> None:
        with self.upload(key) as upload:
            upload.write(data)
            upload.commit()

    def upload(self, key: str, *, replace: bool = False) -> SftpUpload:
        with translated(key, self.url):
            return SftpUpload(self._session, self._made(key), key, self.url, replace=replace)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        with translated(source, self.url):
            entry = require_file(self.stat(source))
            with translated(target, self.url):
                path = self._made(target)
                if attributes_of(self._session, path) is not None:
                    raise ObjectExistsError(f"{escape(target)}: exists already", key=target)
                if how == "link" and self._can_link():
                    publish(self._session, self._path(source), path)
                    return "link"
            if not self._copied_there(entry, path):
                self._copied_through(source, target)
        return "copy"

    def move(self, source: str, target: str) -> None:
        with translated(source, self.url):
            if self._attributes(source) is None or not source:
                raise ObjectMissingError(f"{escape(source)}: there is no such object", key=source)
            if target == source or target.startswith(source + "/"):
                raise ObjectExistsError(f"{escape(target)}: exists already", key=target)
            with translated(target, self.url):
                path = self._made(target)
                if attributes_of(self._session, path) is not None:
                    raise ObjectExistsError(f"{escape(target)}: exists already", key=target)
                self._session.run(lambda client: client.rename(self._path(source), path))

    def remove(self, key: str) -> None:
        parts_of(key, below=self.url)
        with translated(key, self.url):
            found = self._attributes(key)
            if found is None:
                return
            folders = []
            pending = [key] if self._entry(key, found).kind == "folder" else []
            if not pending:
                self._gone("remove", key)
            while pending:
                folder = pending.pop()
                folders.append(folder)
                for name, attributes in self._names(folder):
                    below = join(folder, name)
                    if self._entry(below, attributes).kind == "folder":
                        pending.append(below)
                    else:
                        self._gone("remove", below)
            for folder in reversed(folders):
                self._gone("rmdir", folder)

    def capabilities(self) -> Capabilities:
        with translated("", self.url):
            links = self._can_link()
        return Capabilities(
            exclusive_create=links, exclusive_upload=links, links=links, folders=True, etags=False, any_name=True
        )

    def free_space(self) -> int | None:
        with translated("", self.url):
            place = self._base
            while len(place) > 1 and attributes_of(self._session, place) is None:
                place = place.rpartition("/")[0] or "/"
            try:
                found = self._session.run(lambda client: client.statvfs(place))
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                return None
            return int(found.bavail * found.frsize)

    def _path(self, key: str) -> str:
        return "/".join([self._base.rstrip("/"), *parts_of(key)]) or "/"

    def _made(self, key: str) -> str:
        """Return the path of a key, and create its missing folders."""
        parts_of(key, below=self.url)
        path = self._path(key)
        folder = path.rpartition("/")[0] or "/"
        try:
            self._session.run(lambda client: client.makedirs(folder, exist_ok=True))
        except OSError as error:
            # For a file in the way, version 3 only says "failure".
            if error.errno == errno.EIO:
                raise NotADirectoryError(folder) from error
            raise
        self._no_links_on_the_way(key)
        return path

    def _attributes(self, key: str) -> Any:
        path = self._path(key)
        if not key:
            try:
                return self._session.run(
                    lambda client: client.stat(path)
                )  # the user named the root, so it may be a link
            except FileNotFoundError:
                return None
        found = attributes_of(self._session, path)
        if found is not None:
            self._no_links_on_the_way(key)
        return found

    def _no_links_on_the_way(self, key: str) -> None:
        above = key.rpartition("/")[0]
        if not above:
            return
        if self._real_base is None:
            self._real_base = self._session.run(lambda client: client.realpath(self._base))
        real = self._session.run(lambda client: client.realpath(self._path(above)))
        if real != f"{self._real_base.rstrip('/')}/{above}":
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _names(self, folder: str) -> Names:
        path = (
            f"{self._base.rstrip('/')}/{folder}".rstrip("/") or "/"
        )  # by the listed name, which need not be a valid key

        async def read(client: Any) -> Names:
            return [(name.filename, name.attrs) async for name in client.scandir(path)]

        return [pair for pair in self._session.run(read) if pair[0] not in (".", "..")]

    def _level(self, folder: str) -> Entries:
        there = self._attributes(folder)
        if there is None:
            raise FileNotFoundError(folder)
        kind = self._entry(folder, there).kind
        if kind != "folder":
            raise OSError(errno.ELOOP if kind == "link" else errno.ENOTDIR, folder)
        return [
            self._entry(join(folder, name), attributes)
            if is_plain(name)
            else Entry(key=join(folder, escape(name)), kind="unnamed")
            for name, attributes in self._names(folder)
        ]

    def _entry(self, key: str, attributes: Any) -> Entry:
        kind = _KINDS.get(stat.S_IFMT(attributes.permissions or 0), "other")
        target = None
        if kind == "link":
            with contextlib.suppress(OSError):
                target = escape(self._session.run(lambda client: client.readlink(self._path(key))))
        time = None if attributes.mtime is None else attributes.mtime * 10**9 + (attributes.mtime_ns or 0)
        return Entry(
            key=key, kind=kind, size=attributes.size or 0 if kind == "file" else 0, mtime_ns=time, target=target
        )

    def _gone(self, how: str, key: str) -> None:
        # By the listed name: a removal also takes names that cannot be keys.
        with contextlib.suppress(FileNotFoundError):
            self._session.run(lambda client: getattr(client, how)(f"{self._base.rstrip('/')}/{key}"))

    def _drop(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._session.run(lambda client: client.remove(path))

    def _can_link(self) -> bool:
        """True if the server makes hard links and never replaces a file by one. Tried once with a file of ours."""
        if self._links is None:
            probe = self._made(RECORD.new())
            try:
                self._session.run(lambda client: _touch(client, probe))
                self._session.run(lambda client: client.link(probe, probe + ".link"))
                try:
                    self._session.run(lambda client: client.link(probe, probe + ".link"))
                    self._links = False
                except OSError:
                    self._links = True
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EIO, errno.EACCES):
                    raise
                self._links = False
            finally:
                self._drop(probe)
                self._drop(probe + ".link")
        return self._links

    def _copied_there(self, entry: Entry, path: str) -> bool:
        """Copy on the server. False if it does not support that."""
        temporary = f"{path.rpartition('/')[0]}/{RECORD.new()}"
        try:
            self._session.run(lambda client: client.remote_copy(self._path(entry.key), temporary))
            found = attributes_of(self._session, temporary)
            if found is None or found.size != entry.size:
                raise OSError(errno.EIO, "the copy has another size than its source")
            publish(self._session, temporary, path)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return False
        finally:
            self._drop(temporary)
        return True

    def _copied_through(self, source: str, target: str) -> None:
        with self.open(source) as reader, self.upload(target) as upload:
            size = reader.entry.size
            for at in range(0, size, _BLOCK):
                upload.write(reader.read(at, min(_BLOCK, size - at)))
            reader.check_unchanged()
            upload.commit()


async def _touch(client: Any, path: str) -> None:
    async with client.open(path, "xb") as file:
        await file.write(b"1")

"""Reading one local file that was opened once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from ckptguard.errors import ChangedWhileReadError, ObjectMissingError
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Entry, Reader
from ckptguard.values.ids import escape

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def entry_of(key: str, info: os.stat_result, target: str | None = None) -> Entry:
    """The entry for what lstat or fstat said."""
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
    return Entry(
        key=key,
        kind=kind,
        size=info.st_size if kind == "file" else 0,
        mtime_ns=info.st_mtime_ns,
        inode=info.st_ino,
        target=target,
    )


class LocalReader(Reader):
    """A `Reader` over pread: no memory maps, because a writer that truncates a mapped file kills the reader."""

    def __init__(self, descriptor: int, entry: Entry, where: str, stat_now: Callable[[str], Entry]) -> None:
        self.entry, self._descriptor, self._where, self._stat_now = entry, descriptor, where, stat_now

    def read(self, offset: int, length: int) -> bytes:
        # Not a buffer of the asked length first: a hostile header must not make us allocate what the file cannot hold.
        if offset + length > self.entry.size:
            raise self._changed("ends earlier than expected")
        with translated(self.entry.key, self._where):
            found = os.pread(self._descriptor, length, offset)  # one allocation: it may be large
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

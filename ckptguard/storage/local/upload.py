"""Writing a local file bit by bit that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat

from ckptguard.errors import ObjectExistsError
from ckptguard.storage.failures import translated
from ckptguard.storage.local.folders import folder_of, sync_folder
from ckptguard.storage.local.writes import publish, temporary, write_all
from ckptguard.storage.protocol import Upload
from ckptguard.values.ids import escape


class LocalUpload(Upload):
    """An `Upload` into a temporary file beside the target."""

    def __init__(self, root: str, key: str, parts: list[str], *, replace: bool) -> None:
        self._root, self._key, self._name, self._replace = root, key, parts[-1], replace
        self._length = 0
        with contextlib.ExitStack() as stack, translated(key, root):
            self._folder = stack.enter_context(folder_of(root, parts[:-1], make=True))
            self._refuse_taken()
            self._descriptor, self._temporary = stack.enter_context(temporary(self._folder))
            self._open = stack.pop_all()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with translated(self._key, self._root):
            write_all(self._descriptor, memoryview(data).cast("B"), self._length)
        self._length += len(memoryview(data).cast("B"))

    def commit(self) -> None:
        try:
            with translated(self._key, self._root):
                self._refuse_taken()
                if self._replace:
                    os.fsync(self._descriptor)
                    os.replace(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                    sync_folder(self._folder)
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

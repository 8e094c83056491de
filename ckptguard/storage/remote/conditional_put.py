"""Whether a store keeps exclusive writes exclusive: some ignore the condition, which only a trial tells."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from ckptguard.errors import DeniedError, TransientError
from ckptguard.storage.failures import storage_error
from ckptguard.storage.remote.multipart import MultipartUpload, parts_for
from ckptguard.storage.remote.root import RemoteRoot


class ConditionalPuts:
    """What a store was found to do, each tried once with an object of our own; an error of the store is no answer."""

    def __init__(self, root: RemoteRoot) -> None:
        self._root = root
        self._of_objects: bool | None = True if root.traits.in_process else None
        self._of_parts: bool | None = True if root.traits.in_process else None

    def of_objects(self) -> bool:
        """Whether `pipe_file(mode="create")` is exclusive."""
        if self._of_objects is None:
            with self._probe() as probe:
                self._root.fs.pipe_file(probe, b"1", mode="create")
                try:
                    self._root.fs.pipe_file(probe, b"2", mode="create")
                except OSError as error:
                    self._must_be_an_answer(error)
                self._of_objects = self._root.fs.cat_file(probe) == b"1"
        return self._of_objects

    def of_parts(self) -> bool:
        """The same for objects that are put together from parts."""
        if self._of_parts is None:
            with self._probe() as probe:
                self._root.fs.pipe_file(probe, b"1")
                parts: MultipartUpload | None = None
                try:
                    parts = parts_for(self._root.traits, self._root.fs, probe, exclusive=True)
                    parts.put(0, b"2")
                    parts.finish(exclusive=True)
                except OSError as error:
                    if parts is not None:
                        parts.abandon()
                    self._must_be_an_answer(error)
                self._of_parts = self._root.fs.cat_file(probe) == b"1"
        return self._of_parts

    def _must_be_an_answer(self, error: OSError) -> None:
        if isinstance(storage_error(error, "", self._root.url), TransientError | DeniedError):
            raise error

    @contextlib.contextmanager
    def _probe(self) -> Iterator[str]:
        """The path of an object of our own, gone afterwards."""
        probe = self._root.path(f".tmp-{secrets.token_hex(8)}")
        try:
            yield probe
        finally:
            with contextlib.suppress(Exception):
                self._root.fs.rm_file(probe)

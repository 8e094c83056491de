"""One pass over files: every byte is read once, by pread, into a few buffers that are used again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from blake3 import blake3

from ckptguard.errors import ObjectMissingError
from ckptguard.formats import Structure, read_structure
from ckptguard.scan.digest_names import new_hasher
from ckptguard.scan.digest_threads import DigestThreads, Hasher
from ckptguard.scan.options import Progress, ScanOptions
from ckptguard.scan.pass_over import FilePass
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.scan.views import numbers_of_views
from ckptguard.storage.protocol import Reader, Storage

BLOCK = 1 << 20
RING = 4  # buffers: how far reading may be ahead of the slowest digest; few, so that blocks stay in cache


def scan_files(
    storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
) -> Scan:
    """Scan files in the order given, in this thread and one more for each whole-file digest.

    Bad bytes are in the result. What is raised says nothing about the bytes: StorageError, or ChangedWhileReadError
    for a file that was written, replaced or removed meanwhile.
    """
    started = time.perf_counter()
    with _FileScanner(options or ScanOptions(), progress) as scanner:
        files = tuple(scanner.scan(storage, key) for key in keys)
    return Scan(files=files, seconds=time.perf_counter() - started)


def digest_places(storage: Storage, key: str, places: Sequence[tuple[int, int]]) -> tuple[str | None, ...]:
    """BLAKE3 of (offset, length) ranges of a file; None for a range that reaches beyond its end."""
    buffer = memoryview(bytearray(BLOCK))
    digests: list[str | None] = []
    with storage.open(key) as reader:
        for offset, length in places:
            if offset + length > reader.entry.size:
                digests.append(None)
                continue
            hasher = blake3()
            for begin in range(offset, offset + length, BLOCK):
                block = buffer[: min(BLOCK, offset + length - begin)]
                reader.read_into(begin, block)
                hasher.update(block)
            digests.append(hasher.hexdigest())
        reader.check_unchanged()
    return tuple(digests)


class _FileScanner:
    """Buffers and threads for one scan; both are made only when a file is large enough to want them."""

    def __init__(self, options: ScanOptions, progress: Progress | None) -> None:
        self._options = options
        self._progress = progress
        self._names = list(dict.fromkeys((*(("md5",) if options.md5 else ()), *options.sums)))
        self._buffers: list[memoryview] = []
        self._threads: DigestThreads | None = None
        self._known_beside: dict[str, Structure | None] = {}

    def scan(self, storage: Storage, key: str) -> ScannedFile:
        """One file."""
        with storage.open(key) as reader:
            structure = read_structure(reader, key, lambda name: self._beside(storage, key, name))
            if self._options.structure_only:
                return ScannedFile(
                    entry=reader.entry,
                    structure=structure,
                    envelope="",
                    span_digests=(),
                    numbers=(None,) * len(structure.tensors),
                )
            file_pass = FilePass(structure, reader.entry.size)
            hashers: list[Hasher] = [new_hasher(name, reader.entry.size) for name in self._names]
            if hashers and self._options.threads > 1 and reader.entry.size > BLOCK:
                self._run_threaded(reader, file_pass, hashers)
            else:
                self._run_inline(reader, file_pass, hashers)
            numbers = numbers_of_views(reader, structure, file_pass.numbers())
            reader.check_unchanged()
            entry = reader.entry
        sums = {name: hasher.hexdigest() for name, hasher in zip(self._names, hashers, strict=True)}
        found = file_pass.problems()
        if found:
            structure = msgspec.structs.replace(structure, problems=(*structure.problems, *found))
        return ScannedFile(
            entry=entry,
            structure=structure,
            envelope=file_pass.envelope(),
            span_digests=file_pass.span_digests(),
            numbers=numbers,
            md5=sums.get("md5") if self._options.md5 else None,
            sums={name: sums[name] for name in self._options.sums},
        )

    def _beside(self, storage: Storage, key: str, name: str) -> Structure | None:
        """The structure of a file in the same folder; what it refers to in turn is not looked at."""
        other = key.rpartition("/")[0] + "/" + name if "/" in key else name
        if other not in self._known_beside:
            try:
                with storage.open(other) as reader:
                    self._known_beside[other] = read_structure(reader, other)
            except ObjectMissingError:
                self._known_beside[other] = None
        return self._known_beside[other]

    def _run_inline(self, reader: Reader, file_pass: FilePass, hashers: list[Hasher]) -> None:
        position = 0
        for end in file_pass.ends(BLOCK):
            block = self._buffer(0)[: end - position]
            reader.read_into(position, block)
            for hasher in hashers:
                hasher.update(block)
            file_pass.add(block)
            position = self._done(reader, position, end)

    def _run_threaded(self, reader: Reader, file_pass: FilePass, hashers: list[Hasher]) -> None:
        if self._threads is None:
            self._threads = DigestThreads(len(hashers), RING)
        position = 0
        for number, end in enumerate(file_pass.ends(BLOCK)):
            self._threads.wait_for_room()
            block = self._buffer(number % RING)[: end - position]
            reader.read_into(position, block)
            self._threads.feed(hashers, block)
            file_pass.add(block)
            position = self._done(reader, position, end)
        self._threads.drain()

    def _done(self, reader: Reader, position: int, end: int) -> int:
        if self._options.spare_cache:
            reader.done_with(position, end - position)
        if self._progress is not None:
            self._progress(end - position)
        return end

    def _buffer(self, number: int) -> memoryview:
        while len(self._buffers) <= number:
            self._buffers.append(memoryview(bytearray(BLOCK)))
        return self._buffers[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.close()

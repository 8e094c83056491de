"""The scan of one file: its structure, then every byte once, in one pass or in parallel parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from ckptguard.errors import ObjectMissingError, WorkerError
from ckptguard.formats import Structure, read_structure
from ckptguard.scan.byte_pass import BytePass, numbers_of, problems_of
from ckptguard.scan.options import Progress, ScanOptions
from ckptguard.scan.plan import Part, Plan, parts_of, plan_of
from ckptguard.scan.result import ScannedFile
from ckptguard.scan.span_pieces import elements_of
from ckptguard.scan.thread_buffers import BLOCK, REMOTE_BLOCK, ThreadBuffers
from ckptguard.scan.whole_file_digests import new_hasher
from ckptguard.storage.protocol import Entry, Reader, Storage
from ckptguard.values.ids import escape
from ckptguard.values.manifest import WHOLE_FORMATS

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from ckptguard.scan.paced_reader import Pace

LEAST_PART = 8 << 20  # less is not worth another thread
_PARTS_EACH = 4  # parts for each thread: spans differ in size
_WHOLE = "blake3"


class Stopped(Exception):
    """Another file's scan failed, so this one was given up."""


class FileScanner:
    """Scans files of one storage; several threads may call it at once.

    The first failing scan makes the others raise Stopped soon, as `stop` does.
    """

    def __init__(self, storage: Storage, options: ScanOptions, progress: Progress | None, workers: int) -> None:
        self._storage = storage
        self._options = options
        self._progress = progress
        self._workers = workers
        self._names = list(dict.fromkeys((*(("md5",) if options.md5 else ()), *options.sums)))
        self._idle: list[ThreadBuffers] = []
        self._buffers: list[ThreadBuffers] = []
        self._parts: Executor | None = None
        self._requests: Executor | None = None
        self._read_ahead = 0  # how many files are read ahead
        self._parts_lock = threading.Lock()
        self._structures = Structures(storage)
        self._pace = None if options.rate is None else self._pace_of(options.rate)
        self._stopped = False

    def __call__(self, key: str) -> ScannedFile:
        """Scan one file."""
        try:
            return self._scan(key)
        except MemoryError as error:
            self._stopped = True
            raise WorkerError(f"reading {escape(key)} needs more memory than is available") from error
        except BaseException:
            self._stopped = True
            raise

    def stop(self) -> None:
        """Give up every scan at its next block."""
        self._stopped = True

    def _scan(self, key: str) -> ScannedFile:
        if self._stopped:
            raise Stopped
        with self._storage.open(key) as reader:
            structure = self._options.structures.get(key) or self._structures.read(reader, key)
            if self._options.structure_only:
                unread = (None,) * len(structure.tensors)
                return ScannedFile(
                    entry=reader.entry, structure=structure, envelope="", span_digests=(), numbers=unread
                )
            plan = plan_of(structure)
            elements = elements_of(structure, plan)
            # Another version may see only bytes in such a file, so its digest is that of all of them.
            whole_digest = [_WHOLE] if structure.format in WHOLE_FORMATS else []
            hashers = [new_hasher(name, reader.entry.size) for name in (*self._names, *whole_digest)]
            envelope = blake3()
            parts = [] if whole_digest else self._parts_of(plan, reader.entry.size)
            if parts:
                passes = self._in_parts(reader, plan, parts, envelope, elements)
            else:
                whole = Part(0, reader.entry.size, 0, len(plan.regions))
                passes = [BytePass(plan, whole, None if whole_digest else envelope, elements)]
                with self._in_order(reader) as ahead, self._borrowed() as buffers:
                    buffers.run(ahead, passes[0], hashers, partial(self._done_with, reader))
            tallies = {number: tally for one in passes for number, tally in one.tallies.items()}
            pieces = {number: text for one in passes for number, text in one.pieces.items()}
            numbers = numbers_of(plan, tallies)
            if any(tensor.strides for tensor in structure.tensors):
                from ckptguard.scan.numbers import numbers_of_views  # of views with gaps, which few files have

                numbers = numbers_of_views(reader, structure, numbers)
            if heads := {number: head for one in passes for number, head in one.heads.items()}:
                from ckptguard.scan.nested_files import open_nested  # in tensors of bytes

                structure = open_nested(reader, structure, heads)
            reader.check_unchanged()
            entry = reader.entry
        sums = {name: hasher.hexdigest() for name, hasher in zip(self._names, hashers, strict=False)}
        found = problems_of(plan, structure, passes)
        if found:
            structure = msgspec.structs.replace(structure, problems=(*structure.problems, *found))
        return ScannedFile(
            entry=entry,
            structure=structure,
            envelope=(hashers[-1] if whole_digest else envelope).hexdigest(),
            span_digests=tuple(digest for one in passes for digest in one.digests),
            numbers=numbers,
            pieces=tuple(pieces.get(n, "") for n in range(len(plan.regions))) if pieces else (),
            md5=sums.get("md5") if self._options.md5 else None,
            sums={name: sums[name] for name in self._options.sums},
        )

    def _parts_of(self, plan: Plan, size: int) -> list[Part]:
        """Return the parts that threads may share. None if a digest needs the whole file in order, or the storage is
        slower."""
        if self._names or self._workers == 1 or size < 2 * LEAST_PART or self._storage.root is None:
            return []
        parts = parts_of(plan.regions, max(size // (self._workers * _PARTS_EACH), LEAST_PART))
        return parts if len(parts) > 1 else []

    @contextmanager
    def _in_order(self, reader: Reader) -> Iterator[Reader]:
        """Open the file for reading front to back. A remote file is read ahead in chunks, several at once."""
        if self._storage.root is not None or self._workers == 1 or reader.entry.size <= REMOTE_BLOCK:
            yield reader
            return
        # Local files need neither; importing concurrent.futures takes as long as verifying a small file.
        from concurrent.futures import ThreadPoolExecutor

        from ckptguard.storage.read_ahead import IN_FLIGHT, ReadAhead

        with self._parts_lock:
            self._requests = self._requests or ThreadPoolExecutor(2 * IN_FLIGHT, "ckptguard-read")
            self._read_ahead += 1
        try:
            with ReadAhead(reader, self._requests, in_flight=self._ahead) as ahead:
                yield ahead
        finally:
            with self._parts_lock:
                self._read_ahead -= 1

    def _ahead(self) -> int:
        """Return how many chunks of a file may be in flight. With a rate only one: they are requested before it
        counts."""
        from ckptguard.storage.read_ahead import IN_FLIGHT

        return 1 if self._pace is not None else max(min(2 * IN_FLIGHT // self._read_ahead, IN_FLIGHT), 1)

    def _in_parts(
        self, reader: Reader, plan: Plan, parts: list[Part], envelope: blake3, elements: Mapping[int, int]
    ) -> list[BytePass]:
        from concurrent.futures import ThreadPoolExecutor

        with self._parts_lock:
            self._parts = self._parts or ThreadPoolExecutor(self._workers, "ckptguard-scan")
        done = partial(self._done_with, reader)
        passes = [BytePass(plan, part, elements=elements) for part in parts]

        def outside() -> None:
            with self._borrowed() as buffers:
                position = 0
                for region in plan.regions:
                    buffers.hash_range(reader, position, region.begin, envelope, done)
                    position = region.end
                buffers.hash_range(reader, position, reader.entry.size, envelope, done)

        def inside(one: BytePass) -> None:
            with self._borrowed() as buffers:
                buffers.run(reader, one, (), done)

        self._run_all(self._parts, [outside, *(lambda one=one: inside(one) for one in passes)])
        return passes

    def _run_all(self, executor: Executor, work: list[Callable[[], None]]) -> None:
        from concurrent.futures import FIRST_EXCEPTION, wait

        futures: list[Future[None]] = []
        try:
            for one in work:
                futures.append(executor.submit(self._unless_stopped, one))
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if len(futures) < len(work) or not all(f.done() and f.exception() is None for f in futures):
                self._stopped = True
                wait(futures)  # no thread may read after the reader is closed
        raise_first([f.exception() for f in futures])

    def _unless_stopped(self, work: Callable[[], None]) -> None:
        try:
            if self._stopped:
                raise Stopped
            work()
        except BaseException:
            self._stopped = True
            raise

    def _done_with(self, reader: Reader, offset: int, length: int) -> None:
        if self._stopped:
            raise Stopped
        if self._options.spare_cache:
            reader.done_with(offset, length)
        if self._progress is not None:
            self._progress(length)
        if self._pace is not None:
            self._pace.passed(length)

    def _pace_of(self, rate: float) -> Pace:
        """Return the pace of all threads. Waiting ends if the scan is given up, here or by its progress callback."""
        from ckptguard.scan.paced_reader import Pace  # few scans have a rate

        def hold() -> None:
            if self._stopped:
                raise Stopped
            if self._progress is not None:
                self._progress(0)

        return Pace(rate, hold)

    @contextmanager
    def _borrowed(self) -> Iterator[ThreadBuffers]:
        try:
            buffers = self._idle.pop()
        except IndexError:
            buffers = ThreadBuffers(BLOCK if self._storage.root else REMOTE_BLOCK, threaded=self._workers > 1)
            self._buffers.append(buffers)
        yield buffers
        self._idle.append(buffers)  # not after an error: a digest thread may still use its blocks

    def close(self) -> None:
        """End the threads."""
        if self._parts is not None:
            self._parts.shutdown()
        if self._requests is not None:
            self._requests.shutdown(cancel_futures=True)
        for buffers in self._buffers:
            buffers.close()


@dataclass
class Structures:
    """The structures of a storage's files during a scan. Files that others refer to are read only once.

    Several threads may use it at once.
    """

    _storage: Storage
    _known: dict[str, tuple[Entry, Structure] | None] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def read(self, reader: Reader, key: str) -> Structure:
        """Return the structure of an open file."""
        # Two locks at most: a file that others refer to refers to none itself.
        with self._locks.setdefault(key, threading.Lock()):
            known = self._known.get(key)
            if known is not None and known[0] == reader.entry and known[1].chunks:
                return known[1]
            structure = read_structure(reader, key, lambda name: self._beside(key, name))
            if structure.chunks:  # other files will need what it says about them
                self._known[key] = (reader.entry, structure)
            return structure

    def _beside(self, key: str, name: str) -> Structure | None:
        """Return the structure of a file in the same folder, without the files that it refers to."""
        other = key.rpartition("/")[0] + "/" + name if "/" in key else name
        with self._locks.setdefault(other, threading.Lock()):
            if other not in self._known:
                self._known[other] = None
                try:
                    if self._storage.stat(other).kind == "file":  # a link or FIFO has its own finding
                        with self._storage.open(other) as reader:
                            self._known[other] = (reader.entry, read_structure(reader, other))
                except ObjectMissingError:
                    pass
            known = self._known[other]
            return None if known is None else known[1]


def raise_first(errors: list[BaseException | None]) -> None:
    """Raise the first error that is a cause, not a consequence, if there is any."""
    for error in sorted((e for e in errors if e is not None), key=lambda e: isinstance(e, Stopped)):
        raise error

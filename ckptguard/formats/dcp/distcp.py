"""``.distcp`` of torch.distributed.checkpoint: a row of torch archives, one for each tensor's piece and each object.

Only the ``.metadata`` beside it says where each one lies and what it is. Names of tensors are those of the state
dict, with a piece's place behind it: ``model.w[0:4, 8:16]``.
"""

from __future__ import annotations

import math
import re

from msgspec import structs

from ckptguard.formats.dcp.chunks import chunk_name
from ckptguard.formats.dcp.identical_headers import IdenticalHeaders
from ckptguard.formats.pickle.machine import BUDGET
from ckptguard.formats.structure import (
    Beside,
    ChunkPlace,
    Leaf,
    Problem,
    SpanPlace,
    Structure,
    TensorPlace,
)
from ckptguard.formats.torch import zip_file
from ckptguard.formats.torch.state_tree import MAX_LEAVES, MAX_UNREAD
from ckptguard.formats.zip.subrange import Subranges
from ckptguard.storage.protocol import Reader

NAME = "distcp"
_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")
_ROOM_EACH = 1 << 14  # of a pickle's budget: about five times what a plain tensor's takes
_VALUE = "value"  # what a value that stands alone is called
_WRAPPERS = ("torch._utils._rebuild_wrapper_subclass", "torch._tensor._rebuild_from_type_v2")
_MAX_PROBLEMS = 200


def read(reader: Reader, path: str) -> Structure:
    """Without what lies beside it nothing can be said about the file."""
    return read_beside(reader, path, lambda name: None)


def read_beside(reader: Reader, path: str, beside: Beside) -> Structure:
    """The tensors and numbers in the ranges that ``.metadata`` states for this file.

    What disagrees with ``.metadata`` is a problem that names the tensor; so are bytes behind the last range. Bytes
    between ranges are not.
    """
    name = path.rpartition("/")[2]
    rank = _RANK.fullmatch(name)
    metadata = beside(".metadata") or (beside(f"__{rank[1]}.metadata") if rank else None)
    if metadata is None:
        return Structure(format=NAME, truncated=True)  # it is written last: the save is not finished
    chunks = metadata.chunks.get(name, ())
    if not chunks:
        if not reader.entry.size and not metadata.problems:
            return Structure(format=NAME)  # a rank or thread that had nothing to write
        problem = Problem(message="the .metadata beside it does not say that it holds anything")
        return Structure(format=NAME, problems=(problem,))
    reading = _Reading(len(chunks))
    reading.take(reader, chunks)
    return reading.structure(metadata.containers)


class _Reading:
    """What has been found so far, range by range."""

    def __init__(self, count: int) -> None:
        self.room = zip_file.ReadingBudget(BUDGET + count * _ROOM_EACH)
        self.room.nodes += count * 100
        self.spans: list[SpanPlace] = []
        self.tensors: list[TensorPlace] = []
        self.leaves: list[Leaf] = []
        self.problems: list[Problem] = []
        self.globals: set[str] = set()
        self.unread: list[str] = []
        self.unlisted = 0
        self.truncated = False

    def take(self, reader: Reader, chunks: tuple[ChunkPlace, ...]) -> None:
        windows, alike, size = Subranges(reader), IdenticalHeaders(self.room), reader.entry.size
        for chunk in chunks:
            name = chunk_name(chunk)
            if chunk.offset + chunk.length > size:
                self.truncated = True
                expected, found = str(chunks[-1].offset + chunks[-1].length), str(size)
                self.add_problem(
                    Problem(message="the file ends before it does", tensor=name, expected=expected, found=found)
                )
                return
            if chunk.packed:
                self.packed(chunk, name)
                continue
            self.blob(chunk, name, alike.read(windows.window(chunk.offset, chunk.length)))
        rest = size - chunks[-1].offset - chunks[-1].length
        if rest:
            self.add_problem(Problem(message=f"{rest} bytes follow the last range that .metadata states"))

    def packed(self, chunk: ChunkPlace, name: str) -> None:
        """Bytes that only some compressor could read: their digest is all there is to know."""
        if chunk.dtype:
            self.tensors.append(TensorPlace(name, f"packed {chunk.dtype}", chunk.shape, len(self.spans)))
        self.spans.append(SpanPlace(chunk.offset, chunk.length))
        self.add_unread(name)

    def blob(self, chunk: ChunkPlace, name: str, blob: Structure) -> None:
        first = len(self.spans)
        self.spans += [SpanPlace(chunk.offset + s.offset, s.length, s.crc32) for s in blob.spans]
        for tensor in blob.tensors:
            span = None if tensor.span is None else first + tensor.span
            self.tensors.append(structs.replace(tensor, name=_below(name, tensor.name), span=span))
        for problem in blob.problems:
            self.add_problem(structs.replace(problem, tensor=name))
        for leaf in blob.leaves:
            if len(self.leaves) < (MAX_LEAVES // 2 if math.isfinite(leaf.value) else MAX_LEAVES):
                self.leaves.append(structs.replace(leaf, name=_below(name, leaf.name)))
            elif not math.isfinite(leaf.value):
                self.add_problem(Problem(message="more numbers that are not finite than we would list", tensor=name))
        self.globals.update(blob.globals)
        for inner in blob.unread:
            self.add_unread(_below(name, inner))
        if chunk.dtype and not blob.problems:
            self.compare(chunk, name, blob)

    def compare(self, chunk: ChunkPlace, name: str, blob: Structure) -> None:
        """A piece of a tensor is one tensor, of the type and shape that ``.metadata`` states."""
        if len(blob.tensors) == 1 and blob.tensors[0].name == _VALUE:
            found = blob.tensors[0]
            if (found.dtype, found.shape) != (chunk.dtype, chunk.shape):
                expected = f"{chunk.dtype} {list(chunk.shape)}"
                message = "it is not what .metadata states: one of the two files is stale or foreign"
                self.add_problem(
                    Problem(message=message, tensor=name, expected=expected, found=f"{found.dtype} {list(found.shape)}")
                )
        elif not any(wrapper in blob.globals for wrapper in _WRAPPERS):  # one made of several tensors
            self.add_problem(Problem(message="there is no tensor where .metadata states one", tensor=name))

    def add_problem(self, problem: Problem) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)
        else:
            self.unlisted += 1

    def add_unread(self, name: str) -> None:
        if len(self.unread) < MAX_UNREAD:
            self.unread.append(name)

    def structure(self, containers: tuple[str, ...]) -> Structure:
        more = [Problem(message=f"and {self.unlisted} more problems")] if self.unlisted else []
        return Structure(
            format=NAME,
            spans=tuple(self.spans),
            tensors=tuple(self.tensors),
            problems=(*self.problems, *more),
            truncated=self.truncated,
            globals=tuple(sorted(self.globals)),
            leaves=tuple(self.leaves),
            containers=containers,
            unread=tuple(self.unread),
        )


def _below(name: str, inner: str) -> str:
    return name if inner == _VALUE else f"{name}.{inner}"

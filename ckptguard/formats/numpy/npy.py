"""``.npy``: one numpy array, a short header and then its elements.

The elements are floats that lie in spans, floats that do not, or pickled objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import structs

from ckptguard.formats.nonfinite_bytes import SIZES, bad_number
from ckptguard.formats.numpy.npy_header import MAX_HEADER, Field, Header, HeaderProblem, read_header
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import MAX_STREAM, read_pickle
from ckptguard.formats.structure import Leaf, Problem, SpanPlace, Structure, TensorPlace, broken
from ckptguard.formats.torch.state_tree import below, walk
from ckptguard.storage.protocol import Reader

NAME = "npy"
BLOCK = 1 << 20
_TENSOR = "value"
_FIRST_READ = 512
_MAX_ITEM = 1 << 20


class UnshownData(NamedTuple):
    """What was found in data that no span shows."""

    leaves: tuple[Leaf, ...] = ()
    unread: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    globals: frozenset[str] = frozenset()


def read(reader: Reader, path: str) -> Structure:
    """The structure of a lone array, which is called "value"."""
    size = reader.entry.size
    try:
        header = header_at(reader, 0, size)
    except HeaderProblem as error:
        return broken(NAME, str(error), truncated=error.ends_early)
    if header.pickled:
        inside = look_inside(_TENSOR, header, blocks_of(reader, header.length, size - header.length))
        names = tuple(sorted(inside.globals))
        return Structure(
            format=NAME, problems=inside.problems, globals=names, leaves=inside.leaves, unread=inside.unread
        )
    wanted, found = header.data_size, size - header.length
    if wanted != found:
        what = "bytes are missing at the end" if wanted > found else "bytes follow the array"
        expected, message = str(header.length + wanted), f"{abs(wanted - found)} {what}"
        problem = Problem(message=message, tensor=_TENSOR, expected=expected, found=str(size))
        return Structure(format=NAME, problems=(problem,), truncated=wanted > found)
    plain = is_plain(header)
    tensor = place_of(_TENSOR, header, 0 if found else None, as_stored=plain)
    inside = look_inside(_TENSOR, header, () if plain else blocks_of(reader, header.length, found))
    spans = (SpanPlace(header.length, found),) if found else ()
    return Structure(format=NAME, spans=spans, tensors=(tensor,), leaves=inside.leaves, unread=inside.unread)


def header_at(reader: Reader, offset: int, size: int) -> Header:
    """The header of an array in `size` bytes at `offset`; HeaderProblem if there is none."""
    first = min(size, _FIRST_READ)
    try:
        return read_header(reader.read(offset, first))
    except HeaderProblem as error:
        if not error.ends_early or size == first:
            raise
    return read_header(reader.read(offset, min(size, MAX_HEADER + 12)))


def blocks_of(reader: Reader, offset: int, length: int) -> Iterator[bytes]:
    """The bytes of a range, piece by piece."""
    for begin in range(offset, offset + length, BLOCK):
        yield reader.read(begin, min(BLOCK, offset + length - begin))


def is_plain(header: Header) -> bool:
    """Whether the scan can look at the stored data by itself."""
    return len(header.fields) == 1 and not header.fields[0].name and not header.pickled


def place_of(name: str, header: Header, span: int | None, *, as_stored: bool) -> TensorPlace:
    """The array as a tensor; its elements are stated only where they are `as_stored`, in a span."""
    if not is_plain(header):
        return TensorPlace(name, "record", header.shape, span)
    field = header.fields[0]
    count = math.prod(header.shape) if as_stored and span is not None else 0
    strides = _strides(header) if count else ()
    return TensorPlace(name, field.dtype, header.shape, span, 0, count, "", field.byte_order, strides)


def _strides(header: Header) -> tuple[int, ...]:
    """By columns: the first index moves fastest. () where that is the usual order too."""
    if not header.by_columns or sum(n > 1 for n in header.shape) < 2:
        return ()
    return tuple(math.prod(header.shape[:i]) for i in range(len(header.shape)))


def look_inside(name: str, header: Header, blocks: Iterable[bytes]) -> UnshownData:
    """One number of each field that is not finite, if there is one; of objects what their pickle holds.

    All blocks are taken, also those that there is nothing to see in.
    """
    if header.pickled:
        return _unpickled(name, blocks)
    floats = [f for f in header.fields if f.dtype in SIZES]
    unread = tuple(_path(name, f) for f in header.fields if f.unread)
    if header.item_size > _MAX_ITEM:
        unread += tuple(_path(name, f) for f in floats)
        floats = []
    found: dict[str, float] = {}
    for block in _whole_items(blocks, header.item_size):
        for field in floats:
            if field.name not in found:
                bad = bad_number(_column(block, header.item_size, field), field.dtype, field.byte_order)
                if bad is not None:
                    found[field.name] = bad
    leaves = tuple(Leaf(_path(name, f), found[f.name], True) for f in floats if f.name in found)
    return UnshownData(leaves, unread)


def _path(name: str, field: Field) -> str:
    return f"{name}.{field.name}" if field.name else name


def _whole_items(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in blocks of whole items."""
    rest = b""
    for block in blocks:
        if not 0 < size <= _MAX_ITEM:
            continue
        data = rest + block if rest else block
        whole = len(data) - len(data) % size
        rest = data[whole:]
        if whole:
            yield data[:whole] if rest else data


def _column(block: bytes, item: int, field: Field) -> bytes | bytearray:
    """The bytes of one field in all items."""
    width = field.size * field.times
    if width == item:
        return block
    count = len(block) // item
    if count < width:
        return b"".join(block[i * item + field.offset : i * item + field.offset + width] for i in range(count))
    column = bytearray(count * width)
    for byte in range(width):
        column[byte::width] = block[field.offset + byte :: item]
    return column


def _unpickled(name: str, blocks: Iterable[bytes]) -> UnshownData:
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        size += len(block)
        if size <= MAX_STREAM:
            parts.append(block)
    if size > MAX_STREAM:
        # What loading it would call cannot be told, and that must not pass.
        message = f"{name!r} is a pickle of {size} bytes, which is more than we would read"
        return UnshownData(problems=(Problem(message=message, tensor=name),))
    data = b"".join(parts)
    parts.clear()
    try:
        pickled = read_pickle(data)
    except PickleProblem as error:
        problem = Problem(message=f"{name!r} cannot be read: {error}", tensor=name)
        return UnshownData(problems=(problem,), globals=error.globals)
    found = walk(pickled.value)
    problems = list(found.problems)
    if pickled.end != len(data):
        problems.append(Problem(message=f"{len(data) - pickled.end} bytes follow the pickle of {name!r}", tensor=name))
    if found.tensors:
        problems.append(Problem(message=f"{name!r} refers to a storage outside", tensor=name))
    leaves = tuple(structs.replace(leaf, name=below(name, leaf.name)) for leaf in found.leaves)
    unread = tuple(below(name, inner) for inner in found.unread)
    return UnshownData(leaves, unread, tuple(problems), pickled.globals)

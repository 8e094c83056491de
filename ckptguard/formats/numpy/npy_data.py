"""The data behind an array's header: floats that lie in spans, floats that do not, and pickled objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptguard.formats.nonfinite_bytes import SIZES, bad_number
from ckptguard.formats.numpy.npy_header import Field, Header
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import MAX_STREAM, read_pickle
from ckptguard.formats.structure import Leaf, Problem, TensorPlace
from ckptguard.formats.torch.state_tree import walk

_MAX_ITEM = 1 << 20


class UnshownData(NamedTuple):
    """What was found in data that no span shows."""

    leaves: tuple[Leaf, ...] = ()
    unread: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    globals: frozenset[str] = frozenset()


def is_plain(header: Header) -> bool:
    """Whether the scan can look at the stored data by itself."""
    return len(header.fields) == 1 and not header.fields[0].name and not header.pickled


def place_of(name: str, header: Header, span: int | None, *, as_stored: bool) -> TensorPlace:
    """The array as a tensor; its elements are stated only where they are `as_stored`, in a span."""
    field = header.fields[0] if is_plain(header) else None
    dtype = field.dtype if field is not None else "record"
    count = math.prod(header.shape) if field is not None and as_stored and span is not None else 0
    order = field.byte_order if field is not None else "little"
    return TensorPlace(name, dtype, header.shape, span, 0, count, "", order, _strides(header) if count else ())


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
        if not size or size > _MAX_ITEM:
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
        return UnshownData(
            problems=(Problem(message=f"{name!r} cannot be read: {error}", tensor=name),), globals=error.globals
        )
    found = walk(pickled.value)
    problems = list(found.problems)
    if pickled.end != len(data):
        problems.append(Problem(message=f"{len(data) - pickled.end} bytes follow the pickle of {name!r}", tensor=name))
    problems += [Problem(message=f"{name!r} refers to a storage outside", tensor=name) for _ in found.tensors[:1]]
    leaves = tuple(Leaf(_below(name, leaf.name), leaf.value, leaf.of_array) for leaf in found.leaves)
    unread = tuple(_below(name, inner) for inner in found.unread)
    return UnshownData(leaves, unread, tuple(problems), pickled.globals)


def _below(name: str, inner: str) -> str:
    return name if inner == "value" else f"{name}.{inner}"

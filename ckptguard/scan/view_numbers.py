"""The numbers of views that leave elements out: a second, partial read, only where what they span is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptguard.formats.dtypes import DTYPES
from ckptguard.formats.structure import Structure, TensorPlace
from ckptguard.scan.result import Numbers
from ckptguard.storage.protocol import Reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHUNK = 1 << 20
_ROOM = 64 << 20  # bytes that may be read again beyond twice the file


def numbers_of_views(
    reader: Reader, structure: Structure, numbers: Sequence[Numbers | None]
) -> tuple[Numbers | None, ...]:
    """The numbers with those of gapped views made exact, where the elements from their first to their last are not
    all finite.

    They then count the elements that the view reaches, in the stored order. Views whose dimensions overlap in ways
    that leave gaps, and more views than would be read again, keep the numbers of all that they span.
    """
    exact: dict[tuple[object, ...], Numbers] = {}
    result = list(numbers)
    room = 2 * reader.entry.size + _ROOM
    for index, (tensor, found) in enumerate(zip(structure.tensors, numbers, strict=True)):
        if not tensor.strides or found is None or found.first_bad is None:
            continue
        steps = _steps(tensor)
        place = (tensor.span, tensor.start, tensor.stop, tensor.dtype, tensor.byte_order, steps)
        if place not in exact:
            length = (tensor.stop - tensor.start) * DTYPES[tensor.dtype].size
            if steps is None or length > room:
                continue
            room -= length
            exact[place] = _read_view(reader, structure, tensor, steps)
        result[index] = exact[place]
    return tuple(result)


def _steps(tensor: TensorPlace) -> tuple[tuple[int, int], ...] | None:
    """(stride, size) from the widest to the narrowest; None where one dimension does not end before the next step."""
    steps = sorted((step, size) for step, size in zip(tensor.strides, tensor.shape, strict=True) if size > 1 and step)
    reach = 0
    for step, size in steps:
        if step <= reach:
            return None
        reach += (size - 1) * step
    return tuple(reversed(steps))


def _read_view(
    reader: Reader, structure: Structure, tensor: TensorPlace, steps: tuple[tuple[int, int], ...]
) -> Numbers:
    import numpy as np

    from ckptguard.scan.numbers import Reading, Tally, merge

    assert tensor.span is not None
    size = DTYPES[tensor.dtype].size
    begin = structure.spans[tensor.span].offset + tensor.start * size
    tally = Tally(Reading(tensor.dtype, tensor.byte_order))
    count = tensor.stop - tensor.start
    for first in range(0, count, _CHUNK // size):
        last = min(first + _CHUNK // size, count)
        reached = _reached(np.arange(first, last, dtype=np.int64), steps)
        raw = np.frombuffer(reader.read(begin + first * size, (last - first) * size), np.uint8)
        kept = np.ascontiguousarray(raw.reshape(-1, size)[reached])
        if len(kept):
            tally.add(kept.reshape(-1).data)
    return merge([tally])


def _reached(offsets: NDArray[np.int64], steps: tuple[tuple[int, int], ...]) -> NDArray[np.bool_]:
    """Which offsets some index of the view leads to."""
    rest = offsets
    for step, size in steps:
        rest = rest - (rest // step).clip(max=size - 1) * step
    reached: NDArray[np.bool_] = rest == 0
    return reached

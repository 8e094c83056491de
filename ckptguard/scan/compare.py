"""Compare two tensors: how far apart are their elements? Read in blocks, so memory does not grow with their size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckptguard.formats.dtypes import DTYPES
from ckptguard.formats.structure import TensorPlace
from ckptguard.scan.arrays import np
from ckptguard.scan.decode import Decoder
from ckptguard.scan.result import Difference
from ckptguard.storage.protocol import Reader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptguard.scan.decode import Raw, Values

_BLOCK = 1 << 16  # elements: the temporaries fit into the processor's cache
_LARGEST_GATHERED = 64 << 20  # bytes of a tensor that must be reordered in memory first
_TINY = 1e-280  # squares below this have lost digits


class LocatedTensor(NamedTuple):
    """A tensor's place: `span_offset` is where its span begins in the file of `reader`."""

    reader: Reader
    span_offset: int
    place: TensorPlace


class NotComparable(ValueError):
    """The elements cannot be compared; the message says why."""


def compare(a: LocatedTensor, b: LocatedTensor) -> Difference:
    """Compare two tensors of one shape element by element. It also raises the readers' errors.

    Raises NotComparable if the comparison is meaningless, or would need all of a large tensor in memory.
    """
    readings = [Decoder(s.place.dtype, s.place.byte_order) if s.place.dtype in DTYPES else None for s in (a, b)]
    x, y = readings
    if x is None or y is None:
        raise NotComparable("its type is only known as bytes")
    if a.place.shape != b.place.shape:
        raise NotComparable("its shape differs")
    same_type = a.place.dtype == b.place.dtype
    floats = (x.is_float or y.is_float) and all(d.is_float or d.is_integer for d in (x, y))
    if floats and x.components != y.components:
        raise NotComparable("one is complex, the other is not")
    if not floats and not same_type and not (x.is_integer and y.is_integer):
        raise NotComparable(f"{a.place.dtype} and {b.place.dtype} have no values in common")
    in_order = _in_stored_order(a.place, b.place)
    order = a.place if in_order else None
    tally = _Tally(x, y, by_value=not same_type, floats=floats)
    for left, right in zip(_blocks(a, x, in_order), _blocks(b, y, in_order), strict=True):
        tally.add(left, right)
    return tally.result(a.place.shape, order.strides if order else ())


class _Tally:
    """The difference so far; blocks are added in order."""

    def __init__(self, x: Decoder, y: Decoder, *, by_value: bool, floats: bool) -> None:
        self._x, self._y, self._by_value, self._floats = x, y, by_value, floats
        self._same_bits = not by_value and x.byte_order == y.byte_order
        self.count = self.differing = self.became = 0
        self.compared = 0  # elements that are finite on both sides
        self.nan = [0, 0]
        self.inf = [0, 0]
        self.first: int | None = None
        self.largest = 0.0
        self.largest_at: int | None = None
        self.norm = self.change = 0.0

    def add(self, left: Raw, right: Raw) -> None:
        """Add the next elements of both."""
        count = len(left) // self._x.size
        if not self._floats:
            self.differing += self._other_bits(left, right, count)
            self.count += count
            return
        if self._same_bits and np.array_equal(left, right):
            before = self._x.values(left)
            after = before
        else:
            before, after = self._x.values(left), self._y.values(right)
            if self._by_value:
                same = (before == after) | (np.isnan(before) & np.isnan(after))
                self.differing += int(np.count_nonzero(~same.reshape(count, -1).all(axis=1)))
            else:
                self.differing += self._other_bits(left, right, count)
        self._distances(before, after)
        self.count += count

    def _other_bits(self, left: Raw, right: Raw, count: int) -> int:
        if self._by_value:
            return int(np.count_nonzero(self._x.integers(left) != self._y.integers(right)))
        if not self._same_bits:
            width = self._x.size // self._x.components
            right = np.ascontiguousarray(right.reshape(-1, width)[:, ::-1]).reshape(-1)
        words = np.dtype(f"u{min(self._x.size, 8)}")  # comparing single bytes takes thirty times as long
        other = left.view(words) != right.view(words)
        return int(np.count_nonzero(other if len(other) == count else other.reshape(count, -1).any(axis=1)))

    def _distances(self, before: Values, after: Values) -> None:
        width = self._x.components
        self.compared += len(before) // width
        with np.errstate(all="ignore"):
            change = after - before
            norms = _norm(before), _norm(change)
            if not all(map(math.isfinite, norms)):  # otherwise all elements are finite
                before, after = self._only_finite(before, after)
                change = after - before
                norms = _norm(before), _norm(change)
            distance = np.hypot(change[::2], change[1::2]) if width == 2 else np.abs(change)
        at = int(distance.argmax())
        if distance[at] > self.largest:
            self.largest, self.largest_at = float(distance[at]), self.count + at
        self.norm = math.hypot(self.norm, norms[0])
        self.change = math.hypot(self.change, norms[1])

    def _only_finite(self, before: Values, after: Values) -> tuple[Values, Values]:
        """Count elements that are not finite on either side, and return both with zeros in their place."""
        width = self._x.components
        finite = np.isfinite(before) & np.isfinite(after)
        if finite.all():
            return before, after
        usable: NDArray[np.bool_] = np.asarray(finite.reshape(-1, width).all(axis=1))
        self.compared -= len(usable) - int(np.count_nonzero(usable))
        self._count_nonfinite(before.reshape(-1, width), after.reshape(-1, width))
        kept = np.repeat(usable, width)
        return np.where(kept, before, 0.0), np.where(kept, after, 0.0)

    def _count_nonfinite(self, before: Values, after: Values) -> None:
        for side, values in enumerate((before, after)):
            nan = np.isnan(values).any(axis=1)
            self.nan[side] += int(np.count_nonzero(nan))
            self.inf[side] += int(np.count_nonzero(np.isinf(values).any(axis=1) & ~nan))
        became = np.isfinite(before).all(axis=1) & ~np.isfinite(after).all(axis=1)
        if became.any():
            if self.first is None:
                self.first = self.count + int(became.argmax())
            self.became += int(np.count_nonzero(became))

    def result(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Difference:
        """Return the difference of everything added."""
        if not self._floats:
            return Difference(count=self.count, differing=self.differing)
        ratio = self.change / self.norm if self.norm else (math.inf if self.change else 0.0)
        return Difference(
            count=self.count,
            differing=self.differing,
            relative_l2=ratio if self.compared else None,
            largest_change=self.largest if self.compared else None,
            largest_index=None if self.largest_at is None else _index(self.largest_at, shape, strides),
            nan_a=self.nan[0],
            inf_a=self.inf[0],
            nan_b=self.nan[1],
            inf_b=self.inf[1],
            became_nonfinite=self.became,
            first_nonfinite=None if self.first is None else _index(self.first, shape, strides),
        )


def _norm(values: Values) -> float:
    """Return the Euclidean norm, even if squares overflow or vanish. Not finite if an element is not."""
    with np.errstate(all="ignore"):
        square = _square(values)
        if _TINY < square < math.inf:
            return math.sqrt(square)
        largest = float(np.abs(values).max())
        if largest in (0.0, math.inf):
            return largest
        scaled = values / largest
        return largest * math.sqrt(_square(scaled))


def _square(values: Values) -> float:
    # Not np.dot: its threads wait for each other longer than they work, mostly on a busy machine.
    return float(np.einsum("i,i->", values, values))


def _in_stored_order(a: TensorPlace, b: TensorPlace) -> bool:
    """True if the stored elements, in order, are the same elements in both and all of the tensors."""
    if a.strides != b.strides or not a.stop - a.start == b.stop - b.start == math.prod(a.shape):
        return False
    reach = 1
    for step, extent in sorted(zip(a.strides, a.shape, strict=False)):
        if extent > 1:
            if step != reach:
                return False
            reach *= extent
    return True


def _blocks(stored: LocatedTensor, decoder: Decoder, in_order: bool) -> Iterator[Raw]:
    """Yield the elements as bytes, block by block, in stored order or in index order."""
    place = stored.place
    count = math.prod(place.shape)
    if not in_order:
        gathered = _gathered(stored, decoder.size, count)
        for first in range(0, count, _BLOCK):
            yield gathered[first * decoder.size : (first + _BLOCK) * decoder.size]
        return
    buffer = np.empty(min(_BLOCK, count) * decoder.size, np.uint8)
    begin = stored.span_offset + place.start * decoder.size
    for first in range(0, count, _BLOCK):
        block = buffer[: min(_BLOCK, count - first) * decoder.size]
        stored.reader.read_into(begin + first * decoder.size, block.data)
        yield block


def _gathered(stored: LocatedTensor, size: int, count: int) -> Raw:
    """Return all elements in index order."""
    place = stored.place
    length = place.stop - place.start
    if max(length, count) * size > _LARGEST_GATHERED:
        raise NotComparable("its elements are stored in another order, and it is large")
    raw = np.frombuffer(stored.reader.read(stored.span_offset + place.start * size, length * size), np.uint8)
    if not place.strides:
        if length != count:
            raise NotComparable("it has more or fewer stored elements than its shape")
        return raw
    last = sum((extent - 1) * step for extent, step in zip(place.shape, place.strides, strict=True))
    if min(place.strides) < 0 or last >= length:
        raise NotComparable("its strides reach beyond its stored elements")
    elements: NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
        raw, (*place.shape, size), (*(step * size for step in place.strides), 1), writeable=False
    )
    return np.ascontiguousarray(elements).reshape(-1)


def _index(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element, given its place in index order, or with strides in stored order."""
    if not strides:
        found = []
        for extent in reversed(shape):
            offset, own = divmod(offset, extent)
            found.append(own)
        return tuple(reversed(found))
    index = [0] * len(shape)
    widest = sorted((d for d, extent in enumerate(shape) if extent > 1), key=lambda d: -strides[d])
    for dimension in widest:
        step = max(strides[dimension], 1)
        index[dimension] = min(offset // step, shape[dimension] - 1)
        offset -= index[dimension] * step
    return tuple(index)

"""Count NaN and infinities, and find the largest magnitude, with integers alone.

Without the sign, a float's bits order like magnitudes. So one maximum over a block shows whether it is finite and how
large it is. This is true for every float type, also for those that numpy does not know. Views with gaps are partly read
a second time if what they span is not all finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptguard.formats.dtypes import DTYPES, FloatLayout
from ckptguard.formats.structure import Structure, TensorPlace
from ckptguard.scan.arrays import np
from ckptguard.scan.decode import Decoder
from ckptguard.scan.result import Numbers
from ckptguard.scan.rms_sample import SquareSum, Stretches
from ckptguard.scan.tallies import Sample, Tally, merge
from ckptguard.storage.protocol import Reader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptguard.scan.decode import Bits

_CHUNK = 1 << 20
_ROOM = 64 << 20  # bytes that may be read again beyond twice the file


class ArrayTally(Tally):
    """A tally of any number of floats in numpy arrays."""

    __slots__ = ("reading", "squares")

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading.layout)
        self.reading = reading
        self.squares = SquareSum(reading.stretches)

    def add(self, block: memoryview) -> None:
        bits = self._bits(block)
        self._look(bits)
        self.squares.add(bits)

    def look(self, block: memoryview) -> None:
        self._look(self._bits(block))

    def sample(self, data: memoryview) -> None:
        self.squares.add(self._bits(data))

    def _bits(self, block: memoryview) -> Bits:
        bits: Bits = np.frombuffer(block, self.reading.unsigned)
        return bits if bits.flags.aligned else bits.copy()

    def _look(self, bits: Bits) -> None:
        reading = self.reading
        layout = self.layout
        if self.first_bits is None:
            self.first_bits = int(bits[0])
        # Without a temporary: the largest with a clear sign bit, and the largest with a set one.
        highest, positive = int(bits.max()), int(bits.view(reading.signed).max())
        top = max(positive, highest ^ layout.sign if highest & layout.sign else 0)
        clean = top < layout.bad and not (layout.negative_zero_is_nan and highest & layout.sign)
        if not clean:
            self._add_suspicious(bits)
        else:
            self.largest = max(self.largest, top)
            if self.bits_of_finite is None:
                self.bits_of_finite = int(bits[0])
            if self.single_finite:
                self.single_finite = _all_equal(bits, self.bits_of_finite)
        if self.constant:
            asked = clean and self.bits_of_finite == self.first_bits
            self.constant = self.single_finite if asked else _all_equal(bits, self.first_bits)
        if bits[-1]:
            self.ending = 0
        else:
            last = int((bits[::-1] != 0).argmax())
            self.ending = last or self.ending + len(bits)
        self.count += len(bits)

    def close(self) -> None:
        self.squares.close()

    def finish(self) -> Sample:
        return self.squares.sums()

    def _add_suspicious(self, bits: Bits) -> None:
        layout = self.layout
        sign = bits.dtype.type(layout.sign)
        magnitudes = bits & ~sign
        bad = bits == sign if layout.negative_zero_is_nan else magnitudes >= bits.dtype.type(layout.bad)
        count = int(np.count_nonzero(bad))
        if count:
            if self.first_bad is None:
                self.first_bad = self.count + int(bad.argmax())
            if layout.infinity is not None:
                posinf = int(np.count_nonzero(bits == bits.dtype.type(layout.infinity)))
                neginf = int(np.count_nonzero(bits == bits.dtype.type(layout.infinity | layout.sign)))
                self.posinf += posinf
                self.neginf += neginf
                count -= posinf + neginf
            self.nan += count
        finite = ~bad
        if finite.any():
            self.largest = max(self.largest, int(magnitudes[finite].max()))
            own = bits[finite]
            if self.bits_of_finite is None:
                self.bits_of_finite = int(own[0])
            if self.single_finite:
                self.single_finite = _all_equal(own, self.bits_of_finite)


class Reading:
    """How to read the floats of segments: as integers of their size and byte order. Their samples share `stretches`."""

    __slots__ = ("layout", "signed", "stretches", "unsigned")

    def __init__(self, dtype: str, byte_order: str) -> None:
        layout = DTYPES[dtype].float
        assert layout is not None
        self.layout: FloatLayout = layout
        self.stretches = Stretches(Decoder(dtype, byte_order))
        self.unsigned = self.stretches.decoder.bits
        self.signed = np.dtype(self.unsigned.str.replace("u", "i")) if layout.sign else self.unsigned


def _all_equal(bits: Bits, value: int) -> bool:
    if int(bits[-1]) != value or int(bits[len(bits) // 2]) != value or int(bits[0]) != value:
        return False  # nearly always decides
    return bool((bits == bits.dtype.type(value)).all())


def numbers_of_views(
    reader: Reader, structure: Structure, numbers: Sequence[Numbers | None]
) -> tuple[Numbers | None, ...]:
    """Make the numbers of views with gaps exact, if what they span is not all finite.

    Then they count the elements that the view reaches, in stored order. Overlapping dimensions with gaps, and views
    beyond the reading budget, keep the numbers of everything that they span.
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
    """Return (stride, size) from widest to narrowest, or None if a dimension does not end before the next step."""
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
    assert tensor.span is not None
    size = DTYPES[tensor.dtype].size
    begin = structure.spans[tensor.span].offset + tensor.start * size
    tally = ArrayTally(Reading(tensor.dtype, tensor.byte_order))
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
    """Return which offsets the view reaches."""
    rest = offsets
    for step, size in steps:
        rest = rest - (rest // step).clip(max=size - 1) * step
    reached: NDArray[np.bool_] = rest == 0
    return reached

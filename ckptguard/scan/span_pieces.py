"""CRC-32s of a few pieces of a span, which show whether its bytes changed in one place or everywhere.

Only for files that do not check themselves, with few spans of floats.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptguard.formats.dtypes import element_size
from ckptguard.formats.structure import Structure
from ckptguard.scan.plan import Plan

PIECES = 32  # of one span, each of whole elements
_SAMPLE = 8 << 10  # bytes of each that are read
_MOST_SPANS = 32  # with more spans the manifest would grow, and their digests are enough
_CHECKED = ("torch_zip", "zip")
_WIDTH = 8  # hexadecimal digits
_FILLED = (b"\0", b"\xff")  # the content of a lost page


def pieces_of(length: int, element: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each sampled piece of a span with elements of this size."""
    count = length // element
    pieces = min(count, PIECES)
    for number in range(pieces):
        begin, end = (element * (n * count // pieces) for n in (number, number + 1))
        yield begin, min(end, begin + _SAMPLE)


def elements_of(structure: Structure, plan: Plan) -> dict[int, int]:
    """Return the element size of each span with pieces; empty if there are none."""
    floats = {n: r.groups[0] for n, r in enumerate(plan.regions) if len(r.groups) == 1}
    if structure.format in _CHECKED or len(floats) > _MOST_SPANS:
        return {}
    return {n: element_size(plan.segments[segments[0]].dtype) for n, segments in floats.items()}


class SpanPieces:
    """Takes the bytes of one span in order."""

    __slots__ = ("_at", "_bounds", "_crc", "_found")

    def __init__(self, length: int, element: int) -> None:
        self._bounds = list(pieces_of(length, element))
        self._at = self._crc = 0
        self._found: list[int] = []

    def add(self, block: memoryview, begin: int) -> None:
        """Take the next bytes, which begin at `begin` in the span."""
        while self._at < len(self._bounds):
            first, last = (edge - begin for edge in self._bounds[self._at])
            if first >= len(block):
                return
            self._crc = zlib.crc32(block[max(first, 0) : last], self._crc)
            if last > len(block):
                return
            self._found.append(self._crc)
            self._at, self._crc = self._at + 1, 0

    def text(self) -> str:
        """Return the CRC-32s in hexadecimal, without separators."""
        return "".join(f"{crc:0{_WIDTH}x}" for crc in self._found)


def differing_pieces(before: str, now: str) -> list[bool]:
    """Return for each piece of a span whether it differs; empty if unknown."""
    count = len(before) // _WIDTH
    if not 0 < count <= PIECES or len(before) != len(now) or count * _WIDTH != len(before):
        return []
    return [before[n : n + _WIDTH] != now[n : n + _WIDTH] for n in range(0, len(before), _WIDTH)]


def filled_pieces(length: int, element: int, text: str) -> list[int]:
    """Return the size of each piece that holds only the content of a lost page, else 0."""
    sizes = [end - begin for begin, end in pieces_of(length, element)]
    found = [text[n * _WIDTH : (n + 1) * _WIDTH] for n in range(len(sizes))]
    return [
        size if any(crc == f"{zlib.crc32(byte * size):0{_WIDTH}x}" for byte in _FILLED) else 0
        for size, crc in zip(sizes, found, strict=True)
    ]

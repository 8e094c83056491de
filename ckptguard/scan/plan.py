"""Plan where a file's numbers are: spans cut into segments that form whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.formats.dtypes import BLOCKS, WITH_FLOATS, element_size
from ckptguard.formats.structure import BYTES, Problem, RangeSum, SpanPlace, Structure, holds_bytes

MAX_PIECES = 4_000_000
_LARGEST_GAP = 64 << 10  # a smaller gap between two spans is not worth its own read


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Bytes `begin`..`end` of a file: floats, or blocks with scales, of one type that belong to the same tensors.

    `whole`: these are floats, and the tensors have no others.
    """

    begin: int
    end: int
    dtype: str
    byte_order: str
    whole: bool


class Region(msgspec.Struct, frozen=True, gc=False):
    """A span with its segments: for each float type in order, without overlaps."""

    begin: int
    end: int
    crc32: int | None
    groups: tuple[tuple[int, ...], ...]  # indices in the plan's segments
    holds_bytes: bool = False  # a tensor of bytes: its first ones show if it is a file


class Part(msgspec.Struct, frozen=True, gc=False):
    """Bytes `begin`..`end` of a file, with the whole regions `first_region`..`last_region`."""

    begin: int
    end: int
    first_region: int
    last_region: int


class Plan(msgspec.Struct, frozen=True):
    """`pieces` aligns with the structure's tensors: the segments of each one, or None if it is not counted.

    `float_bytes` is the size of all segments. `sums` are ranges of the file with a checksum.
    """

    regions: list[Region]
    segments: list[Segment]
    pieces: list[tuple[int, ...] | None]
    problems: tuple[Problem, ...]
    float_bytes: int
    sums: tuple[RangeSum, ...] = ()


def plan_of(structure: Structure) -> Plan:
    """Cut each span at the boundaries of its float tensors, so that no byte is counted twice."""
    by_span: dict[int, dict[tuple[str, str], list[int]]] = {}
    of_bytes = {t.span for t in structure.tensors if t.dtype in BYTES and holds_bytes(t)}
    for index, tensor in enumerate(structure.tensors):
        if tensor.span is None or tensor.dtype not in WITH_FLOATS or tensor.stop <= tensor.start:
            continue
        by_span.setdefault(tensor.span, {}).setdefault((tensor.dtype, tensor.byte_order), []).append(index)
    regions: list[Region] = []
    problems: list[Problem] = []
    cuts = _Cuts(structure)
    for number, span in enumerate(structure.spans):
        groups = tuple([cuts.cut(span, *kind, tensors) for kind, tensors in by_span.get(number, {}).items()])
        if cuts.room < 0:
            first_name = structure.tensors[next(iter(by_span[number].values()))[0]].name
            problems.append(Problem(message="its tensors overlap too often", tensor=first_name))
            cuts.room = 0
        regions.append(Region(span.offset, span.offset + span.length, span.crc32, groups, number in of_bytes))
    float_bytes = sum(segment.end - segment.begin for segment in cuts.segments)
    return Plan(regions, cuts.segments, cuts.pieces, tuple(problems), float_bytes, structure.sums)


def parts_of(regions: Sequence[Region], length: int) -> list[Part]:
    """Return parts of at least about `length` bytes for threads to share. No part has a piece of a span.

    What is between two parts is outside all spans.
    """
    parts: list[Part] = []
    first = 0
    for last, region in enumerate(regions, start=1):
        following = regions[last].begin if last < len(regions) else None
        far = following is None or following - region.end > _LARGEST_GAP
        if far or region.end - regions[first].begin >= length:
            parts.append(Part(regions[first].begin, region.end, first, last))
            first = last
    return parts


class _Cuts:
    """The segments and pieces of a plan while its spans are cut. `room` is how many more pieces are allowed."""

    def __init__(self, structure: Structure) -> None:
        self.segments: list[Segment] = []
        self.pieces: list[tuple[int, ...] | None] = [None] * len(structure.tensors)
        self.room = MAX_PIECES
        self._places = structure.tensors

    def cut(self, span: SpanPlace, dtype: str, order: str, tensors: list[int]) -> tuple[int, ...]:
        """Add the segments for these tensors of one type. Returns their numbers."""
        first = len(self.segments)
        ranges = [(self._places[i].start, self._places[i].stop) for i in tensors]
        size = element_size(dtype)

        def add(start: int, stop: int, whole: bool) -> int:
            begin = span.offset + start * size
            end = min(span.offset + stop * size, span.offset + span.length)
            self.segments.append(Segment(begin, end, dtype, order, whole and dtype not in BLOCKS))
            return len(self.segments) - 1

        if len(ranges) == 1:  # nearly always
            self.pieces[tensors[0]] = (add(*ranges[0], True),)
            self.room -= 1
            return (first,)
        distinct = sorted(set(ranges))
        if all(a[1] <= b[0] for a, b in itertools.pairwise(distinct)):
            numbered = {place: (add(*place, True),) for place in distinct}
            for tensor, place in zip(tensors, ranges, strict=True):
                self.pieces[tensor] = numbered[place]
            self.room -= len(tensors)
        else:
            self._cut_overlapping(tensors, ranges, distinct, add)
        return tuple(range(first, len(self.segments)))

    def _cut_overlapping(
        self,
        tensors: list[int],
        ranges: Sequence[tuple[int, int]],
        distinct: Sequence[tuple[int, int]],
        add: Callable[[int, int, bool], int],
    ) -> None:
        """Cut at every boundary, drop what no tensor covers, and give each tensor its segments."""
        edges = sorted({edge for place in distinct for edge in place})
        opening = dict(distinct)  # sorted, so of equal starts the furthest stop stays
        at: dict[int, int] = {}
        kept: list[tuple[int, int]] = []
        covered = -1
        for begin, end in itertools.pairwise(edges):
            covered = max(covered, opening.get(begin, -1))
            at[begin] = len(kept)
            if begin < covered:
                kept.append((begin, end))
        at[edges[-1]] = len(kept)
        self.room -= sum(at[stop] - at[start] for start, stop in ranges)
        if self.room < 0:
            return
        numbers = [add(*place, False) for place in kept]
        shared = {(start, stop): tuple(numbers[at[start] : at[stop]]) for start, stop in distinct}
        for tensor, place in zip(tensors, ranges, strict=True):
            self.pieces[tensor] = shared[place]

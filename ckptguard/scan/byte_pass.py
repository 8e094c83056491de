"""The pass over the bytes of a file or a part of it: BLAKE3 and CRC-32 of spans, tallies of floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from blake3 import blake3

from ckptguard.formats.dtypes import BLOCKS
from ckptguard.formats.structure import Problem, Structure
from ckptguard.formats.zip.crc import crc32_function
from ckptguard.scan.file_tallies import Tallies
from ckptguard.scan.plan import Part, Plan, Region
from ckptguard.scan.result import Numbers
from ckptguard.scan.span_pieces import SpanPieces
from ckptguard.scan.tallies import ScaleReader, Tally, merge

HEAD = 16
_LARGEST_ELEMENT = 8


class BytePass:
    """Takes the blocks of one part in order. Blocks must end where `ends` says, so that no float is split.

    Bytes outside spans go to `envelope`, if there is one. Afterwards:
    - `digests` has the BLAKE3 of each region of the part.
    - `wrong_crcs` has the CRC-32 found in regions that state another one, `wrong_sums` that of ranges.
    - `tallies` has the results of the plan's segments, by number: the numbers of those that were looked at with others.
    - `pieces` has those of the regions whose element size is in `elements`.
    - `heads` has the first bytes of regions that hold bytes.
    """

    def __init__(
        self, plan: Plan, part: Part, envelope: blake3 | None = None, elements: Mapping[int, int] = {}
    ) -> None:
        self.part = part
        self.pieces: dict[int, str] = {}
        self.digests: list[str] = []
        self.wrong_crcs: list[tuple[int, int]] = []
        self.wrong_sums: list[tuple[int, int]] = []
        self.tallies: dict[int, Tally | Numbers] = {}
        self.heads: dict[int, bytes] = {}
        self._plan = plan
        self._envelope = envelope
        self._elements = elements
        self._pieces: SpanPieces | None = None
        self._hasher = blake3()
        self._crc = 0
        self._range, self._crc_of_range = 0, 0
        self._cursors: dict[int, int] = {}  # the next segment of each group in the current region
        self._position = part.begin
        self._region = part.first_region
        self._open: dict[int, Tally | ScaleReader] = {}
        self._make = Tallies(plan.float_bytes)

    def ends(self, block_size: int) -> Iterator[int]:
        """Yield where each block ends: at most `block_size` (at least 8) after the previous one, and never inside a
        float.

        Within a region, blocks end at multiples of the block size from its start: BLAKE3 is a tree, and is fastest with
        whole branches.
        """
        position, region = self.part.begin, self.part.first_region
        regions = self._plan.regions
        block_size -= block_size % _LARGEST_ELEMENT
        while position < self.part.end:
            end = min(position + block_size, self.part.end)
            while region < len(regions) and regions[region].end <= end:
                region += 1
            if region < len(regions) and regions[region].begin < end:
                whole = end - (end - regions[region].begin) % block_size
                end = whole if whole > position else end
            yield end
            position = end

    def add(self, block: memoryview) -> None:
        """Take the part's next bytes."""
        start = here = self._position
        stop = start + len(block)
        if self._range < len(self._plan.sums):
            self._sum_ranges(block, start)
        while here < stop:
            region = None if self._region == self.part.last_region else self._plan.regions[self._region]
            outside = region is None or here < region.begin
            end = stop if region is None else min(region.begin if outside else region.end, stop)
            piece = block[here - start : end - start]
            if region is not None and not outside:
                self._inside(region, piece, here)
                if end == region.end:
                    self._close(region)
            elif self._envelope is not None:
                self._envelope.update(piece)
            here = end
        self._position = stop
        if self._make.waiting and stop == self.part.end:
            self.tallies.update(self._make.settle())

    def _sum_ranges(self, block: memoryview, start: int) -> None:
        """Add a block to the checksums of the ranges that it touches. Only a pass over a whole file has all of them."""
        sums, stop = self._plan.sums, start + len(block)
        while self._range < len(sums) and sums[self._range].offset < stop:
            one = sums[self._range]
            piece = block[max(one.offset - start, 0) : one.offset + one.length - start]
            self._crc_of_range = crc32_function()(piece, self._crc_of_range)
            if one.offset + one.length > stop:
                return
            if self._crc_of_range != one.crc32:
                self.wrong_sums.append((self._range, self._crc_of_range))
            self._range, self._crc_of_range = self._range + 1, 0

    def _inside(self, region: Region, piece: memoryview, start: int) -> None:
        self._hasher.update(piece)
        if region.holds_bytes and start == region.begin:
            self.heads[self._region] = bytes(piece[:HEAD])
        if region.crc32 is not None:
            self._crc = crc32_function()(piece, self._crc)
        if self._region in self._elements:
            if self._pieces is None:
                self._pieces = SpanPieces(region.end - region.begin, self._elements[self._region])
            self._pieces.add(piece, start - region.begin)
        for group, segments in enumerate(region.groups):
            self._count(group, segments, piece, start)

    def _count(self, group: int, segments: tuple[int, ...], piece: memoryview, start: int) -> None:
        """Add a piece of a region to the segments of one group that it touches."""
        stop = start + len(piece)
        cursor = self._cursors.get(group, 0)
        while cursor < len(segments):
            segment = self._plan.segments[segments[cursor]]
            if segment.begin >= stop:
                break
            number = segments[cursor]
            own = piece[max(segment.begin - start, 0) : min(segment.end, stop) - start]
            if segment.whole and len(own) == segment.end - segment.begin and self._make.are_small(len(own)):
                if self._make.add_small(number, segment.dtype, segment.byte_order, memoryview(bytes(own))):
                    self.tallies.update(self._make.settle())
            else:
                tally = self._open.get(number) or self._new_tally(number)
                tally.add(own)
                if segment.end > stop:
                    break
                self._open.pop(number).close()
            cursor += 1
        self._cursors[group] = cursor

    def _new_tally(self, number: int) -> Tally | ScaleReader:
        segment = self._plan.segments[number]
        blocks = BLOCKS.get(segment.dtype)
        tally = self._make.tally(segment.dtype if blocks is None else blocks.scale, segment.byte_order)
        self.tallies[number] = tally
        self._open[number] = tally if blocks is None else ScaleReader(blocks, tally)
        return self._open[number]

    def _close(self, region: Region) -> None:
        if region.crc32 is not None and self._crc != region.crc32:
            self.wrong_crcs.append((self._region, self._crc))
        self.digests.append(self._hasher.hexdigest())
        if self._pieces is not None:
            self.pieces[self._region] = self._pieces.text()
            self._pieces = None
        self._hasher = blake3()
        self._crc = 0
        self._cursors.clear()
        self._region += 1


def problems_of(plan: Plan, structure: Structure, passes: Sequence[BytePass]) -> tuple[Problem, ...]:
    """Return the problems of the plan and of the bytes."""
    problems = list(plan.problems)
    wrong_crcs = [wrong for one in passes for wrong in one.wrong_crcs]
    for number, found in (wrong for one in passes for wrong in one.wrong_sums):
        stated = plan.sums[number]
        message = f"file {stated.name!r} of the archive has a wrong CRC-32"
        problems.append(Problem(message, expected=f"{stated.crc32:08x}", found=f"{found:08x}"))
    names = {t.span: t.name for t in reversed(structure.tensors)} if wrong_crcs else {}  # the first tensor of each span
    for region, found in wrong_crcs:
        tensor = names.get(region)
        message = "the CRC-32 of the stored bytes differs from the one in the archive"
        problems.append(
            Problem(message=message, tensor=tensor, expected=f"{plan.regions[region].crc32:08x}", found=f"{found:08x}")
        )
    return tuple(problems)


def numbers_of(plan: Plan, tallies: Mapping[int, Tally | Numbers]) -> tuple[Numbers | None, ...]:
    """Return the numbers of each tensor. Tensors of the same elements share one value."""
    merged: dict[tuple[int, ...], Numbers | None] = {}
    result: list[Numbers | None] = []
    for pieces in plan.pieces:
        if pieces is None:
            result.append(None)
            continue
        if pieces not in merged:
            found = [tallies[p] for p in pieces if p in tallies]
            alone = next((one for one in found if isinstance(one, Numbers)), None)
            tallied = [one for one in found if not isinstance(one, Numbers)]
            merged[pieces] = merge(tallied) if tallied else alone
        result.append(merged[pieces])
    return tuple(result)

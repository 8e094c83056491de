"""The pass over one file's bytes: spans and envelope to BLAKE3 and CRC-32, floats to tallies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from blake3 import blake3

from ckptguard.formats.crc import crc32_function
from ckptguard.formats.structure import Problem, Structure
from ckptguard.scan.plan import Plan, plan_of
from ckptguard.scan.result import Numbers

if TYPE_CHECKING:
    from ckptguard.scan.numbers import Tally

_LARGEST_ELEMENT = 8


class FilePass:
    """Takes a file's blocks in order; blocks must end where `next_end` says, so that no float is ever split."""

    def __init__(self, structure: Structure, size: int) -> None:
        self._structure = structure
        self._size = size
        self._plan: Plan = plan_of(structure)
        self._crc32 = crc32_function()
        self._envelope = blake3()
        self._hasher = blake3()
        self._crc = 0
        self._cursors: dict[int, int] = {}  # the next segment of each group of the region at hand
        self._position = 0
        self._region = 0
        self._digests: list[str] = []
        self._problems: list[Problem] = list(self._plan.problems)
        self._tallies: dict[int, Tally] = {}
        self._next_tally: Callable[[int], Tally] | None = None

    def ends(self, block_size: int) -> Iterator[int]:
        """Where each block ends: at most `block_size` after the one before, and never inside a float."""
        position = region = 0
        regions = self._plan.regions
        while position < self._size:
            end = min(position + block_size, self._size)
            while region < len(regions) and regions[region].end <= end:
                region += 1
            if region < len(regions) and regions[region].begin < end < regions[region].end:
                begin = max(regions[region].begin, position)
                end -= (end - regions[region].begin) % _LARGEST_ELEMENT
                end = max(end, begin)
            yield end
            position = end

    def add(self, block: memoryview) -> None:
        """The file's next bytes."""
        regions = self._plan.regions
        start, done = self._position, 0
        stop = start + len(block)
        while done < len(block):
            if self._region == len(regions):
                self._envelope.update(block[done:])
                break
            region = regions[self._region]
            here = start + done
            if here < region.begin:
                length = min(region.begin, stop) - here
                self._envelope.update(block[done : done + length])
                done += length
                continue
            length = min(region.end, stop) - here
            piece = block[done : done + length]
            self._hasher.update(piece)
            if region.crc32 is not None:
                self._crc = self._crc32(piece, self._crc)
            for group, segments in enumerate(region.groups):
                self._count(group, segments, piece, here)
            done += length
            if here + length == region.end:
                self._close_region(region.crc32)
        self._position = stop

    def _count(self, group: int, segments: tuple[int, ...], piece: memoryview, start: int) -> None:
        """Add a piece of a region to the segments of one group that it touches."""
        stop = start + len(piece)
        cursor = self._cursors.get(group, 0)
        while cursor < len(segments):
            segment = self._plan.segments[segments[cursor]]
            if segment.begin >= stop:
                break
            self._tally(segments[cursor]).add(piece[max(segment.begin - start, 0) : min(segment.end, stop) - start])
            if segment.end > stop:
                break
            cursor += 1
        self._cursors[group] = cursor

    def _tally(self, number: int) -> Tally:
        tally = self._tallies.get(number)
        if tally is None:
            if self._next_tally is None:
                self._next_tally = _tally_maker(self._plan)
            tally = self._tallies[number] = self._next_tally(number)
        return tally

    def _close_region(self, expected: int | None) -> None:
        if expected is not None and self._crc != expected:
            tensor = next((t.name for t in self._structure.tensors if t.span == self._region), None)
            self._problems.append(
                Problem(
                    message="the stored bytes do not have the CRC-32 that the archive states",
                    tensor=tensor,
                    expected=f"{expected:08x}",
                    found=f"{self._crc:08x}",
                )
            )
        self._digests.append(self._hasher.hexdigest())
        self._hasher = blake3()
        self._crc = 0
        self._cursors.clear()
        self._region += 1

    def problems(self) -> tuple[Problem, ...]:
        """What the bytes turned out to be wrong in."""
        return tuple(self._problems)

    def envelope(self) -> str:
        """BLAKE3 of everything outside spans."""
        return self._envelope.hexdigest()

    def span_digests(self) -> tuple[str, ...]:
        """BLAKE3 of each span."""
        return tuple(self._digests)

    def numbers(self) -> tuple[Numbers | None, ...]:
        """The numbers of each tensor; tensors of the same elements share one value."""
        merged: dict[tuple[int, ...], Numbers | None] = {}
        result: list[Numbers | None] = []
        for pieces in self._plan.pieces:
            if pieces is None:
                result.append(None)
                continue
            if pieces not in merged:
                merged[pieces] = self._merge(pieces)
            result.append(merged[pieces])
        return tuple(result)

    def _merge(self, pieces: tuple[int, ...]) -> Numbers | None:
        from ckptguard.scan.numbers import merge

        tallies = [self._tallies[p] for p in pieces if p in self._tallies]
        return merge(tallies) if tallies else None


def _tally_maker(plan: Plan) -> Callable[[int], Tally]:
    # numpy is imported only once there are floats to look at: by then the digest threads have work.
    from ckptguard.scan.numbers import Reading, Tally

    readings: dict[tuple[str, str], Reading] = {}

    def make(number: int) -> Tally:
        kind = (plan.segments[number].dtype, plan.segments[number].byte_order)
        if kind not in readings:
            readings[kind] = Reading(*kind)
        return Tally(readings[kind])

    return make

"""Tallies of few floats: the same numbers as of many, in one piece or in several, in every float type."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable

import msgspec
import pytest

from ckptguard.formats.dtypes import DTYPES
from ckptguard.scan.numbers import ArrayTally, Reading
from ckptguard.scan.result import Numbers
from ckptguard.scan.small_segments import numbers_of_small
from ckptguard.scan.tallies import FewTally, Tally, merge

FLOATS = sorted(name for name, dtype in DTYPES.items() if dtype.float is not None)


def some_bytes(chance: random.Random, size: int) -> bytes:
    """Up to 40 elements: all alike, any bits, or many that are special."""
    count = chance.randint(1, 40)
    special = [bytes(size), b"\xff" * size, bytes(size - 1) + b"\x80", chance.randbytes(size)]
    makers = (lambda: special[3], lambda: chance.randbytes(size), lambda: chance.choice(special))
    make = chance.choice(makers)
    return b"".join(make() for _ in range(count))


def same(one: Numbers, other: Numbers) -> bool:
    """Equal, but for the last digit of the root mean square."""
    close = one.rms == other.rms or math.isclose(one.rms or 0, other.rms or 0, rel_tol=1e-14)
    return close and msgspec.structs.replace(one, rms=other.rms) == other


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", ["little", "big"])
def test_few_and_many_and_pieces_are_the_same(dtype: str, order: str) -> None:
    """However they are counted, also where numpy changes the byte order of arrays that it joins; without warnings."""
    chance = random.Random(f"{dtype} {order}")
    reading = Reading(dtype, order)
    size = reading.layout.size
    ways: list[Callable[[], Tally]] = [lambda: FewTally(dtype, order), lambda: ArrayTally(reading)]
    for _ in range(60):
        raw = memoryview(some_bytes(chance, size))
        cut = size * chance.randint(0, len(raw) // size)
        pieces = [piece for piece in (raw[:cut], raw[cut:]) if len(piece)]
        found = []
        for way in ways:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                whole, joined, apart = way(), way(), [way() for _ in pieces]
                whole.add(raw)
                for piece, own in zip(pieces, apart, strict=True):
                    joined.add(piece)
                    own.add(piece)
                found += [merge([whole]), merge([joined]), merge(apart)]
        assert all(same(found[0], other) for other in found), (bytes(raw), found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", ["little", "big"])
def test_small_segments_at_once_have_the_numbers_of_each(dtype: str, order: str) -> None:
    """To the last digit, whatever is beside them: any bits, zeros, equal ones, long and short, of one size and of
    many. Those of a few plain numbers say so too."""
    chance = random.Random(f"{dtype} {order} at once")
    reading = Reading(dtype, order)
    size = reading.layout.size
    for _ in range(20):
        segments = [memoryview(some_bytes(chance, size)) for _ in range(chance.randint(1, 40))]
        for _ in range(chance.randint(0, 4)):  # longer than a stretch of the sample, and as long as one
            usual = some_bytes(chance, size) * 2000
            length = chance.choice([4096, 4096 + size, 8192, 20_000, 65_536])
            segments.append(memoryview(usual[: length // size * size]))
        chance.shuffle(segments)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = numbers_of_small(segments, reading)
            for segment, numbers in zip(segments, found, strict=True):
                alone = ArrayTally(reading)
                alone.add(segment)
                assert merge([alone]) == numbers
                if len(segment) <= 4096:  # plain numbers of more are added up in another order
                    few = FewTally(dtype, order)
                    few.add(segment)
                    assert same(merge([few]), numbers)

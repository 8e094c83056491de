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

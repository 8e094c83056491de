"""What the fuzzers once found, and what they begin with, in the normal run: no exception, and no disagreement."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.starting_points import starting_points
from fuzz.targets import TARGETS

SEEDS = sorted((Path(__file__).resolve().parent / "seeds").glob("*/*"))


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_stays_mended(seed: Path) -> None:
    """An input that once broke a reader, or that we once read in another way than the real reader."""
    TARGETS[seed.parent.name](seed.read_bytes())


@pytest.mark.parametrize("what", sorted(TARGETS))
def test_what_real_writers_make_is_read_as_they_mean_it(what: str) -> None:
    """The fuzzers' starting points keep every law of their targets."""
    for data in starting_points(what):
        TARGETS[what](data)


@pytest.mark.parametrize("what", sorted(TARGETS))
def test_nothing_and_noise_are_read(what: str) -> None:
    """Empty and meaningless inputs end in an answer."""
    for data in (b"", b"\0", b"\xff" * 40, bytes(300), b"{}", b"PK\x05\x06" + bytes(18)):
        TARGETS[what](data)

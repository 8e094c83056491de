"""Packed names: a set, whatever is in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.values.packed_names import PackedNames, joined

# Names as an operating system has them: any bytes but NUL.
ANY = st.binary(max_size=12).filter(lambda name: b"\0" not in name)
NAME = ANY.map(lambda name: name.decode("utf-8", "surrogateescape"))
NAMES = st.lists(NAME, max_size=8)


@given(NAMES, NAMES)
def test_it_is_a_set(one, other):
    """In order, of the same names, and equal to those of the same names alone; so are their bytes."""
    packed = PackedNames(one)
    assert list(packed) == sorted(set(one))
    assert len(packed) == len(set(one))
    assert (packed == PackedNames(other)) == (set(one) == set(other))
    if packed == PackedNames(other):
        assert hash(packed) == hash(PackedNames(other))
    assert (joined(set(one)) == joined(sorted(set(other)))) == (set(one) == set(other))

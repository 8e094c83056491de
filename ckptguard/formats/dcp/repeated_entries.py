"""Tensors that a ``.metadata`` pickle describes with the same bytes again and again.

The first time, such bytes are also read alone. That shows that they need and change nothing but the value that they
leave behind. Where the same bytes come again, that value is put there.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptguard.formats.pickle.inert_values import Global

KEY = 64  # bytes that descriptions are told apart by at first: nearly always the tensor's shape is among them
LONGEST = 1 << 12
MOST = 4096  # descriptions that are kept
MAX_HITS = 1_000_000
_MAX_DIMENSIONS = 64


class Repeat(NamedTuple):
    """Bytes of the pickle and the value that they make. `memos` are the values put into the memo meanwhile, in order;
    Unresolved for those that something may still change."""

    raw: bytes
    value: object
    memos: tuple[object, ...]


class Unresolved:
    """Stands for what came before and may still change: whatever looks into it finds nothing."""


UNRESOLVED = Unresolved()


class EarlierMemo(dict[int, object]):
    """The memo as it was before the bytes, for reading them alone."""

    def __init__(self, memo: dict[int, object], end: int) -> None:
        super().__init__()
        self._memo = memo
        self._end = end

    def __missing__(self, index: int) -> object:
        # Their own values come under other numbers the next time, and those under these numbers are then others' own.
        return immutable(self._memo[index]) if index < self._end else UNRESOLVED


def immutable(value: object) -> object:
    """The value if nothing can change it any more."""
    kind = type(value)
    if kind is str or kind is int or kind is Global or value is None:
        return value
    if isinstance(value, tuple) and len(value) <= _MAX_DIMENSIONS and all(type(n) is int for n in value):
        return value
    return UNRESOLVED

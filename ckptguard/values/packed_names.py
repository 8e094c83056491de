"""Names that are kept in memory for as long as a run is guarded: packed, because there may be very many."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator


def joined(names: Iterable[str]) -> bytes:
    """Return the bytes of a set of names, given in any order."""
    return "".join(f"{name}\0" for name in sorted(names)).encode("utf-8", "surrogateescape")


class PackedNames:
    """A set of names without NUL, in order. Two are equal if their names are. Names of records are much alike: each of
    them takes some bytes here, and more than a hundred as a `str` in a set."""

    __slots__ = ("_count", "_packed")

    def __init__(self, names: Iterable[str] = ()) -> None:
        listed = frozenset(names)
        self._count, self._packed = len(listed), zlib.compress(joined(listed), 1)

    def __iter__(self) -> Iterator[str]:
        return iter(zlib.decompress(self._packed).decode("utf-8", "surrogateescape").split("\0")[:-1])

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedNames):
            return NotImplemented
        return self._packed == other._packed

    def __hash__(self) -> int:
        return hash(self._packed)

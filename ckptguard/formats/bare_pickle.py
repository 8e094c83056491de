"""Pickles without an archive around them: scheduler and RNG states, pickled dicts."""

from __future__ import annotations

from ckptguard.formats.pickle_constants import PickleProblem
from ckptguard.formats.pickle_reader import MAX_STREAM, read_pickle
from ckptguard.formats.state_tree import walk
from ckptguard.formats.structure import Format, Leaf, Problem, Structure
from ckptguard.formats.suffixes import has_tensor_suffix, is_pickle_name
from ckptguard.storage.protocol import Reader

_MAX_PICKLES = 10_000
# gzip, bzip2, xz, zlib: compressed pickles are opaque files to us.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x28\xb5\x2f\xfd")


def matches(path: str, head: bytes) -> bool:
    """By a pickle's suffix, unless compressed; by a tensor suffix only with the mark of a binary pickle."""
    if is_pickle_name(path):
        return not head.startswith(_COMPRESSED)
    return has_tensor_suffix(path) and len(head) > 2 and head[0] == 0x80 and head[1] <= 5


def read(reader: Reader, path: str) -> Structure:
    """The numbers and names in a file of one or more pickles."""
    size = reader.entry.size
    if size > MAX_STREAM:
        return _structure([Problem(message=f"a pickle of {size} bytes is more than we would read")])
    data = reader.read(0, size)
    problems: list[Problem] = []
    leaves: list[Leaf] = []
    names: set[str] = set()
    truncated = False
    position = count = 0
    while (position < size or not count) and count < _MAX_PICKLES:
        try:
            pickled = read_pickle(data, position)
        except PickleProblem as error:
            names |= error.globals
            what = f"after {position} bytes: " if count else ""
            problems.append(Problem(message=f"{what}{error}"))
            truncated = error.ends_early
            break
        found = walk(pickled.value)
        names |= pickled.globals
        prefix = f"{count}." if count else ""
        leaves += (
            [Leaf(prefix + leaf.name, leaf.value, leaf.of_array) for leaf in found.leaves] if count else found.leaves
        )
        problems += found.problems
        problems += [
            Problem(message=f"tensor {name!r} refers to a storage outside the pickle", tensor=name)
            for name, _ in found.tensors[:100]
        ]
        position, count = pickled.end, count + 1
    if position < size and not problems:
        problems.append(Problem(message=f"there are more than {_MAX_PICKLES} pickles"))
    return _structure(problems, truncated, names, leaves)


def _structure(
    problems: list[Problem], truncated: bool = False, names: set[str] | None = None, leaves: list[Leaf] | None = None
) -> Structure:
    return Structure(
        format=FORMAT.name,
        problems=tuple(problems),
        truncated=truncated,
        globals=tuple(sorted(names or ())),
        leaves=tuple(leaves or ()),
    )


FORMAT = Format(name="pickle", matches=matches, read=read, holds_tensors=False)

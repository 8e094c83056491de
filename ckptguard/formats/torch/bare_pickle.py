"""Pickles without an archive around them: scheduler and RNG states, pickled dicts."""

from __future__ import annotations

import math

from msgspec import structs

from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import BUDGET, MAX_STREAM, read_pickle
from ckptguard.formats.structure import Leaf, Problem, Structure, broken
from ckptguard.formats.torch.state_tree import MAX_LEAVES, MAX_NODES, MAX_UNREAD, walk
from ckptguard.storage.protocol import Reader

NAME = "pickle"
_MAX_PICKLES = 10_000


def read(reader: Reader, path: str) -> Structure:
    """The numbers and names in a file of one or more pickles."""
    size = reader.entry.size
    if size > MAX_STREAM:
        return broken(NAME, f"a pickle of {size} bytes is more than we would read")
    data = reader.read(0, size)
    problems: list[Problem] = []
    leaves: list[Leaf] = []
    unread: list[str] = []
    containers: tuple[str, ...] = ()
    budget, room = BUDGET, MAX_NODES  # for all of them together
    names: set[str] = set()
    truncated = False
    position = count = 0
    while (position < size or not count) and count < _MAX_PICKLES:
        try:
            pickled = read_pickle(data, position, budget=budget)
        except PickleProblem as error:
            names |= error.globals
            what = f"after {position} bytes: " if count else ""
            problems.append(Problem(message=f"{what}{error}"))
            truncated = error.ends_early
            break
        found = walk(pickled.value, room)
        names |= pickled.globals
        prefix = f"{count}." if count else ""
        room_for_finite = max(0, MAX_LEAVES // 2 - len(leaves))
        for leaf in found.leaves:
            if math.isfinite(leaf.value):
                room_for_finite -= 1
            if not math.isfinite(leaf.value) or room_for_finite >= 0:
                leaves.append(structs.replace(leaf, name=prefix + leaf.name))
        unread += [prefix + name for name in found.unread]
        containers = containers if count else found.containers
        budget -= pickled.cost
        room -= found.visited
        problems += found.problems
        problems += [
            Problem(message=f"tensor {name!r} refers to a storage outside the pickle", tensor=name)
            for name, _ in found.tensors[:100]
        ]
        position, count = pickled.end, count + 1
    if position < size and not problems:
        problems.append(Problem(message=f"there are more than {_MAX_PICKLES} pickles"))
    if len(leaves) > MAX_LEAVES:
        problems.append(Problem(message="more numbers that are not finite than we would list"))
    return Structure(
        format=NAME,
        problems=tuple(problems),
        truncated=truncated,
        globals=tuple(sorted(names)),
        leaves=tuple(leaves[:MAX_LEAVES]),
        containers=containers,
        unread=tuple(unread[:MAX_UNREAD]),
    )

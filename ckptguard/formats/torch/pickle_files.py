"""Pickles without an archive around them: scheduler and RNG states, pickled dicts, and torch's legacy format.

That is what torch.save wrote before its zip format: pickles, then the storages one after another.
"""

from __future__ import annotations

import math

from msgspec import structs

from ckptguard.formats.dtypes import DTYPES
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import Sequence
from ckptguard.formats.pickle.machine import BUDGET, MAX_STREAM, Pickled, read_pickle
from ckptguard.formats.structure import MAX_PROBLEMS, Found, Problem, SpanPlace, Structure, broken
from ckptguard.formats.torch.placing import StorageSpan, place_tensors
from ckptguard.formats.torch.rebuild_calls import TensorProblem, as_storage
from ckptguard.formats.torch.state_tree import MAX_LEAVES, MAX_NODES, MAX_UNREAD, walk
from ckptguard.storage.protocol import Reader

NAME = "pickle"
_LEGACY = "torch_legacy"
_FIRST_READ = 1 << 20
_MAX_PICKLES = 10_000


def read(reader: Reader, path: str) -> Structure:
    """The numbers and names in a file of one or more pickles."""
    size = reader.entry.size
    if size > MAX_STREAM:
        return broken(NAME, f"a pickle of {size} bytes is more than we would read")
    data = reader.read(0, size)
    found = Found()
    budget, room = BUDGET, MAX_NODES  # for all of them together
    position = count = 0
    while (position < size or not count) and count < _MAX_PICKLES:
        try:
            pickled = read_pickle(data, position, budget=budget)
        except PickleProblem as error:
            found.names |= error.globals
            what = f"after {position} bytes: " if count else ""
            found.problems.append(Problem(f"{what}{error}"))
            found.truncated = error.ends_early
            break
        tree = walk(pickled, room)
        found.names |= pickled.globals
        prefix = f"{count}." if count else ""
        room_for_finite = max(0, MAX_LEAVES // 2 - len(found.leaves))
        for leaf in tree.leaves:
            if math.isfinite(leaf.value):
                room_for_finite -= 1
            if not math.isfinite(leaf.value) or room_for_finite >= 0:
                found.leaves.append(structs.replace(leaf, name=prefix + leaf.name))
        found.unread += [prefix + name for name in tree.unread]
        found.containers = found.containers if count else tree.containers
        budget -= pickled.cost
        room -= tree.visited
        found.problems += tree.problems
        for name, _ in tree.tensors[:100]:
            found.problems.append(Problem(f"tensor {name!r} refers to a storage outside the pickle", tensor=name))
        if pickled.persistent and not tree.tensors:
            found.problems.append(Problem("it refers to something outside the pickle"))
        position, count = pickled.end, count + 1
    if position < size and not found.problems:
        found.problems.append(Problem(f"there are more than {_MAX_PICKLES} pickles"))
    if len(found.leaves) > MAX_LEAVES:
        found.problems.append(Problem("more numbers that are not finite than we would list"))
    del found.leaves[MAX_LEAVES:], found.unread[MAX_UNREAD:]
    return found.structure(NAME)


def read_legacy(reader: Reader, path: str) -> Structure:
    """The structure of a legacy file; storages are spans, without a CRC, for the format has none."""
    length = _FIRST_READ
    while True:
        # The pickles come first and are small beside the storages, but how long they are nobody says.
        length = min(length, reader.entry.size, MAX_STREAM)
        pickles = _pickles(reader.read(0, length))
        more = isinstance(pickles, PickleProblem) and pickles.ends_early
        if not more or length in (reader.entry.size, MAX_STREAM):
            break
        length *= 8
    if isinstance(pickles, PickleProblem):
        return broken(_LEGACY, str(pickles), truncated=pickles.ends_early, names=pickles.globals)
    state, keys = pickles[3:]
    found, tree = Found(), walk(state)
    stored = _storages(reader, state, keys, found)
    found.problems += tree.problems
    # Whatever byte order the system record states: storages were always written in little-endian order.
    found.tensors = place_tensors(tree.tensors, state.persistent, stored, "little", found.problems)
    del found.problems[MAX_PROBLEMS:]
    found.names.update(*(p.globals for p in pickles))
    found.leaves, found.containers, found.unread = list(tree.leaves), tree.containers, list(tree.unread)
    return found.structure(_LEGACY)


def _pickles(data: bytes) -> list[Pickled] | PickleProblem:
    """Magic number, protocol version, system, state and the storages' keys; or why they cannot be read."""
    pickles: list[Pickled] = []
    try:
        for _ in range(5):
            pickles.append(read_pickle(data, pickles[-1].end if pickles else 0))
    except PickleProblem as error:
        error.globals = error.globals.union(*(p.globals for p in pickles))
        return error
    return pickles


def _storages(reader: Reader, state: Pickled, keys: Pickled, found: Found) -> dict[str, StorageSpan]:
    """The storages by their keys."""
    items = {}  # key -> (bytes of one element, bytes in all)
    for reference in state.persistent:
        if type(reference.value) is tuple and reference.value[:1] == ("module",):
            continue  # a module's class, with its source
        try:
            storage, dtype = as_storage(reference)
        except TensorProblem as error:
            found.problems.append(Problem(f"a storage: {error}"))
            continue
        items[storage.key] = (DTYPES[dtype].size, storage.length)
    stored: dict[str, StorageSpan] = {}
    position, size = keys.end, reader.entry.size
    for key in keys.value.items if type(keys.value) is Sequence else []:
        if type(key) is not str or key not in items or key in stored:
            found.problems.append(Problem("the list of storages does not fit the pickle"))
            return stored
        element, length = items[key]
        count = int.from_bytes(reader.read(position, 8), "little") if position + 8 <= size else None
        if count is None or (count * element == length and position + 8 + length > size):
            found.problems.append(Problem("the file ends in the middle of its storages"))
            found.truncated = True
            return stored
        if count * element != length:
            found.problems.append(Problem("a storage has another size than the pickle says"))
            return stored
        stored[key] = StorageSpan(len(found.spans) if length else None, length)
        if length:
            found.spans.append(SpanPlace(position + 8, length))
        position += 8 + length
    if position != size:
        found.problems.append(Problem(f"{size - position} bytes follow the last storage"))
    return stored

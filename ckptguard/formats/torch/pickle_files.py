"""Pickles without an archive around them: scheduler and RNG states, pickled dicts, and torch's legacy format.

The legacy format is from before torch.save's zip format: pickles, then the storages one after another.
"""

from __future__ import annotations

import math

from ckptguard.formats.dtypes import DTYPES
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import Call, Mapping, Sequence
from ckptguard.formats.pickle.machine import MAX_STREAM, Machine, Pickled, read_pickle, run_machine
from ckptguard.formats.structure import MAX_PROBLEMS, Found, Problem, Source, SpanPlace, Structure, broken
from ckptguard.formats.torch.contents import LOADS_BYTES, ReadingBudget, take
from ckptguard.formats.torch.placing import StorageSpan, place_tensors
from ckptguard.formats.torch.rebuild_calls import TensorProblem, as_storage
from ckptguard.formats.torch.state_tree import MAX_LEAVES, MAX_UNREAD
from ckptguard.storage.protocol import Reader

NAME = "pickle"
_LEGACY = "torch_legacy"
_FIRST_READ = 1 << 20
_MAX_PICKLES = 10_000
_AN_OPCODE = 32  # of the budget, at least
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_PARTS = 6  # of a reference to a storage


class _LoadingMachine(Machine):
    """A machine that remembers the bytes for calls of torch's own loader."""

    __slots__ = ("loads",)

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data, start)
        self.loads: list[Call] = []

    def reduce(self, p: int) -> int:
        p = super().reduce(p)
        return self.called(p)

    def text_instance(self, p: int) -> int:
        return self.called(super().text_instance(p))

    def object_of_mark(self, p: int) -> int:
        return self.called(super().object_of_mark(p))

    def new_object_ex(self, p: int) -> int:
        return self.called(super().new_object_ex(p))

    def called(self, p: int) -> int:
        last = self.stack[-1]
        if type(last) is Call and last.calls(LOADS_BYTES):
            self.loads.append(last)
        return p


def read(reader: Reader, path: str) -> Structure:
    """Return the numbers and names in a file of one or more pickles."""
    return read_within(reader, ReadingBudget())


def read_within(reader: Source, room: ReadingBudget) -> Structure:
    """Do the same for one of several files."""
    size = reader.entry.size
    if size > MAX_STREAM:
        return broken(NAME, f"a pickle of {size} bytes is more than ckptguard reads")
    data = reader.read(0, size)
    found = Found()
    position = count = 0
    while (position < size or not count) and count < _MAX_PICKLES:
        machine = _LoadingMachine(data, position)
        try:
            pickled = run_machine(machine, position, room.budget)
        except PickleProblem as error:
            room.budget -= _AN_OPCODE * (machine.position - position)
            found.names |= error.globals
            what = f"after {position} bytes: " if count else ""
            found.problems.append(Problem(f"{what}{error}"))
            found.truncated = error.ends_early
            break
        tensors = take(pickled, room, found, f"{count}." if count else "", machine.loads)
        if len(found.leaves) > MAX_LEAVES:  # of this many only those that are not finite matter
            found.leaves = [leaf for leaf in found.leaves if not math.isfinite(leaf.value)]
        for name, _ in tensors[:100]:
            found.problems.append(Problem(f"tensor {name!r} refers to a storage outside the pickle", tensor=name))
        if pickled.persistent and not tensors:
            found.problems.append(Problem("it refers to something outside the pickle"))
        position, count = pickled.end, count + 1
    if position < size and not found.problems:
        found.problems.append(Problem(f"there are more than {_MAX_PICKLES} pickles"))
    if len(found.leaves) > MAX_LEAVES:
        found.problems.append(Problem("more numbers that are not finite than ckptguard lists"))
    del found.leaves[MAX_LEAVES:], found.unread[MAX_UNREAD:]
    return found.structure(NAME)


def read_legacy(reader: Reader, path: str) -> Structure:
    """Return the structure of a legacy file. Storages are spans without a CRC, which the format lacks."""
    return read_legacy_within(reader, ReadingBudget())


def read_legacy_within(reader: Source, room: ReadingBudget) -> Structure:
    """Do the same for one of several files."""
    length = _FIRST_READ
    while True:
        # The pickles come first and are small beside the storages, but nothing states their length.
        length = min(length, reader.entry.size, MAX_STREAM)
        pickles = _pickles(reader.read(0, length), room.budget)
        more = isinstance(pickles, PickleProblem) and pickles.ends_early
        if not more or length in (reader.entry.size, MAX_STREAM):
            break
        length *= 8
    if isinstance(pickles, PickleProblem):
        return broken(_LEGACY, str(pickles), truncated=pickles.ends_early, names=pickles.globals)
    magic, protocol, system, state, keys = pickles
    found = Found()
    if magic.value != _MAGIC or protocol.value != _PROTOCOL or type(system.value) is not Mapping:
        found.problems.append(Problem("it does not begin like torch's legacy files"))
    doubts = (doubt for p in pickles if p is not state for doubt in p.doubts)
    found.problems += (Problem(doubt, doubt=True) for doubt in dict.fromkeys(doubts))
    tensors = take(state, room, found)
    stored = _storages(reader, state, keys, found)
    # Whatever byte order the system record states, storages were always written in little-endian order.
    found.tensors = place_tensors(tensors, state.persistent, stored, "little", found.problems)
    del found.problems[MAX_PROBLEMS:]
    found.names.update(*(p.globals for p in pickles))
    return found.structure(_LEGACY)


def _pickles(data: bytes, budget: int) -> list[Pickled] | PickleProblem:
    """Return magic number, protocol version, system, state and the storages' keys, or why they cannot be read."""
    pickles: list[Pickled] = []
    try:
        for _ in range(5):
            pickles.append(read_pickle(data, pickles[-1].end if pickles else 0, budget=budget))
    except PickleProblem as error:
        error.globals = error.globals.union(*(p.globals for p in pickles))
        return error
    return pickles


def _storages(reader: Source, state: Pickled, keys: Pickled, found: Found) -> dict[str, StorageSpan]:
    """Return the storages by their keys."""
    items: dict[str, tuple[int, int]] = {}  # key -> (bytes of one element, total bytes)
    for reference in state.persistent:
        if type(reference.value) is tuple and reference.value[:1] == ("module",):
            continue  # a module's class, with its source
        try:
            storage, dtype = as_storage(reference)
            wrong = (
                None
                if type(reference.value) is tuple and len(reference.value) == _PARTS
                else "it is not described as a storage"
            )
        except TensorProblem as error:
            wrong = str(error)
        if wrong is not None:
            found.problems.append(Problem(f"a storage: {wrong}"))
            continue
        items.setdefault(storage.key, (DTYPES[dtype].size, storage.length))  # the first one creates it
    stored: dict[str, StorageSpan] = {}
    position, size = keys.end, reader.entry.size
    for key in keys.value.items if type(keys.value) is Sequence else []:
        if type(key) is not str or key not in items or key in stored:
            found.problems.append(Problem("the list of storages does not match the pickle"))
            return stored
        element, length = items[key]
        count = int.from_bytes(reader.read(position, 8), "little") if position + 8 <= size else None
        if count is None or (count * element == length and position + 8 + length > size):
            found.problems.append(Problem("the file ends in the middle of its storages"))
            found.truncated = True
            return stored
        if count * element != length:
            found.problems.append(Problem("a storage has another size than in the pickle"))
            return stored
        stored[key] = StorageSpan(len(found.spans) if length else None, length)
        if length:
            found.spans.append(SpanPlace(position + 8, length))
        position += 8 + length
    if position != size:
        found.problems.append(Problem(f"{size - position} bytes follow the last storage"))
    return stored

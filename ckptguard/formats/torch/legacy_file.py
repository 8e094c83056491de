"""What torch.save wrote before its zip format: pickles, then the storages one after another."""

from __future__ import annotations

from ckptguard.formats.dtypes import DTYPES
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import Sequence
from ckptguard.formats.pickle.machine import MAX_STREAM, Pickled, read_pickle
from ckptguard.formats.structure import Problem, SpanPlace, Structure, broken
from ckptguard.formats.torch.rebuild_calls import StorageSpan, TensorProblem, as_storage, place_tensors
from ckptguard.formats.torch.state_tree import walk
from ckptguard.storage.protocol import Reader

NAME = "torch_legacy"
_FIRST_READ = 1 << 20
_MAX_PROBLEMS = 200


def read(reader: Reader, path: str) -> Structure:
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
        return broken(NAME, str(pickles), truncated=pickles.ends_early, names=pickles.globals)
    state, keys = pickles[3:]
    problems: list[Problem] = []
    spans, stored, truncated = _storages(reader, state, keys, problems)
    found = walk(state.value)
    problems += found.problems
    # Whatever byte order the system record states: storages were always written in little-endian order.
    tensors = place_tensors(found.tensors, stored, "little", problems)
    return Structure(
        format=NAME,
        spans=tuple(spans),
        tensors=tuple(tensors),
        problems=tuple(problems[:_MAX_PROBLEMS]),
        truncated=truncated,
        globals=tuple(sorted(frozenset().union(*(p.globals for p in pickles)))),
        leaves=found.leaves,
        containers=found.containers,
        unread=found.unread,
    )


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


def _storages(
    reader: Reader, state: Pickled, keys: Pickled, problems: list[Problem]
) -> tuple[list[SpanPlace], dict[str, StorageSpan], bool]:
    """Spans, storages by key, and whether the file ends too early."""
    items = {}  # key -> (bytes of one element, bytes in all)
    for reference in state.persistent:
        if type(reference.value) is tuple and reference.value[:1] == ("module",):
            continue  # a module's class, with its source
        try:
            storage, dtype = as_storage(reference)
        except TensorProblem as error:
            problems.append(Problem(message=f"a storage: {error}"))
            continue
        items[storage.key] = (DTYPES[dtype].size, storage.length)
    spans: list[SpanPlace] = []
    stored: dict[str, StorageSpan] = {}
    position, size = keys.end, reader.entry.size
    for key in keys.value.items if type(keys.value) is Sequence else []:
        if type(key) is not str or key not in items or key in stored:
            problems.append(Problem(message="the list of storages does not fit the pickle"))
            return spans, stored, False
        element, length = items[key]
        count = int.from_bytes(reader.read(position, 8), "little") if position + 8 <= size else None
        if count is None or (count * element == length and position + 8 + length > size):
            problems.append(Problem(message="the file ends in the middle of its storages"))
            return spans, stored, True
        if count * element != length:
            problems.append(Problem(message="a storage has another size than the pickle says"))
            return spans, stored, False
        stored[key] = StorageSpan(len(spans) if length else None, length)
        if length:
            spans.append(SpanPlace(position + 8, length))
        position += 8 + length
    if position != size:
        problems.append(Problem(message=f"{size - position} bytes follow the last storage"))
    return spans, stored, False

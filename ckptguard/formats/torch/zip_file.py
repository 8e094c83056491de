"""What torch.save writes: a zip archive of one pickle and the storages that it refers to."""

from __future__ import annotations

from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import BUDGET, MAX_STREAM, read_pickle
from ckptguard.formats.structure import Problem, Source, SpanPlace, Structure, broken, shortened
from ckptguard.formats.torch.rebuild_calls import StorageSpan, place_tensors
from ckptguard.formats.torch.state_tree import MAX_NODES, NOTHING, TreeContents, walk
from ckptguard.formats.zip.archive import Archive, Record, read_archive, wrong_sum
from ckptguard.storage.protocol import Reader

NAME = "torch_zip"
_DATA = "data/"
_MAX_PROBLEMS = 200
_ROOM_EACH = 1700
_MOST_ROOM = 500_000


class ReadingBudget:
    """What reading pickles may still cost, over all archives that are read with it; `each` more for each storage that
    is really there, because tensors of their own storages take about as much."""

    def __init__(self, budget: int = BUDGET, each: int = 0) -> None:
        self.budget = budget
        self.each = each
        self.nodes = MAX_NODES


def read(reader: Reader, path: str) -> Structure:
    """The structure of a torch archive; each storage is a span, with the CRC-32 that the archive states."""
    return read_within(reader, ReadingBudget(each=_ROOM_EACH))


def read_within(reader: Source, room: ReadingBudget) -> Structure:
    """Like `read`, for one of many archives."""
    archive = read_archive(reader)
    if "constants.pkl" in archive.records:  # torch.save writes no such record
        _, names = _read_state(reader, archive, room, [])
        return broken(NAME, "a TorchScript archive is not supported", names=names)
    problems = list(archive.problems)
    spans: list[SpanPlace] = []
    stored: dict[str, StorageSpan] = {}
    others: list[Record] = []
    for name, record in archive.records.items():  # in the order of the file
        is_storage = name.startswith(_DATA)
        if is_storage:
            stored[name.removeprefix(_DATA)] = StorageSpan(len(spans) if record.size else None, record.size)
        if is_storage and record.size:
            spans.append(SpanPlace(record.offset, record.size, record.crc32))
        else:
            others.append(record)
    room.budget += room.each * min(len(spans), _MOST_ROOM)
    # Records beside the storages are checked here; the storages' bytes are checked as they are scanned.
    problems += [problem for record in others for problem in wrong_sum(reader, record, record.name)]
    byte_order = _byte_order(reader, archive, problems)
    found, names = _read_state(reader, archive, room, problems)
    tensors = place_tensors(found.tensors, stored, byte_order, problems)
    return Structure(
        format=NAME,
        spans=tuple(spans),
        tensors=tuple(tensors),
        problems=shortened(problems, _MAX_PROBLEMS),
        truncated=archive.truncated,
        globals=tuple(sorted(names)),
        leaves=found.leaves,
        containers=found.containers,
        unread=found.unread,
    )


def _read_state(
    reader: Source, archive: Archive, room: ReadingBudget, problems: list[Problem]
) -> tuple[TreeContents, frozenset[str]]:
    record = archive.records.get("data.pkl")
    if record is None:
        if archive.records or not archive.problems:
            problems.append(Problem(message="the archive holds no data.pkl: it is no torch archive"))
        return NOTHING, frozenset()
    if record.size > MAX_STREAM:
        problems.append(Problem(message=f"data.pkl has {record.size} bytes, which is more than we would read"))
        return NOTHING, frozenset()
    data = reader.read(record.offset, record.size)
    try:
        pickled = read_pickle(data, budget=room.budget)
    except PickleProblem as error:
        problems.append(Problem(message=f"data.pkl cannot be read: {error}"))
        return NOTHING, error.globals
    if pickled.end != len(data):
        problems.append(Problem(message=f"{len(data) - pickled.end} bytes follow the pickle in data.pkl"))
    found = walk(pickled.value, room.nodes)
    room.budget -= pickled.cost
    room.nodes -= found.visited
    problems += found.problems
    return found, pickled.globals


def _byte_order(reader: Source, archive: Archive, problems: list[Problem]) -> str:
    record = archive.records.get("byteorder")
    if record is None:
        return "little"
    stated = reader.read(record.offset, min(record.size, 16))
    if stated not in (b"little", b"big"):
        problems.append(Problem(message="the byte order that the archive states is neither little nor big"))
        return "little"
    return stated.decode()

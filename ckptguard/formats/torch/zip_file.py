"""What torch.save writes: a zip archive of one pickle and the storages that it refers to."""

from __future__ import annotations

from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import BUDGET, MAX_STREAM, read_pickle
from ckptguard.formats.structure import Problem, SpanPlace, Structure
from ckptguard.formats.torch.state_tree import MAX_NODES, NOTHING, TreeContents, walk
from ckptguard.formats.torch.tensor_places import StorageSpan, place_tensors
from ckptguard.formats.zip.archive import Archive, Record, read_archive
from ckptguard.formats.zip.crc import crc32_of
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


def read_within(reader: Reader, room: ReadingBudget) -> Structure:
    """Like `read`, for one of many archives."""
    archive = read_archive(reader)
    if "constants.pkl" in archive.records:  # torch.save writes no such record
        _, names = _read_state(reader, archive, room, [])
        message = "a TorchScript archive is not supported"
        return Structure(format=NAME, problems=(Problem(message=message),), globals=names)
    problems = list(archive.problems)
    spans: list[SpanPlace] = []
    stored: dict[str, StorageSpan] = {}
    others: list[Record] = []
    for name, record in archive.records.items():  # in the order of the file
        if not name.startswith(_DATA):
            others.append(record)
        elif record.size:
            stored[name[len(_DATA) :]] = StorageSpan(len(spans), record.size)
            spans.append(SpanPlace(record.offset, record.size, record.crc32))
        else:
            stored[name[len(_DATA) :]] = StorageSpan(None, 0)
            others.append(record)
    room.budget += room.each * min(len(spans), _MOST_ROOM)
    problems += _wrong_sums(reader, others)
    byte_order = _byte_order(reader, archive, problems)
    found, names = _read_state(reader, archive, room, problems)
    tensors = place_tensors(found.tensors, stored, byte_order, problems)
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [Problem(message=f"and {len(problems) - _MAX_PROBLEMS} more problems")]
    return Structure(
        format=NAME,
        spans=tuple(spans),
        tensors=tuple(tensors),
        problems=tuple(problems),
        truncated=archive.truncated,
        globals=names,
        leaves=found.leaves,
        containers=found.containers,
        unread=found.unread,
    )


def _read_state(
    reader: Reader, archive: Archive, room: ReadingBudget, problems: list[Problem]
) -> tuple[TreeContents, tuple[str, ...]]:
    record = archive.records.get("data.pkl")
    if record is None:
        if archive.records or not archive.problems:
            problems.append(Problem(message="the archive holds no data.pkl: it is no torch archive"))
        return NOTHING, ()
    if record.size > MAX_STREAM:
        problems.append(Problem(message=f"data.pkl has {record.size} bytes, which is more than we would read"))
        return NOTHING, ()
    data = reader.read(record.offset, record.size)
    try:
        pickled = read_pickle(data, budget=room.budget)
    except PickleProblem as error:
        problems.append(Problem(message=f"data.pkl cannot be read: {error}"))
        return NOTHING, tuple(sorted(error.globals))
    if pickled.end != len(data):
        problems.append(Problem(message=f"{len(data) - pickled.end} bytes follow the pickle in data.pkl"))
    found = walk(pickled.value, room.nodes)
    room.budget -= pickled.cost
    room.nodes -= found.visited
    problems += found.problems
    return found, tuple(sorted(pickled.globals))


def _wrong_sums(reader: Reader, others: list[Record]) -> list[Problem]:
    """Records beside the storages are checked here; the storages' bytes are checked as they are scanned."""
    return [_wrong_sum(r, found) for r in others if (found := crc32_of(reader, r.offset, r.size)) != r.crc32]


def _wrong_sum(record: Record, found: int) -> Problem:
    return Problem(
        message=f"record {record.name!r} has a wrong CRC-32", expected=f"{record.crc32:08x}", found=f"{found:08x}"
    )


def _byte_order(reader: Reader, archive: Archive, problems: list[Problem]) -> str:
    record = archive.records.get("byteorder")
    if record is None:
        return "little"
    stated = reader.read(record.offset, min(record.size, 16))
    if stated not in (b"little", b"big"):
        problems.append(Problem(message="the byte order that the archive states is neither little nor big"))
        return "little"
    return stated.decode()

"""Archives that are read by what they have in common with one before: the same answer as when read in full."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator

import pytest
import torch
from support.format_files import torch_bytes
from support.memory_reader import MemoryReader

from ckptguard.formats.dcp.distcp import IdenticalHeaders, Subranges
from ckptguard.formats.pickle.machine import BUDGET
from ckptguard.formats.structure import Structure
from ckptguard.formats.torch.files import ReadingBudget, read_zip_within


def plain_archive(value: object) -> bytes:
    """The same records as Python's zipfile writes them: sums in the local headers, no descriptors."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_bytes(value))) as source, zipfile.ZipFile(stream, "w") as copy:
        for info in source.infolist():
            copy.writestr(zipfile.ZipInfo(info.filename), source.read(info))
    return stream.getvalue()


def read_alike(first: bytes, others: list[bytes], room: ReadingBudget) -> list[Structure]:
    """The others, each read after the first."""
    alike = IdenticalHeaders(room)
    whole = b"".join((first, *others))
    windows = Subranges(MemoryReader("__0_0.distcp", whole))
    found, position = [], 0
    for raw in (first, *others):
        found.append(alike.read(windows.window(position, len(raw))))
        position += len(raw)
    return found[1:]


def read_in_full(raw: bytes) -> Structure:
    """One by itself."""
    return read_zip_within(MemoryReader("x.pt", raw), ReadingBudget(BUDGET * 10))


def damaged(raw: bytes) -> Iterator[bytes]:
    """Each byte changed, a little and in all its bits."""
    for place in range(len(raw)):
        for bits in (0x01, 0xFF):
            yield raw[:place] + bytes([raw[place] ^ bits]) + raw[place + 1 :]


VALUES = {
    "a tensor": (torch.arange(8.0), torch.arange(8.0) + 100),
    "several storages": ([torch.arange(8.0), torch.ones(3)], [torch.zeros(8), torch.full((3,), 7.0)]),
    "no storage": ({"lr": 0.5}, {"lr": 0.5}),
    "shared and strided": ([torch.ones(4, 4).t(), torch.zeros(0)], [torch.zeros(4, 4).t(), torch.zeros(0)]),
}


@pytest.mark.parametrize("write", [torch_bytes, plain_archive])
@pytest.mark.parametrize("what", VALUES)
def test_reads_what_differs_only_in_elements(write, what):
    """The second archive is read as if it were alone, and takes as much of the room."""
    first, second = (write(value) for value in VALUES[what])
    room, alone = ReadingBudget(), ReadingBudget()
    (found,) = read_alike(first, [second], room)
    assert found == read_in_full(second)
    assert not found.problems
    for raw in (first, second):
        read_zip_within(MemoryReader("x.pt", raw), alone)
    assert (room.budget, room.nodes) == (alone.budget, alone.nodes)


@pytest.mark.parametrize("write", [torch_bytes, plain_archive])
def test_sees_every_damage(write):
    """Whatever byte changes, the answer is that of a full reading."""
    first, second = (write(value) for value in VALUES["a tensor"])
    cases = list(damaged(second))
    room = ReadingBudget(BUDGET * 10)
    for raw, found in zip(cases, read_alike(first, cases, room), strict=True):
        assert found == read_in_full(raw)


def test_reads_no_more_than_the_room_allows():
    """Being alike saves time, not room."""
    raw = torch_bytes(torch.arange(8.0))
    alone = ReadingBudget()
    read_zip_within(MemoryReader("x.pt", raw), alone)
    cost = BUDGET - alone.budget
    found = read_alike(raw, [raw] * 4, ReadingBudget(3 * cost + cost // 2))
    assert [bool(s.not_understood) for s in found] == [False, False, True, True]
    assert "more values than ckptguard reads" in found[-1].not_understood[0]
    assert [s.problems for s in found] == [()] * 4


def test_other_shapes_are_others():
    """Archives of one length, of tensors that only their pickles tell apart."""
    tensors = [torch.zeros(shape) for shape in ((4, 8), (8, 4), (32,), (2, 16), (4, 8))]
    archives = [torch_bytes(t) for t in tensors]
    found = read_alike(archives[0], archives[1:], ReadingBudget())
    assert [s.tensors[0].shape for s in found] == [tuple(t.shape) for t in tensors[1:]]

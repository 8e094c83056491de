"""A ``.metadata`` in which the same bytes come again and again: read by heart, and with the same answer."""

from __future__ import annotations

import pickle
import pickletools
import struct

import pytest
import torch
from support.memory_reader import MemoryReader
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptguard.formats.dcp import metadata as dcp_metadata
from ckptguard.formats.dcp import metadata_pickle as dcp_pickle
from ckptguard.formats.dcp import switch
from ckptguard.formats.structure import Structure


def entry(shape: tuple[int, ...], pieces: int = 1) -> metadata.TensorStorageMetadata:
    """A tensor, cut along its first dimension."""
    rows = shape[0] // pieces
    chunks = [
        metadata.ChunkStorageMetadata(
            offsets=torch.Size((n * rows, *(0 for _ in shape[1:]))), sizes=torch.Size((rows, *shape[1:]))
        )
        for n in range(pieces)
    ]
    return metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)


def pickled(entries: dict[str, metadata.TensorStorageMetadata], *, shared: bool = False, protocol: int = 4) -> bytes:
    """As DCP writes it; `shared`: the index of a piece holds the very object that its description holds."""
    stored = {}
    for name, described in entries.items():
        for chunk in described.chunks:
            offset = chunk.offsets if shared else torch.Size(tuple(chunk.offsets))
            index = metadata.MetadataIndex(name, offset, 0)
            stored[index] = _StorageInfo("__0_0.distcp", len(stored) * 1000, 1000)
    return pickle.dumps(metadata.Metadata(entries, {}, stored), protocol=protocol)


def read(data: bytes) -> Structure:
    """The structure."""
    return dcp_metadata.read(MemoryReader(".metadata", data), ".metadata")


def read_without(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Structure:
    """The structure, with nothing read by heart."""
    with monkeypatch.context() as patch:
        patch.setattr(switch, "BY_HEART", False)
        return read(data)


@pytest.fixture
def hits(monkeypatch):
    """How often something was read by heart, as a list of positions."""
    found: list[int] = []
    repeat = dcp_pickle._FoldingMachine.repeat

    def noted(self, known, end):
        done = repeat(self, known, end)
        found.extend([end] if done else [])
        return done

    monkeypatch.setattr(dcp_pickle._FoldingMachine, "repeat", noted)
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_the_same(shared, protocol, monkeypatch, hits):
    """Tensors of some shapes, whole and in pieces, many of each."""
    shapes = [(4,), (4, 8), (8, 4), (300, 2), (70_000, 1), (6, 2, 2)]
    entries = {f"layers.{n}.w": entry(shapes[n % 6], pieces=1 + n % 2) for n in range(600)}
    data = pickled(entries, shared=shared, protocol=protocol)
    found = read(data)
    assert not found.problems
    assert {t.name: t.shape for t in found.tensors} == {name: tuple(e.size) for name, e in entries.items()}
    assert sum(map(len, found.chunks.values())) == 900
    assert (len(hits) > 400) == (protocol >= 4)
    assert found == read_without(data, monkeypatch)


def test_sees_every_damage(monkeypatch, hits):
    """Whatever byte changes, the answer is that of a reading without repetitions."""
    data = pickled({f"w{n:02}": entry((4, 8), pieces=2) for n in range(14)})
    assert not read(data).problems
    first, after = data.index(b"w09"), data.index(b"storage_data")
    assert [end for end in hits if first < end < after]
    for place in (*range(2, 40), *range(first, after), *range(after, after + 100)):
        changed = data[:place] + bytes([data[place] ^ (0x01 if place % 2 else 0x10)]) + data[place + 1 :]
        assert read(changed) == read_without(changed, monkeypatch), place


def test_frames_end_anywhere(monkeypatch, hits):
    """Python's reader accepts frames that end between any two opcodes, also within what is repeated."""
    names = [f"w{n:02}" for n in range(16)]
    data = pickled({name: entry((4, 8)) for name in names})
    body = data[11:]
    first, after = data.index(b"w12"), data.index(b"w14")
    ends = [position for _, _, position in pickletools.genops(data) if first < position < after]
    whole = read(data)
    assert [end for end in hits if first < end < after]
    for end in ends:
        first, rest = body[: end - 11], body[end - 11 :]
        again = b"\x80\x04" + b"".join(b"\x95" + struct.pack("<Q", len(part)) + part for part in (first, rest))
        alone = b"\x80\x04\x95" + struct.pack("<Q", len(first)) + first + rest
        for framed in (again, alone):
            assert pickle.loads(framed).state_dict_metadata.keys() == set(names)
            assert read(framed) == whole
            assert read_without(framed, monkeypatch) == whole


class _Assembly:
    """A pickle put together by hand; `memo` knows what was noted under which number."""

    def __init__(self) -> None:
        self.body = b""
        self.memo: dict[str, int] = {}
        self.count = 0
        for module, name in (
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch", "Size"),
            ("torch", "float32"),
        ):
            self.body += _text(module) + _text(name) + b"\x93"
            self.note(name)
            self.body += b"0"
        for key in ("properties", "size", "chunks", "offsets", "sizes"):
            self.body += _text(key)
            self.note(key)
            self.body += b"0"

    def note(self, what: str) -> None:
        self.body += b"\x94"
        self.memo[what] = self.count
        self.count += 1

    def get(self, what: str) -> bytes:
        return b"h" + bytes([self.memo[what]])

    def size(self, *numbers: int) -> bytes:
        inner = b"(" + b"".join(b"K" + bytes([n]) for n in numbers) + b"t"
        return self.get("Size") + inner + b"\x85R"

    def piece(self, first: int, rows: int) -> bytes:
        offsets, sizes = self.get("offsets") + self.size(first, 0), self.get("sizes") + self.size(rows, 8)
        return self.get("ChunkStorageMetadata") + b")\x81}(" + offsets + sizes + b"ub"

    def described(self, chunks: bytes) -> bytes:
        properties = self.get("TensorProperties") + b")\x81(" + self.get("float32") + b"tb"
        fields = self.get("properties") + properties + self.get("size") + self.size(4, 8)
        return self.get("TensorStorageMetadata") + b")\x81}(" + fields + self.get("chunks") + chunks + b"ub"

    def entry(self, name: str, value: bytes) -> None:
        self.body += _text(name)
        self.note(name)
        self.body += value

    def pickled(self) -> bytes:
        body = self.body + b"."
        return b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def values(assembly: _Assembly) -> object:
    """What stands at the end."""
    return dcp_pickle.read_metadata_pickle(assembly.pickled()).value.flat  # type: ignore[attr-defined]


def test_what_may_change_is_no_repetition(hits, monkeypatch):
    """Two descriptions of the same bytes fetch one list, which grows between them."""
    made = []
    for most in (dcp_pickle.MOST, 0):
        monkeypatch.setattr(dcp_pickle, "MOST", most)
        a = _Assembly()
        a.body += b"]"
        a.note("list")
        a.body += a.piece(0, 2) + b"a0}("
        a.entry("w0", a.described(a.get("list")))
        a.entry("w1", a.described(a.get("list")))
        a.body += a.get("list") + a.piece(2, 2) + b"a0"
        a.entry("w2", a.described(a.get("list")))
        a.body += b"u"
        made.append(values(a))
    assert made[0] == made[1]
    assert [len(e.pieces) for e in made[0][1::2]] == [1, 1, 2]
    assert not hits


def test_what_reaches_below_is_no_repetition(hits, monkeypatch):
    """Bytes that take away what stands on the stack before them, and put it there anew."""
    made = []
    for most in (dcp_pickle.MOST, 0):
        monkeypatch.setattr(dcp_pickle, "MOST", most)
        a = _Assembly()
        a.body += b"}("
        for n in range(4):
            a.entry(f"w{n}", b"0" + a.get("size") + a.described(b"]" + a.piece(0, 4) + b"a"))
        a.body += b"u"
        made.append(values(a))
    assert made[0] == made[1]
    assert made[0][::2] == ["size"] * 4
    assert not hits


def test_plain_repetitions_are_found(hits):
    """The same hand-made description without a trap is read by heart from the second time on."""
    a = _Assembly()
    a.body += b"}("
    for n in range(4):
        a.entry(f"w{n}", a.described(b"]" + a.piece(0, 4) + b"a"))
    a.body += b"u"
    found = values(a)
    assert [e.size for e in found[1::2]] == [(4, 8)] * 4
    assert len(hits) == 3


def test_references_without_end_are_refused():
    """Bytes that could all be references take neither time nor memory."""
    for data in (b"\x80\x04" + b"j" * (30 << 20), b"\x80\x04" + b"j\x00\x00\x00\x01" * (5 << 20)):
        assert read(data).problems or read(data).not_understood

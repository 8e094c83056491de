"""Files without some entries: pickles that Python loads, and archives that torch reads, with the same values."""

import collections
import io
import pickle
import random
import zipfile

import pytest
import torch
from support.memory_reader import MemoryReader

from ckptguard.formats.pickle.cut import CutPickle
from ckptguard.formats.structure import ReadProblem
from ckptguard.formats.without_entries import archive_without
from ckptguard.formats.zip.archive import read_archive
from ckptguard.formats.zip.directory import find_tail, read_directory
from ckptguard.formats.zip.fewer_records import with_records
from ckptguard.storage.local.local_storage import LocalStorage


class Thing:
    """An object with a state of its own."""

    def __init__(self, x):
        self.x = x


KINDS = ["plain", "plain", "list", "dict", "tuple", "ordered", "thing", "again", "complex"]
PLAIN = ["a", "b", b"xx", 1, 2.5, None, True, 10**30, "é" * 300]


def state_of(chance):
    """A dict of random values, in which some are used again and again."""
    shared = []

    def make(depth):
        kind = chance.choice(KINDS) if depth else "plain"
        if kind == "plain" or (kind == "again" and not shared):
            return chance.choice(PLAIN)
        if kind == "again":
            return chance.choice(shared)
        if kind == "list":
            value = [make(depth - 1) for _ in range(chance.randrange(4))]
        elif kind == "dict":
            value = {chance.choice("abcdefg"): make(depth - 1) for _ in range(chance.randrange(4))}
        elif kind == "tuple":
            value = tuple(make(depth - 1) for _ in range(chance.randrange(5)))
        elif kind == "ordered":
            value = collections.OrderedDict((str(n), make(depth - 1)) for n in range(chance.randrange(3)))
        else:
            value = Thing(make(depth - 1)) if kind == "thing" else complex(1, 2)
        if chance.random() < 0.5:
            shared.append(value)
        return value

    state = {f"k{n}": make(4) for n in range(chance.randrange(1, 7))}
    if chance.random() < 0.3:
        state["k0"] = ["k0", shared]
        shared.append(shared)
    return collections.OrderedDict(state) if chance.random() < 0.3 else state


def shape_of(value):
    """The values in order, and where each one is met again."""
    met, found = {}, []

    def go(part):
        if not isinstance(part, list | dict | tuple | Thing) or (isinstance(part, tuple) and not part):
            found.append(repr(part))
        elif id(part) in met:
            found.append(met[id(part)])
        else:
            met[id(part)] = len(met)
            found.append(type(part).__name__)
            inside = [part.x] if isinstance(part, Thing) else part
            for inner in [x for pair in part.items() for x in pair] if isinstance(part, dict) else inside:
                go(inner)

    go(value)
    return found


@pytest.mark.parametrize("protocol", range(1, 6))
@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler], ids=["c", "python"])
def test_python_loads_the_same_values_without_the_entries(protocol, pickler):
    """Any values, shared ones too, also those that only an entry that goes has written out."""
    for seed in range(150):
        chance = random.Random(seed)
        state, file = state_of(chance), io.BytesIO()
        pickler(file, protocol).dump(state)
        raw, goes = file.getvalue(), {key for key in state if chance.random() < 0.5}
        cut = CutPickle(raw)
        entries = cut.entries()
        assert [cut.text(entry.key) for entry in entries] == list(state)
        new = cut.edited({entry.key: (entry.next, b"") for entry in entries if cut.text(entry.key) in goes})
        whole = pickle.loads(raw)
        for key in goes:
            del whole[key]
        for load in (pickle.loads, lambda data: pickle._Unpickler(io.BytesIO(data)).load()):
            assert shape_of(load(new)) == shape_of(whole), seed
        assert shape_of(pickle.loads(cut.edited({}))) == shape_of(pickle.loads(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80\x02}q\x00.",
        b"\x80\x02}(X\x01\x00\x00\x00aK\x01u",
        b"\x80\x02}(X\xff\x00\x00\x00aK\x01u.",
        b"\x80\x02h\x05.",
        b"\x80\x02}2.",
        b"\x80\x02u.",
        b"\x80\x02(((.",
        b"\x80\x02]q\x00h\x00K\x01a.",
        b"\x80\x02]q\x00]q\x00\x86.",
        b"\xff\xff",
        b"ccollections\nOrdered",
    ],
)
def test_what_no_pickler_writes_is_refused_or_holds_nothing(raw):
    """Cut short, broken, or with opcodes that change what was finished: never another error."""
    try:
        cut = CutPickle(raw)
    except ReadProblem:
        return
    assert cut.entries() == []


def test_bytes_at_random_never_end_in_another_error():
    """Any byte of a real pickle may be another one."""
    chance, raw = random.Random(5), pickle.dumps(state_of(random.Random(3)), 2)
    for _ in range(3000):
        data = bytearray(raw)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            cut = CutPickle(bytes(data))
            assert all(isinstance(cut.text(entry.key), str | None) for entry in cut.entries())
            cut.edited({entry.key: (entry.next, b"") for entry in cut.entries()[::2]})
        except ReadProblem:
            pass


def without(raw, key):
    """The pickle of a dict without one entry."""
    cut = CutPickle(raw)
    return cut.edited({entry.key: (entry.next, b"") for entry in cut.entries() if cut.text(entry.key) == key})


def test_a_circle_through_what_goes_is_refused():
    """Made twice, a tuple that is in its own list would be two tuples."""
    circle = []
    circle.append((circle, 1))
    with pytest.raises(ReadProblem, match="circle"):
        without(pickle.dumps({"goes": circle, "stays": circle[0]}, 2), "goes")


def test_values_that_begin_together_take_no_longer_than_others():
    """Tuples in tuples, each recalled: a search among all of them for each would take minutes."""
    count = 30_000
    nested = b"]" + b"".join(b"\x85r" + number.to_bytes(4, "little") for number in range(count))
    recalled = b"(" + b"".join(b"j" + number.to_bytes(4, "little") for number in range(count)) + b"t"
    raw = b"\x80\x02}(X\x01\0\0\0a" + nested + b"X\x01\0\0\0b" + recalled + b"u."
    assert len(pickle.loads(without(raw, "a"))["b"]) == count


def test_a_key_that_is_no_text_is_not_found():
    """Python 2 wrote bytes as texts."""
    cut = CutPickle(b"\x80\x02}(U\x01\xffK\x01U\x01aK\x02u.")
    assert [cut.text(entry.key) for entry in cut.entries()] == [None, "a"]


@pytest.mark.parametrize("limit", ["MOST", "_LARGEST_ALIGNMENT"])
def test_what_is_too_large_is_refused_before_it_is_read(limit, monkeypatch):
    """A pickle may hold the bytes of a replay buffer, and torch can align data to any number."""
    monkeypatch.setattr(f"ckptguard.formats.without_entries.{limit}", 20)
    monkeypatch.setattr("ckptguard.formats.without_entries._ALIGNMENT", 64)
    reader = MemoryReader("x.pt", archive({"optimizer": {"m": torch.ones(5)}, "model": torch.ones(6)}))
    with pytest.raises(ReadProblem, match="bytes"):
        archive_without(reader, [("optimizer",)])


def archive(state):
    """The bytes of torch's archive."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def assembled(reader, parts):
    """The bytes of some parts."""
    return b"".join(part if isinstance(part, bytes) else reader.read(*part) for part in parts)


def test_torch_would_have_written_the_same_archive():
    """Without the entry torch writes the same records with the same bytes, at the same places but for names."""
    weight, moment = torch.randn(33, 7), torch.randn(1000)
    whole, left = {"optimizer": {"m": moment}, "model": {"w": weight}}, {"model": {"w": weight}}
    reader = MemoryReader("x.pt", archive(whole))
    new = assembled(reader, archive_without(reader, [("optimizer",)]))
    own, other = zipfile.ZipFile(io.BytesIO(new)), zipfile.ZipFile(io.BytesIO(archive(left)))
    assert own.testzip() is None
    assert len(own.namelist()) == len(other.namelist())
    assert read_archive(MemoryReader("x.pt", new)).problems == ()
    for name in ("version", "byteorder"):
        assert own.read(f"archive/{name}") == other.read(f"archive/{name}")
    loaded = torch.load(io.BytesIO(new), weights_only=True)
    assert list(loaded) == ["model"]
    assert torch.equal(loaded["model"]["w"], weight)
    [stored] = [info for info in own.infolist() if "/data/" in info.filename]
    assert (stored.header_offset + 30 + len(stored.filename) + len(stored.extra)) % 64 == 0 or stored.extra == b""


def test_a_storage_that_something_else_uses_stays():
    """Tied to a moment, or a view of it: only what nothing else needs goes."""
    shared, own = torch.randn(100), torch.randn(100)
    raw = archive({"optimizer": {"m": shared, "n": own}, "model": {"w": shared[10:20]}, "same": [shared]})
    reader = MemoryReader("x.pt", raw)
    loaded = torch.load(io.BytesIO(assembled(reader, archive_without(reader, [("optimizer",)]))), weights_only=True)
    assert torch.equal(loaded["same"][0], shared)
    assert loaded["model"]["w"].data_ptr() == loaded["same"][0].data_ptr() + 40


def test_an_entry_inside_another_goes():
    """A wrapper around model and optimizer stays."""
    raw = archive({"app": {"optim": {"m": torch.ones(5)}, "model": {"w": torch.ones(6)}}, "step": 3})
    reader = MemoryReader("x.pt", raw)
    new = assembled(reader, archive_without(reader, [("app", "optim")]))
    assert repr(torch.load(io.BytesIO(new))) == repr({"app": {"model": {"w": torch.ones(6)}}, "step": 3})
    reader = MemoryReader("x.pt", archive({"app": {"optim": {"m": torch.ones(5)}, "w": 5}}))  # one entry alone
    new = assembled(reader, archive_without(reader, [("app", "optim")]))
    assert torch.load(io.BytesIO(new)) == {"app": {"w": 5}}


@pytest.mark.parametrize("place", [("nothing",), ("model", "w"), ("step", "x")])
def test_what_is_not_there_is_refused(place):
    """No entry of that name, or one of a tensor or a number."""
    reader = MemoryReader("x.pt", archive({"model": torch.ones(6), "step": 3}))
    with pytest.raises(ReadProblem, match="no entry"):
        archive_without(reader, [place])


def test_records_beyond_four_gigabytes_are_found(tmp_path):
    """Large ones, and small ones behind them, in a file with holes: every reader finds each at its place."""
    small = MemoryReader("x.pt", archive({f"k{n}": torch.ones(5) for n in range(4)}))
    entries = read_directory(small, find_tail(small), [], "torch")
    large = [
        e._replace(size=5 << 30, packed=5 << 30) if e.name.endswith(("/data/0", "/data/2")) else e for e in entries
    ]
    offsets = {f"archive/{name}": record.offset for name, record in read_archive(small).records.items()}
    names, places, path = {offset: name for name, offset in offsets.items()}, {}, tmp_path / "large.pt"
    with open(path, "wb") as file:
        for part in with_records(small, large, offsets, {}, 64):
            if isinstance(part, bytes):
                file.write(part)
            else:
                places[names[part[0]]] = file.tell()
                if part[1] < 1 << 30:
                    file.write(small.read(*part))
                else:
                    file.seek(part[1], 1)
    with LocalStorage(str(tmp_path)).open("large.pt") as reader:
        found = read_archive(reader)
    assert found.problems == ()
    assert {f"archive/{name}": record.offset for name, record in found.records.items()} == places
    assert [info.file_size for info in zipfile.ZipFile(path).infolist()] == [e.size for e in large]
    torchs = torch._C.PyTorchFileReader(str(path))
    for name, place in places.items():
        assert torchs.get_record_offset(name.removeprefix("archive/")) == place
        assert place % 64 == 0

"""Malformed archives, headers and indexes: each is a problem, none an exception."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.format_files import (
    pickled,
    repacked,
    safetensors_bytes,
    some_tensors,
    structure_of,
    torch_archive,
    torch_bytes,
)
from support.memory_reader import MemoryReader

from ckptguard.formats import read_structure

VALID = torch_bytes({"w": torch.arange(8.0), "b": torch.ones(2)})


def zipped(*records: tuple[zipfile.ZipInfo | str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these records, in this order."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about duplicate names, which are meant
        for name, data in records:
            archive.writestr(name, data, compression)
    return target.getvalue()


def entry_at(data: bytes, name: bytes) -> int:
    """Where the directory's entry of a record begins."""
    position = data.find(b"PK\x01\x02")
    while data[position + 46 : position + 46 + len(name)] != name:
        position = data.index(b"PK\x01\x02", position + 4)
    return position


def patched(data: bytes, offset: int, form: str, value: int) -> bytes:
    """The bytes with one number replaced."""
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, value)
    return bytes(changed)


def link_info(name: str) -> zipfile.ZipInfo:
    """A record that is a symbolic link."""
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, 0o120777 << 16
    return info


PKL = pickled({"a": 1})
ROOT = VALID[30 : VALID.index(b"/")]
DATA0 = entry_at(VALID, ROOT + b"/data/0")
END = VALID.rindex(b"PK\x05\x06")
ARCHIVES = {
    "junk before": b"#!/bin/sh\n" + VALID,
    "zeros behind": VALID + bytes(64),
    "archive behind": VALID + VALID,
    "comment": VALID[:-2] + b"\x05\x00hello",
    "duplicate": zipped(("r/data.pkl", PKL), ("r/data.pkl", PKL)),
    "case twin": zipped(("r/data.pkl", PKL), ("r/DATA.PKL", PKL)),
    "two roots": zipped(("r/data.pkl", PKL), ("s/version", b"3")),
    "traversal": zipped(("r/data.pkl", PKL), ("r/../../evil", b"x")),
    "absolute": zipped(("/data.pkl", PKL)),
    "newline": zipped(("r/data.pkl", PKL), ("r/a\nb", b"x")),
    "link": zipped(("r/data.pkl", PKL), (link_info("r/link"), b"/etc/passwd")),
    "folder": zipped(("r/data.pkl", PKL), ("r/sub/", b"")),
    "deflated": zipped(("r/data.pkl", PKL), compression=zipfile.ZIP_DEFLATED),
    "no data.pkl": zipped(("r/version", b"3")),
    "bomb": zipped(("r/data.pkl", bytes(1 << 22)), compression=zipfile.ZIP_DEFLATED),
    "overlapping": patched(VALID, DATA0 + 42, "<I", 0),
    "offset out of bounds": patched(VALID, DATA0 + 42, "<I", 2**31),
    "size out of bounds": patched(patched(VALID, DATA0 + 20, "<I", 2**31), DATA0 + 24, "<I", 2**31),
    "sizes differ": patched(VALID, DATA0 + 24, "<I", 31),
    "encrypted": patched(VALID, DATA0 + 8, "<H", 0x809),
    "zip64 without extra": patched(VALID, DATA0 + 24, "<I", 0xFFFFFFFF),
    "wrong number of entries": patched(patched(VALID, END + 8, "<H", 3), END + 10, "<H", 3),
    "directory elsewhere": patched(VALID, END + 16, "<I", 10),
    "directory too large": patched(VALID, END + 12, "<I", 2**31),
    "locator elsewhere": patched(VALID, END - 12, "<Q", 5),
    "zip64 entries": patched(VALID, END - 20 - 56 + 24, "<Q", 2**60),
    "local name": patched(VALID, VALID.index(b"data/0"), "<B", ord("D")),
    "local flags": patched(VALID, VALID.index(b"PK\x03\x04", 1) + 6, "<H", 0),
    "descriptor": patched(VALID, VALID.index(b"PK\x07\x08") + 4, "<I", 1),
    "crc of data.pkl": patched(VALID, entry_at(VALID, ROOT + b"/data.pkl") + 16, "<I", 1),
    "byte order": repacked(VALID, byteorder=b"middle"),
    "missing storage": zipped(*[(n, zipfile.ZipFile(io.BytesIO(VALID)).read(n)) for n in
                                zipfile.ZipFile(io.BytesIO(VALID)).namelist() if not n.endswith("data/1")]),
    "short storage": repacked(VALID, **{"data/0": bytes(16)}),
    "text behind the pickle": torch_archive(PKL + b"more"),
}  # fmt: skip


def test_problems_of_storages_name_the_tensor(tmp_path: Path) -> None:
    """A missing or short storage is a problem of the tensor that needs it."""
    for kind, tensor in (("missing storage", "b"), ("short storage", "w")):
        assert [p.tensor for p in structure_of(tmp_path, "m.pt", ARCHIVES[kind]).problems] == [tensor]


def view(offset: object, size: object, stride: object, count: object = 4) -> bytes:
    """A torch pickle of one tensor with a description of one's own."""

    def number(value: object) -> bytes:
        return b"J" + struct.pack("<i", value) if isinstance(value, int) else b"N"

    def numbers(values: object) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t" if isinstance(values, tuple) else b"N"

    return (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + number(count) + b"tQ" + number(offset) + numbers(size)
        + numbers(stride) + b"\x89NtRs."
    )  # fmt: skip


VIEWS = {
    "beyond the end": (1, (4,), (1,)),
    "negative offset": (-1, (4,), (1,)),
    "negative size": (0, (-4,), (1,)),
    "negative stride": (3, (4,), (-1,)),
    "huge": (0, (2**31 - 1,) * 60, (2**31 - 1,) * 60),
    "strides missing": (0, (4,), ()),
    "no size": (0, None, (1,)),
    "no offset": (None, (4,), (1,)),
    "another storage size": (0, (4,), (1,), 5),
}


@pytest.mark.parametrize("kind", sorted(VIEWS))
def test_impossible_views_are_problems(tmp_path: Path, kind: str) -> None:
    """A tensor that reaches out of its storage or contradicts it is a problem that names it."""
    base = torch_bytes({"w": torch.ones(4)})
    assert structure_of(tmp_path, "v.pt", repacked(base, data__pkl=view(0, (4,), (1,)))).problems == ()
    structure = structure_of(tmp_path, "v.pt", repacked(base, data__pkl=view(*VIEWS[kind])))
    assert [p.tensor for p in structure.problems] == ["w"]
    assert structure.tensors == ()


def header(text: str | bytes | dict[str, object], body: bytes = b"") -> bytes:
    """A safetensors file with a header of one's own."""
    raw = json.dumps(text).encode() if isinstance(text, dict) else text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + body


def one(**changed: object) -> dict[str, object]:
    """The header of one F32 tensor of four bytes, with some fields changed."""
    return {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changed}}


HEADERS = {
    "nothing": b"",
    "short": b"\x08\0\0",
    "length zero": bytes(16),
    "length huge": b"\xff" * 16,
    "length beyond": struct.pack("<Q", 1000) + b"{}",
    "no object": header("[]"),
    "no JSON": header("{,}"),
    "not UTF-8": header(b'{"\xff": 1}'),
    "surrogate": header('{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'),
    "duplicate": header('{"w": %s, "w": %s}' % ((json.dumps(one()["w"]),) * 2), bytes(4)),
    "nested": header('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"),
    "huge number": header('{"a":' + "9" * 10_000 + "}"),
    "hole": header(one(data_offsets=[4, 8]), bytes(8)),
    "trailing": header(one(), bytes(5)),
    "missing bytes": header(one(), bytes(3)),
    "wrong size": header(one(shape=[2]), bytes(4)),
    "negative": header(one(shape=[-1]), bytes(4)),
    "float": header(one(shape=[1.0]), bytes(4)),
    "bool": header(one(shape=[True]), bytes(4)),
    "backwards": header(one(data_offsets=[4, 0]), bytes(4)),
    "absurd": header(one(shape=[2**62] * 64), bytes(4)),
    "unknown dtype": header(one(dtype="F33"), bytes(4)),
    "dtype no text": header(one(dtype=3), bytes(4)),
    "extra field": header(one(more=1), bytes(4)),
    "NaN": header('{"w": NaN}'),
    "metadata": header({"__metadata__": {"a": 1}, **one()}, bytes(4)),
    "overlap": header({**one(), "v": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}, bytes(6)),
}  # fmt: skip


INDEXES = {
    "empty": b"",
    "list": b"[]",
    "no map": b"{}",
    "cut": b'{"weight_map": {"a": "b.safetensors"',
    "twice": b'{"weight_map": {"a": "b", "a": "c"}}',
    "upwards": b'{"weight_map": {"a": "../b"}}',
    "absolute": b'{"weight_map": {"a": "/b"}}',
    "url": b'{"weight_map": {"a": "http://b/c"}}',
    "number": b'{"weight_map": {"a": 1}}',
}


# What readers of zip archives could disagree about, or torch would silently accept; absurd headers, holes, overlaps and
# wrong sizes; an index that is no map to plain file names inside the checkpoint.
MALFORMED = {"m.pt": ARCHIVES, "m.safetensors": HEADERS, "model.safetensors.index.json": INDEXES}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in MALFORMED.items() for kind in kinds])
def test_malformed_files_are_problems(tmp_path: Path, name: str, kind: str) -> None:
    """Each of them, and none is an exception."""
    assert structure_of(tmp_path, name, MALFORMED[name][kind]).problems


@pytest.mark.parametrize("name", ["m.pt", "m.bin", "m.safetensors", "m.ckpt", "m.pth", "training_args.bin"])
def test_zeroed_and_empty_files_are_problems(tmp_path: Path, name: str) -> None:
    """What a crash leaves under a tensor's name is a problem, and may still be being written."""
    for data in (b"", bytes(5000)):
        structure = structure_of(tmp_path, name, data)
        assert structure.problems
        assert structure.truncated


@pytest.mark.parametrize("name", ["logs.zip", "notes.txt", "model.txt", "metrics.json"])
def test_foreign_files_are_no_alarm(tmp_path: Path, name: str) -> None:
    """Files that promise no tensors are opaque, whatever their bytes."""
    for data in (b"", b"PK\x03\x04 cut", b"{", VALID[:30], bytes(100)):
        assert structure_of(tmp_path, name, data).problems == ()


BROKEN_SETTINGS = (
    b"",
    b"\n",
    b'{"hidden_size": 4',
    bytes(100),
    b'{"a": 1}\0\0',
    b"\xff\xfe{",
    b"[" * 100_000,
    b"<html>",
)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "generation_config.json"])
def test_half_written_settings_are_a_problem(tmp_path: Path, name: str) -> None:
    """Nothing loads with them; comments of those who write theirs by hand are no fault."""
    for data in BROKEN_SETTINGS:
        assert structure_of(tmp_path, name, data).problems, data[:20]
    for data in (b"{}", b'{"a": NaN, "a": 1}\n', b'{\n  // by hand\n  "a": 1,\n}', b'"text"'):
        assert structure_of(tmp_path, name, data).problems == (), data


def test_zeros_are_no_yaml(tmp_path: Path) -> None:
    """What a power failure leaves; an empty file may be meant."""
    assert structure_of(tmp_path, "epoch_1.yaml", bytes(50)).problems
    assert structure_of(tmp_path, "epoch_1.yaml", b"step: 1\n\0\0").problems
    assert structure_of(tmp_path, "epoch_1.yaml", b"").problems == ()


SEEDS = {
    "m.pt": VALID,
    "m.safetensors": safetensors_bytes(some_tensors()),
    "m.pth": torch_bytes(some_tensors(), _use_new_zipfile_serialization=False),
    "m.pkl": pickled({"a": [1, 2.5, "x"], "b": (None, {"c": b"raw"})}, 4),
    "m.index.json": b'{"metadata": {}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}',
    "trainer_state.json": b'{"global_step": 8, "log_history": [{"grad_norm": NaN}]}',
}
MUTATION = st.tuples(st.sampled_from(["flip", "cut", "insert", "copy"]), st.floats(0, 1), st.binary(max_size=9))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(SEEDS)), mutations=st.lists(MUTATION, min_size=1, max_size=5))
def test_reading_never_raises_and_never_leaves_the_file(name: str, mutations: list[tuple[str, float, bytes]]) -> None:
    """Mutated files end in a Structure; no read reaches out of the file, and all spans lie inside it."""
    data = bytearray(SEEDS[name])
    for kind, where, raw in mutations:
        position = int(where * len(data))
        if kind == "flip":
            data[position : position + len(raw)] = raw
        elif kind == "cut":
            del data[position:]
        elif kind == "insert":
            data[position:position] = raw
        else:
            data[position:position] = data[: len(raw) * 20]
    structure = read_structure(MemoryReader(name, bytes(data)), name)
    assert all(s.offset >= 0 and s.offset + s.length <= len(data) for s in structure.spans)
    assert all(t.span is None or 0 <= t.span < len(structure.spans) for t in structure.tensors)

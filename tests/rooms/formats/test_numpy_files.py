"""numpy's files: arrays alone and in archives, stored, deflated, mixed and pickled."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.format_files import bad_numbers, npz_bytes, scan_of, structure_of

from ckptguard.formats import Structure, read_structure, tensor_suffix
from ckptguard.formats.numpy import arrays
from ckptguard.formats.numpy.npy_header import HeaderProblem, read_header
from ckptguard.formats.zip.crc import crc32_of_rest
from ckptguard.storage import open_storage
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Severity
from ckptguard.verification.target import Selection, verify_target

NAN, INF = math.nan, math.inf


def npy(array: object, **options: object) -> bytes:
    """What numpy.save writes."""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array), **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def matrix() -> np.ndarray:
    """3 x 4, with NaN at row 1, column 2 and infinity at row 2, column 0."""
    array = np.ones((3, 4))
    array[1, 2], array[2, 0] = NAN, INF
    return array


FLOATS = ["<f8", ">f8", "<f4", ">f4", "<f2", ">f2", "<c16", ">c16", "<c8", ">c8"]


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_floats_of_every_kind(tmp_path: Path, kind: str, order: str) -> None:
    """Count and first index in the stored order, whatever the byte order and the order of the indices."""
    array = np.asarray(matrix().astype(kind), order=order)  # type: ignore[call-overload]
    stored = array.ravel(order="K")
    first = int((~np.isfinite(stored)).argmax()) * (2 if "c" in kind else 1)
    for name, data, tensor in (("m.npy", npy(array), "value"), ("m.npz", npz_bytes({"w": array}), "w")):
        file = scan_of(tmp_path, name, data).files[0]
        assert file.structure.problems == ()
        assert bad_numbers(file) == {tensor: (1, 1, first)}
        place = file.structure.tensors[0]
        assert (place.dtype, place.shape) == (np.dtype(kind).name, (3, 4))
        assert place.strides == ((1, 3) if order == "F" else ())


def test_bfloat16_as_extensions_of_numpy_write_it(tmp_path: Path) -> None:
    """A void type with a byte order is how they save bfloat16."""
    bits = np.array([0x3F80, 0x7F80, 0xFFC0, 0x3F80], "<u2").tobytes()
    data = npy(np.zeros(4, "<u2")).replace(b"'<u2'", b"'<V2'")[:-8] + bits
    file = scan_of(tmp_path, "m.npy", data).files[0]
    assert file.structure.tensors[0].dtype == "bfloat16"
    assert bad_numbers(file) == {"value": (1, 1, 1)}


CLEAN: dict[str, object] = {
    "0-dim": np.array(2.5),
    "empty": np.zeros((0, 3)),
    "empty objects": np.zeros(0, object),
    "int": np.arange(5),
    "big int": np.arange(5, dtype=">i2"),
    "bool": np.array([True]),
    "text": np.array(["a", "bc"]),
    "bytes": np.array([b"a"]),
    "void": np.zeros(3, "V5"),
    "dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "spans": np.array([3], dtype="m8[us]"),
    "mixed": np.zeros(3, [("a", "<f4"), ("b", "i1"), ("c", "f8", (2, 2)), ("d", [("e", "f2")], (2,))]),
    "aligned": np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "titled": np.zeros(3, [(("title", "a"), "f4")]),
    "objects": np.array([1, "a", {"b": [1.0]}, None], dtype=object),
    "one": np.ones(1, ">f4"),
    "large": np.ones(70_000),
}


@pytest.mark.parametrize("kind", CLEAN)
def test_clean_arrays_raise_nothing(tmp_path: Path, kind: str) -> None:
    """No type, shape or packing is an alarm by itself."""
    array = CLEAN[kind]
    for name, data in (
        ("m.npy", npy(array)),
        ("m.npz", npz_bytes({"w": array})),
        ("d.npz", npz_bytes({"w": array}, deflated=True)),
    ):
        file = scan_of(tmp_path, name, data).files[0]
        structure = file.structure
        assert (structure.problems, structure.truncated, bad_numbers(file)) == ((), False, {})
        assert all(math.isfinite(leaf.value) for leaf in structure.leaves)
        assert structure.unread == (() if kind != "mixed" else (("value" if name == "m.npy" else "w") + ".d",))
        assert [t.name for t in structure.tensors] == (
            [] if "objects" in kind else ["value" if name == "m.npy" else "w"]
        )


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_deflated_floats_are_looked_at(tmp_path: Path, kind: str, value: float) -> None:
    """A single bad element deep in a compressed array is found; the array's neighbours are not blamed."""
    array = np.ones(300_000, kind)
    array[287_654] = value
    structure = structure_of(tmp_path, "m.npz", npz_bytes({"a": np.ones(3), "w": array}, deflated=True))
    assert structure.problems == ()
    assert [(leaf.name, math.isfinite(leaf.value), leaf.of_array) for leaf in structure.leaves] == [("w", False, True)]


@pytest.mark.parametrize("deflated", [False, True])
def test_fields_of_mixed_arrays_are_looked_at(tmp_path: Path, deflated: bool) -> None:
    """Floats between other things, at odd offsets, are found by the name of their field."""
    kind = [("tag", "S3"), ("w", "<f4"), ("inner", [("h", ">f2"), ("i", "i8")]), ("many", "f8", (3,))]
    array = np.zeros(9000, kind)
    array["inner"]["h"][8000] = NAN
    array["many"][1, 2] = -INF
    structure = structure_of(tmp_path, "m.npz", npz_bytes({"t": array}, deflated=deflated))
    assert structure.problems == ()
    assert {leaf.name for leaf in structure.leaves} == {"t.inner.h", "t.many"}


@pytest.mark.parametrize("deflated", [False, True])
def test_objects_are_read_without_loading_them(tmp_path: Path, deflated: bool) -> None:
    """An array of objects is a pickle: what it would call is named, what it holds is looked at."""
    canary = tmp_path / "canary"

    class Armed:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {canary}",)

    array = np.array([1.0, NAN, {"lr": INF}, Armed()], dtype=object)
    data = npz_bytes({"state": array}, deflated=deflated)
    structure = structure_of(tmp_path, "m.npz", data)
    assert "posix.system" in structure.globals
    assert {leaf.name for leaf in structure.leaves if not math.isfinite(leaf.value)} == {"state.1", "state.2.lr"}
    lone = structure_of(tmp_path, "m.npy", npy(array))
    assert "posix.system" in lone.globals
    assert not canary.exists()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Long doubles may hold NaN, but nobody looks at them here."""
    assert structure_of(tmp_path, "m.npy", npy(np.ones(3, "longdouble"))).unread == ("value",)
    assert structure_of(tmp_path, "m.npz", npz_bytes({"w": np.ones(3, "longdouble")}, deflated=True)).unread == ("w",)


@pytest.mark.parametrize("deflated", [False, True])
def test_damage_is_named(tmp_path: Path, deflated: bool) -> None:
    """A flipped bit in an array's bytes is found at first sight, by the archive's own sums."""
    data = bytearray(npz_bytes({"a": np.arange(50.0), "b": np.arange(50.0)}, deflated=deflated))
    place = scan_of(tmp_path, "m.npz", bytes(data)).files[0].structure
    span = place.spans[1]
    for position in range(span.offset, span.offset + span.length, 7):
        damaged = bytearray(data)
        damaged[position] ^= 1
        problems = scan_of(tmp_path, "m.npz", bytes(damaged)).files[0].structure.problems
        assert [p.tensor for p in problems] == ["b"], position


def broken_npy(header: bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """An array with a header of one's own."""
    length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + data


GOOD = b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }"
WRONG = {
    "not numpy": b"x" * 200,
    "empty": b"",
    "version": broken_npy(GOOD, bytes(16), (4, 0)),
    "code": broken_npy(b"__import__('os').system('true')", bytes(16)),
    "call": broken_npy(GOOD.replace(b"(2,)", b"tuple([2])"), bytes(16)),
    "negative": broken_npy(GOOD.replace(b"2", b"-2"), bytes(16)),
    "huge": broken_npy(GOOD.replace(b"(2,)", b"(9999999999, 9999999999)"), bytes(16)),
    "float": broken_npy(GOOD.replace(b"(2,)", b"(2.0,)"), bytes(16)),
    "many": broken_npy(GOOD.replace(b"(2,)", b"(" + b"1," * 65 + b")"), bytes(8)),
    "more keys": broken_npy(GOOD.replace(b", }", b", 'x': 1}"), bytes(16)),
    "twice": broken_npy(GOOD.replace(b", }", b", 'descr': '<f4'}"), bytes(16)),
    "open": broken_npy(GOOD[:-1], bytes(16)),
    "behind": broken_npy(GOOD + b" x", bytes(16)),
    "deep": broken_npy(b"(" * 30_000, bytes(16)),
    "deep type": broken_npy(GOOD.replace(b"'<f8'", b"[('a'," * 100 + b"'<f8'" + b")]" * 100), bytes(16)),
    "type": broken_npy(GOOD.replace(b"<f8", b"<q8"), bytes(16)),
    "wide": broken_npy(b" " * 70_000 + GOOD, bytes(16), (2, 0)),
    "short": broken_npy(GOOD, bytes(15)),
    "long": broken_npy(GOOD, bytes(17)),
    "no pickle": broken_npy(GOOD.replace(b"<f8", b"|O"), b"\x80\x04nonsense"),
    "after pickle": broken_npy(GOOD.replace(b"<f8", b"|O"), pickle.dumps([1]) + b"x"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arrays_are_problems(tmp_path: Path, kind: str) -> None:
    """Alone and in an archive: never an exception, never called whole."""
    assert structure_of(tmp_path, "m.npy", WRONG[kind]).problems
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            archive.writestr("w.npy", WRONG[kind])
        assert structure_of(tmp_path, "m.npz", buffer.getvalue()).problems


def test_headers_as_others_write_them() -> None:
    """Version 2 and 3, Python 2's long integers, other orders of keys and other spacing."""
    for version, header in (
        ((1, 0), b"{'fortran_order':False,'shape':(2L,),'descr':'<f8'}\n"),
        ((2, 0), GOOD + b"   \n"),
        ((3, 0), '{"shape": (2,), "descr": [("größe", "<f8")], "fortran_order": False}'.encode()),
    ):
        found = read_header(broken_npy(header, b"", version))
        assert (found.shape, found.item_size, found.by_columns) == ((2,), 8, False)
    with pytest.raises(HeaderProblem):
        read_header(broken_npy(b"{}"))


def test_an_early_end_is_told_from_damage(tmp_path: Path) -> None:
    """A file that is cut may still be being written."""
    data = npy(np.arange(40.0))
    for length in range(len(data)):
        structure = structure_of(tmp_path, "m.npy", data[:length])
        assert structure.problems
        assert structure.truncated, length
    archive = npz_bytes({"w": np.arange(40.0)})
    assert all(structure_of(tmp_path, "m.npz", archive[:n]).problems for n in range(len(archive)))


def deflated_zeros(size: int, stated: int | None = None) -> bytes:
    """An archive of one array of zeros that packs a thousand times."""
    head = npy(np.zeros(0, "<f8")).replace(
        b"(0,), }" + b" " * len(str(size // 8)), f"({size // 8},), }}".encode() + b" "
    )
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(head)
    crc = zlib.crc32(head)
    block = bytes(1 << 20)
    for _ in range(size >> 20):
        packed += packer.compress(block)
        crc = zlib.crc32(block, crc)
    packed += packer.flush()
    whole = len(head) + size if stated is None else stated
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 8, 0, 33, crc, len(packed), whole, 5, 0) + b"w.npy"
    entry = (0x02014B50, 20, 20, 0, 8, 0, 33, crc, len(packed), whole, 5, 0, 0, 0, 0, 0, 0)
    directory = struct.pack("<IHHHHHHIIIHHHHHII", *entry) + b"w.npy"
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(local) + len(packed), 0)
    return local + packed + directory + end


def test_unpacking_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would become many times the file is left packed, and that is said; lies about sizes are problems."""
    assert structure_of(tmp_path, "m.npz", deflated_zeros(4 << 20)).problems == ()
    liar = structure_of(tmp_path, "m.npz", deflated_zeros(4 << 20, stated=1000))
    assert [p.tensor for p in liar.problems] == ["w"]
    monkeypatch.setattr(arrays, "_ROOM", 1 << 20)
    bomb = structure_of(tmp_path, "m.npz", deflated_zeros(4 << 20))
    assert (bomb.problems, bomb.unread) == ((), ("w",))


@pytest.mark.parametrize("deflated", [False, True])
def test_every_byte_may_be_anything(tmp_path: Path, deflated: bool) -> None:
    """Each single changed byte ends in a Structure whose spans lie in the file, soon."""
    arrays = {"w": np.arange(3.0), "o": np.array([1.5, {"a": NAN}], dtype=object), "s": np.zeros(2, "i1,f4")}
    storage = open_storage(tmp_path)
    for name, data in (
        ("m.npz", npz_bytes(arrays, deflated=deflated)),
        ("m.npy", npy(arrays["s" if deflated else "o"])),
    ):
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 0xFF if position % 2 else 1 << position % 8
            (tmp_path / name).write_bytes(damaged)
            with storage.open(name) as reader:
                structure: Structure = read_structure(reader, name)
            end = 0
            for span in structure.spans:
                assert end <= span.offset
                end = span.offset + span.length
            assert end <= len(damaged)


def test_sums_of_parts() -> None:
    """The sum of the rest follows from those of the whole and of its beginning."""
    data = bytes(range(256)) * 300
    for cut in (0, 1, 128, 70_000, len(data)):
        whole, first, rest = zlib.crc32(data), zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert crc32_of_rest(whole, first, len(data) - cut) == rest
    assert crc32_of_rest(0, 0, 1 << 40) == 0


def test_which_names_are_state() -> None:
    """An archive that is called after a step or a model is state; other arrays are data beside it."""
    state = ("step_100.npz", "run/checkpoint-5.npz", "model.npz", "params_3.npz", "ema.npz", "weights.npy", "iter7.npy")
    data = ("data.npy", "features.npz", "rng.npz", "predictions_3.npy", "cinema.npy", "arr_0.npy", "steps.npy")
    assert all(tensor_suffix(name) for name in state)
    assert not any(tensor_suffix(name) for name in data)


@pytest.mark.parametrize("deflated", [False, True])
def test_archives_as_checkpoints(tmp_path: Path, deflated: bool) -> None:
    """A run of archives is judged like any other, and a folder of mere data is none."""
    for step, value in ((100, 1.0), (200, NAN)):
        weights = np.linspace(0, value, 50).reshape(5, 10)
        (tmp_path / f"step_{step}.npz").write_bytes(npz_bytes({"w": weights, "b": np.ones(3)}, deflated=deflated))
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "data.npy").write_bytes(npy(np.array([NAN])))
    found = verify_target(str(tmp_path), Settings(settle=0.0), Selection(record=False))
    assert [(c.path, c.step, c.outcome.value) for c in found.checkpoints] == [
        ("step_100.npz", 100, "good"),
        ("step_200.npz", 200, "bad"),
    ]
    errors = [f for f in found.checkpoints[1].findings if f.severity == Severity.ERROR]
    assert [(f.check, f.tensor) for f in errors] == [("finite", "w")]

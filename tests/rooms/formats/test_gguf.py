"""GGUF: what llama.cpp's own writer writes, and damage of every kind. Its own reader says which numbers are there."""

from __future__ import annotations

import math
import struct
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.container_files import gguf_bytes, zip_of
from support.format_files import scan_of, structure_of
from support.judged_files import outcome_in_run

from ckptguard.formats.dtypes import BLOCKS
from ckptguard.formats.gguf import _QUANTISED
from ckptguard.values.verdict import Outcome

NAMES = {name: gguf.GGMLQuantizationType(number) for number, name in _QUANTISED.items()}
READABLE = [name for name in NAMES if NAMES[name] in gguf.quants._type_traits]
NAME = "model-500.gguf"
PLAIN = {"a": np.ones((4, 8), np.float32), "b": np.ones(16, np.float16), "c": np.ones(8, np.int32)}


def blocks(name: str, rows: int = 3) -> np.ndarray:
    """Blocks of a type whose numbers are all finite."""
    return np.full((rows, 2 * BLOCKS[name].size), 1, np.uint8)


def test_the_sizes_of_blocks_are_the_writers() -> None:
    """Elements and bytes of every type that is read."""
    assert {name: gguf.GGML_QUANT_SIZES[kind] for name, kind in NAMES.items()} == {
        name: (one.elements, one.size) for name, one in BLOCKS.items()
    }


@pytest.mark.parametrize("name", READABLE)
def test_a_scale_is_not_finite_exactly_if_a_weight_is_not(tmp_path: Path, name: str) -> None:
    """Random blocks: llama.cpp's own code gives numbers that are not finite for those, and only those, that we name."""
    chance = np.random.default_rng(len(name))
    kind = BLOCKS[name]
    for number in range(60):
        raw = chance.integers(0, 256, (1, 2 * kind.size), dtype=np.uint8)
        for block in range(2):  # half of the scales are ordinary
            for offset in kind.offsets if chance.random() < 0.5 else ():
                width = 1 if kind.scale != "float16" else 2
                raw[0, block * kind.size + offset : block * kind.size + offset + width] = (1, 60)[:width]
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw, NAMES[name])
        data = gguf_bytes({}, {"w": (NAMES[name].name, raw)})
        [numbers] = scan_of(tmp_path, f"{number}.gguf", data).files[0].numbers
        assert numbers is not None
        assert numbers.count == 2 * len(kind.offsets)
        if name == "mxfp4":  # llama.cpp reads its NaN as a number
            assert (numbers.nan > 0) == (255 in raw[0, :: kind.size])
        else:
            assert (numbers.first_bad is not None) == (not np.isfinite(values).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_scale_is_found_wherever_it_is(tmp_path: Path, name: str) -> None:
    """In every block, also where the scan's blocks end in the middle of one."""
    kind = BLOCKS[name]
    rows = (1 << 20) // kind.size
    for place in (0, rows, 2 * rows - 1):
        for offset in kind.offsets:
            raw = blocks(name, rows)
            flat = raw.reshape(-1)
            begin = place * kind.size + offset
            flat[begin : begin + 2] = (0, 126) if kind.scale == "float16" else (255, 1)
            [numbers] = scan_of(tmp_path, "m.gguf", gguf_bytes({}, {"w": (NAMES[name].name, raw)})).files[0].numbers
            assert numbers is not None
            assert (numbers.nan, numbers.first_bad) == (1, place * len(kind.offsets) + kind.offsets.index(offset))


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_scale_is_found_in_a_compressed_archive(tmp_path: Path, name: str) -> None:
    """What is unpacked is judged like the file itself."""
    kind = BLOCKS[name]
    for offset in (None, *kind.offsets):
        raw = blocks(name)
        if offset is not None:
            flat = raw.reshape(-1)
            flat[kind.size + offset : kind.size + offset + 2] = (0, 126) if kind.scale == "float16" else (255, 1)
        data = gguf_bytes({}, {"w": (NAMES[name].name, raw)})
        file = scan_of(tmp_path, "model-500.zip", zip_of([("model.gguf", data)], zipfile.ZIP_DEFLATED)).files[0]
        assert [leaf.name for leaf in file.structure.leaves] == ([] if offset is None else ["model.gguf:w"])
        assert (file.structure.unread, file.structure.not_understood) == ((), ())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_nan_in_floats_is_bad(tmp_path: Path, dtype: type) -> None:
    """And without it the file is good."""
    for poison in (False, True):
        array = np.ones((4, 8), dtype)
        array[2, 3] = math.nan if poison else 1
        data = gguf_bytes({**PLAIN, "w": array}, {"q": ("Q4_K", blocks("q4_k"))})
        assert outcome_in_run(tmp_path / str(poison), NAME, data) is (Outcome.BAD if poison else Outcome.GOOD)


def with_type(data: bytes, name: bytes, kind: int) -> bytes:
    """The same with another type of one tensor."""
    place = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", data, place)
    changed = bytearray(data)
    struct.pack_into("<I", changed, place + 4 + 8 * dimensions, kind)
    return bytes(changed)


@pytest.mark.parametrize("kind", [29, 9, 15, 40, 77, 2**31])
def test_a_type_that_nobody_knows_is_not_good(tmp_path: Path, kind: int) -> None:
    """It is no alarm either: that tensor is not understood."""
    data = with_type(gguf_bytes({**PLAIN, "unknown": np.ones((4, 64), np.float32)}), b"unknown", kind)
    found = structure_of(tmp_path, "m.gguf", data)
    assert found.problems == ()
    assert found.not_understood == (f"tensor 'unknown' of type {kind}",)
    assert outcome_in_run(tmp_path / "run", NAME, data) is Outcome.SUSPECT


def changed(data: bytes, find: bytes, offset: int, form: str, value: int) -> bytes:
    """The bytes with one number replaced, some bytes after these."""
    raw = bytearray(data)
    struct.pack_into(form, raw, data.index(find) + offset, value)
    return bytes(raw)


WHOLE = gguf_bytes({"alpha": np.ones((4, 8), np.float32), "beta": np.ones((4, 8), np.float32)})
WRONG = {
    "tensors": changed(WHOLE, b"GGUF", 8, "<Q", 2**60),
    "keys": changed(WHOLE, b"GGUF", 16, "<Q", 2**60),
    "text": changed(WHOLE, b"llama", -8, "<Q", 2**63),
    "dimensions": changed(WHOLE, b"alpha", 5, "<I", 2**31),
    "shape": changed(WHOLE, b"alpha", 9, "<Q", 2**62),
    "overlap": changed(WHOLE, b"beta", 4 + 4 + 16 + 4, "<Q", 0),
    "not aligned": changed(WHOLE, b"beta", 4 + 4 + 16 + 4, "<Q", 127),
    "hole": changed(WHOLE, b"beta", 4 + 4 + 16 + 4, "<Q", 4096) + bytes(8000),
    "far away": changed(WHOLE, b"beta", 4 + 4 + 16 + 4, "<Q", 2**62),
    "twice": WHOLE.replace(b"\x04\0\0\0\0\0\0\0beta", b"\x05\0\0\0\0\0\0\0alpha"),
    "kind of a value": WHOLE.replace(b"llama.context_length\x04", b"llama.context_length\x63"),
    "more": WHOLE + bytes(64),
    "no name": WHOLE.replace(b"alpha", b"\xff\xfe\xfd\xfc\xfb"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_contradicts_itself_is_bad(tmp_path: Path, kind: str) -> None:
    """Lengths, places and names that cannot be."""
    assert structure_of(tmp_path, "m.gguf", WRONG[kind]).problems
    assert outcome_in_run(tmp_path / "run", NAME, WRONG[kind]) in (
        Outcome.BAD,
        Outcome.PENDING,
        Outcome.INCOMPLETE,
    )


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_are_not_understood(tmp_path: Path, version: int) -> None:
    """They may be whole."""
    assert outcome_in_run(tmp_path / "run", NAME, changed(WHOLE, b"GGUF", 4, "<I", version)) is Outcome.SUSPECT

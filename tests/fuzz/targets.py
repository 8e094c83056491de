"""What is fuzzed: one function for each reader, given any bytes. An exception is a finding.

Each asserts two things: whatever the bytes are, the answer is a value or one of our declared errors; and what we
accept, the real reader of the format reads the same way.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import warnings
import zipfile
from collections.abc import Callable

import msgspec
import numpy as np
import safetensors
from fuzz.dcp_oracle import dcp_contents, torch_metadata
from fuzz.disarmed import InC, InPython, Loaded, differs, may_take_much_memory
from support.memory_reader import MemoryReader

from ckptguard.errors import RecordsError, SettingsError
from ckptguard.formats import json_files, read_structure
from ckptguard.formats import safetensors as own_safetensors
from ckptguard.formats.dcp import metadata as dcp_metadata
from ckptguard.formats.numpy.arrays import read_npy, read_npz
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import read_pickle
from ckptguard.formats.structure import Structure
from ckptguard.formats.table import LEGACY_MAGICS
from ckptguard.formats.torch import files as torch_files
from ckptguard.formats.zip.archive import read_archive
from ckptguard.formats.zip.crc import crc32_of
from ckptguard.records.incidents import Incident
from ckptguard.records.kept import KeptCopy
from ckptguard.records.quarantine import Quarantined
from ckptguard.values.ids import is_safe_path
from ckptguard.values.manifest import decode_manifest
from ckptguard.values.record_text import decode_record, encode_checked
from ckptguard.values.verdict import decode_verdict


def check_structure(structure: Structure, size: int) -> None:
    """Spans in order, apart and inside the file; tensors inside their spans; text that can stand in our JSON."""
    end = 0
    for span in structure.spans:
        assert end <= span.offset
        assert span.length >= 0
        end = span.offset + span.length
    assert end <= size
    for tensor in structure.tensors:
        assert tensor.span is None or 0 <= tensor.span < len(structure.spans)
        assert 0 <= tensor.start <= tensor.stop
        assert all(n >= 0 for n in tensor.shape)
    msgspec.json.encode(msgspec.structs.replace(structure, leaves=()))


def fuzz_pickle(data: bytes) -> None:
    """Any stream ends in a value or a problem; one that we accept names all that real unpicklers look up."""
    check_structure(torch_files.read_pickles(MemoryReader("f.pkl", data), "f.pkl"), len(data))
    try:
        ours = read_pickle(data)
    except PickleProblem:
        return
    kinds = [InPython] if may_take_much_memory(data) else [InPython, InC]
    for kind in kinds:
        loaded = Loaded(kind, data[: ours.end])
        if any("\\u" in name for name in ours.globals):
            return
        assert loaded.names <= ours.globals, f"{kind.__name__} looks up {loaded.names - ours.globals}"
        if loaded.error is None:
            different = differs(ours.value, loaded.value)
            assert different is None, f"{kind.__name__}: {different}"


def fuzz_zip(data: bytes) -> None:
    """Any archive ends in a structure; in one that we accept, zipfile finds the same records and bytes."""
    reader = MemoryReader("f.pt", data)
    check_structure(torch_files.read_zip(reader, "f.pt"), len(data))
    archive = read_archive(reader)
    if archive.problems:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = zipfile.ZipFile(io.BytesIO(data))
    root = archive.root + "/"
    assert sorted(i.filename for i in theirs.infolist()) == sorted(root + name for name in archive.records)
    for name, record in archive.records.items():
        right = crc32_of(reader, record.offset, record.size) == record.crc32
        try:
            found = theirs.read(root + name)
        except zipfile.BadZipFile:
            assert not right
            continue
        assert right
        assert found == data[record.offset : record.offset + record.size]


def fuzz_safetensors(data: bytes) -> None:
    """Any file ends in a structure; one that we accept, the library reads the same way.

    The input is the header, a NUL, then the body: the header's length is put in front. Or it is a number of choices,
    of which a header is made that is nearly right.
    """
    header, _, body = data.partition(b"\0")
    if data[:1] == CHOICES:
        header, body = nearly_right_header(data[1:])
    data = struct.pack("<Q", len(header)) + header + body
    structure = own_safetensors.read(MemoryReader("f.safetensors", data), "f.safetensors")
    check_structure(structure, len(data))
    if structure.problems:
        return
    theirs = dict(safetensors.deserialize(data))
    assert set(theirs) == {t.name for t in structure.tensors}
    for tensor in structure.tensors:
        found = theirs[tensor.name]
        assert tuple(found["shape"]) == tensor.shape
        span = structure.spans[tensor.span] if tensor.span is not None else None
        assert bytes(found["data"]) == (data[span.offset : span.offset + span.length] if span else b"")
        assert tensor.span is None or tensor.stop - tensor.start == math.prod(tensor.shape)


CHOICES = b"\1"
_NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "-1",
    "-0",
    "1.0",
    "1e2",
    "4294967296",
    "9223372036854775807",
    "18446744073709551616",
    "null",
)
_WORDS = ("F32", "BF16", "F16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "F4", "F8_E8M0", "C64", "f32", "X", "")
_SIZES = {"F64": 8, "I64": 8, "C64": 8, "F32": 4, "BF16": 2, "F16": 2}


def nearly_right_header(choices: bytes) -> tuple[bytes, bytes]:
    """A safetensors header and body; each byte chooses something, and few choices are wrong ones."""
    left = list(reversed(choices))

    def choose(few: int) -> int:
        """0 usually, else a wrong choice from 1 to few - 1."""
        picked = left.pop() if left else 0
        return picked % few if picked >= 128 else 0

    def number(right: int) -> str:
        wrong = choose(len(_NUMBERS) + 1)
        return _NUMBERS[wrong - 1] if wrong else str(right)

    entries, end = [], 0
    while left and len(entries) < 20:
        word = _WORDS[left.pop() % len(_WORDS)]
        shape = [left.pop() % 5 for _ in range(left.pop() % 4) if left] if left else []
        size = math.prod(shape) * _SIZES.get(word, 1)
        fields = [f'"dtype":"{word}"', f'"shape":[{",".join(number(n) for n in shape)}]']
        fields.append(f'"data_offsets":[{number(end)},{number(end + size)}]')
        end += size
        if choose(3) == 1:
            fields.append('"more":1')
        if choose(3) == 1:
            fields.append(fields[choose(3)])
        name = (
            "__metadata__" if choose(9) == 1 else f"t{len(entries) - (choose(9) == 1)}" + "\\u0041" * (choose(9) == 1)
        )
        entries.append(f'"{name}":{{{",".join(fields)}}}')
    return ("{" + ",".join(entries) + "}" + " " * choose(9)).encode(), bytes(end + choose(3))


def fuzz_dcp(data: bytes) -> None:
    """Any ``.metadata`` ends in a structure; one that we accept, torch's own classes read the same way."""
    structure = dcp_metadata.read(MemoryReader(".metadata", data), ".metadata")
    check_structure(structure, len(data))
    for path, chunks in structure.chunks.items():
        assert is_safe_path(path)
        assert "/" not in path
        end = 0
        for chunk in chunks:
            assert end <= chunk.offset
            end = chunk.offset + chunk.length
    if structure.problems or may_take_much_memory(data):
        return
    for kind in (InPython, InC):
        loaded = Loaded(kind, data)
        assert loaded.names <= set(structure.globals), f"{kind.__name__}: {loaded.names - set(structure.globals)}"
    real = torch_metadata(data)
    if real is not None:
        assert real == dcp_contents(structure)


def fuzz_npy(data: bytes) -> None:
    """Any array file ends in a structure; one that we accept, numpy reads the same way."""
    structure = read_npy(MemoryReader("f.npy", data), "f.npy")
    check_structure(structure, len(data))
    if structure.problems or not structure.tensors:
        return
    array = None
    with contextlib.suppress(ValueError, TypeError):
        array = np.load(io.BytesIO(data), allow_pickle=False)
    if array is None:
        assert structure.tensors[0].dtype not in PLAIN
        return
    tensor = structure.tensors[0]
    assert array.shape == tensor.shape
    if tensor.span is not None and tensor.dtype in PLAIN:
        span = structure.spans[tensor.span]
        order = "F" if tensor.strides else "C"
        assert array.tobytes(order) == data[span.offset : span.offset + span.length]
        assert tensor.dtype == array.dtype.newbyteorder("=").name


def fuzz_npz(data: bytes) -> None:
    """Any archive of arrays ends in a structure; one that we accept, numpy finds the same arrays in."""
    reader = MemoryReader("f.npz", data)
    structure = read_npz(reader, "f.npz")
    check_structure(structure, len(data))
    if structure.problems or structure.globals or any(t.dtype not in PLAIN for t in structure.tensors):
        return
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for tensor in structure.tensors:
            array = None
            with contextlib.suppress(ValueError, KeyError, zipfile.BadZipFile):
                array = arrays[tensor.name]
            if array is None:  # the elements' CRC-32 is for the scan to compare
                assert tensor.span is not None
                span = structure.spans[tensor.span]
                assert span.crc32 is not None
                assert crc32_of(reader, span.offset, span.length) != span.crc32
                continue
            assert array.shape == tensor.shape


PLAIN = frozenset(
    (
        *("float64", "float32", "float16", "complex128", "complex64", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)


def fuzz_legacy(data: bytes) -> None:
    """Any file of the old torch format ends in a structure."""
    data = LEGACY_MAGICS[0] + data
    check_structure(torch_files.read_legacy(MemoryReader("f.pt", data), "f.pt"), len(data))


def fuzz_json(data: bytes) -> None:
    """Any text ends in a structure, whichever of the JSON files it stands for."""
    for reads, name in (
        (json_files.read_index, "m.index.json"),
        (json_files.read_trainer_state, "trainer_state.json"),
        (json_files.read_own_state, "step-000000500/state.json"),
    ):
        structure = reads(MemoryReader(name, data), name)
        check_structure(structure, len(data))
        for shard in (structure.weight_map or {}).values():
            assert is_safe_path(shard)


def fuzz_records(data: bytes) -> None:
    """Any text is a record or a RecordsError, also with a checksum that fits; no record leads out of the run."""
    checked = with_check_sum(data)
    for decode in (decode_manifest, decode_verdict):
        try:
            value = decode(checked)
        except RecordsError:
            continue
        again = encode_checked(value)
        assert encode_checked(decode(again)) == again
        if decode is decode_manifest:
            assert value.path == "." or is_safe_path(value.path)
            assert all(is_safe_path(f.path) for f in value.files)
            assert value.bytes >= 0
    for kind in (KeptCopy, Quarantined, Incident, dict[str, int]):
        try:
            decode_record(data, kind, "it")
        except RecordsError:
            continue


def with_check_sum(line: bytes) -> bytes:
    """The text with the checksum that our records end in."""
    import zlib

    line += b"\n"
    return line + b"crc32 " + f"{zlib.crc32(line):08x}\n".encode()


def fuzz_any(data: bytes) -> None:
    """Whatever a file is called, its bytes end in a structure: the first byte chooses the name."""
    names = ("a.pt", "a.bin", "a.safetensors", "a.pkl", "a.ckpt", "a.npy", "a.npz", ".metadata", "x.distcp", "a.txt")
    name = names[data[0] % len(names)] if data else names[0]
    check_structure(read_structure(MemoryReader(name, data[1:]), name), max(len(data) - 1, 0))


def fuzz_check_sums(data: bytes) -> None:
    """Any checksum file ends in sums under keys inside the storage, or in a sentence."""
    from ckptguard.verification.checksum_files import parse_check_sums, sums_for

    try:
        sums = sums_for(parse_check_sums(data, "it"), "m", ["m/a", "m/b/c"], root="/r", folder="/r/x")
    except SettingsError:
        return
    assert all(key.startswith("m/") and is_safe_path(key) for key in sums)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "pickle": fuzz_pickle,
    "zip": fuzz_zip,
    "safetensors": fuzz_safetensors,
    "dcp": fuzz_dcp,
    "npy": fuzz_npy,
    "npz": fuzz_npz,
    "legacy": fuzz_legacy,
    "json": fuzz_json,
    "records": fuzz_records,
    "any": fuzz_any,
    "check_sums": fuzz_check_sums,
}

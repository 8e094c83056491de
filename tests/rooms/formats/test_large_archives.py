"""Archives beyond what plain zip records can state, and archives of very many records."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.format_files import scan_of, structure_of, torch_bytes
from support.memory_reader import MemoryReader

from ckptguard.formats import read_structure
from ckptguard.formats.torch.files import ReadingBudget, read_zip_within
from ckptguard.storage import open_storage
from ckptguard.values.manifest import File, Manifest, Span, Tensor, decode_manifest
from ckptguard.values.record_text import encode_checked

FAR = (1 << 32) + 4096
MANY = 5000


def test_a_torch_archive_beyond_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets come from zip64 fields; the file is a hole, so that it takes no room."""
    path = tmp_path / "far.pt"
    with torch.serialization.skip_data():
        torch.save({"large": torch.empty(FAR, dtype=torch.uint8), "behind": torch.empty(3)}, path)
    assert path.stat().st_size > FAR
    with open_storage(tmp_path).open("far.pt") as reader:
        structure = read_structure(reader, "far.pt")
    assert structure.problems == ()
    large, behind = structure.tensors
    assert (large.stop - large.start, structure.spans[0].length) == (FAR, FAR)
    assert structure.spans[1].offset > FAR
    assert behind.span == 1
    # The offset of the last records is stated in their zip64 fields alone: one more byte there is another record.
    with path.open("r+b") as file:
        end = file.seek(-22 - 20 - 56, 2)
        _, length, *_, size, offset = struct.unpack("<4sQHHIIQQQQ", file.read(56))
        assert (length, offset + size) == (44, end)
        file.seek(offset)
        directory = file.read(size)
        at = directory.rindex(struct.pack("<HH", 1, 8)) + 4
        file.seek(offset + at)
        file.write(bytes([directory[at] ^ 1]))
    with open_storage(tmp_path).open("far.pt") as reader:
        assert read_structure(reader, "far.pt").problems


class Unseekable(io.RawIOBase):
    """A pipe, as a writer sees it: sizes must then follow the data."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(bytes(data))  # type: ignore[call-overload]


@pytest.mark.parametrize("streamed", [False, True])
def test_zip64_fields_that_were_not_needed(tmp_path: Path, streamed: bool) -> None:
    """Writers that cannot know sizes beforehand state small ones in wide fields too."""
    target = Unseekable() if streamed else io.BytesIO()
    data = torch_bytes({"w": torch.tensor([1.0, float("nan")]), "none": torch.empty(0)})
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(target, "w") as new,  # type: ignore[arg-type]
    ):
        for info in old.infolist():
            with new.open(zipfile.ZipInfo(info.filename), "w", force_zip64=True) as record:
                record.write(old.read(info))
    written = bytes(target.data) if isinstance(target, Unseekable) else target.getvalue()
    file = scan_of(tmp_path, "m.pt", written).files[0]
    assert file.structure.problems == ()
    numbers = {t.name: n.first_bad for t, n in zip(file.structure.tensors, file.numbers, strict=True) if n}
    assert numbers == {"w": 1}
    for cut in range(len(written) - 400, len(written)):
        assert structure_of(tmp_path, "m.pt", written[:cut]).problems


def test_many_small_tensors(tmp_path: Path) -> None:
    """Each of very many records is found where it lies, damage is named, and the manifest stays small."""
    names = [f"model.layers.{i // 100:04d}.block.{i % 100:02d}.attn.weight" for i in range(MANY)]
    state = {name: torch.full((4,), float(i)) for i, name in enumerate(names)}
    state[names[4321]][2] = float("inf")
    data = bytearray(torch_bytes(state))
    file = scan_of(tmp_path, "m.pt", bytes(data)).files[0]
    structure = file.structure
    assert structure.problems == ()
    assert [t.name for t in structure.tensors] == names
    assert {t.name for t, n in zip(structure.tensors, file.numbers, strict=True) if n and n.posinf} == {names[4321]}
    for index in (0, 17, MANY - 1):
        span = structure.spans[structure.tensors[index].span or 0]
        assert np.frombuffer(data, "<f4", 4, span.offset)[0] == index
    place = structure.spans[structure.tensors[77].span or 0]
    data[place.offset] ^= 1
    problems = scan_of(tmp_path, "m.pt", bytes(data)).files[0].structure.problems
    assert [p.tensor for p in problems] == [names[77]]
    entry = File(
        path="m.pt",
        size=len(data),
        format=structure.format,
        envelope=file.envelope,
        spans=tuple(Span(s.offset, s.length, d) for s, d in zip(structure.spans, file.span_digests, strict=True)),
        tensors=tuple(Tensor(t.name, t.dtype, t.shape, t.span, "model", 12345.6, 1234.56) for t in structure.tensors),
    )
    manifest = Manifest(
        series="m",
        path="m.pt",
        layout="file",
        step=1,
        generation=1,
        digest_origin="observer",
        sealed_at="2026-01-01T00:00:00Z",
        version="0",
        nonce="n",
        files=(entry,),
    )
    text = encode_checked(manifest)
    assert decode_manifest(text) == manifest
    assert len(text) <= 250 * MANY


def test_damaged_headers_among_many_records(tmp_path: Path) -> None:
    """Records that are read together are still held against the directory one by one."""
    data = torch_bytes({f"w{i}": torch.full((2,), float(i)) for i in range(300)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = [i for i in archive.infolist() if "/data/" in i.filename]
    for info in infos[::29]:
        for at in (0, 6, 14, 26, 31):  # signature, flags, CRC-32, length of the name, the name
            damaged = bytearray(data)
            damaged[info.header_offset + at] ^= 1
            problems = structure_of(tmp_path, "m.pt", bytes(damaged)).problems
            assert any(info.filename in p.message for p in problems), (info.filename, at)


def test_room_grows_with_the_storages_that_are_there() -> None:
    """Many tensors of their own storages are read; a pickle that is only long has no more room for it."""
    own = torch_bytes({f"w{i}": torch.full((2,), float(i)) for i in range(300)})
    shared = torch.zeros(2)
    long = torch_bytes({f"w{i}": shared.view(2) for i in range(300)})
    for data, each, refused in ((own, 0, True), (own, 3000, False), (long, 3000, True)):
        structure = read_zip_within(MemoryReader("m.pt", data), ReadingBudget(100_000, each=each))
        assert any("more values than ckptguard reads" in part for part in structure.not_understood) == refused

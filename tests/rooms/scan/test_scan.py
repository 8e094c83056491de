"""The one pass: digests against hashlib, numbers against torch, and what happens when reading fails."""

from __future__ import annotations

import hashlib
import math
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from support.format_files import FLOATS, safetensors_bytes, scan_of, torch_bytes

from ckptguard.errors import ChangedWhileReadError, StorageError
from ckptguard.formats.structure import SpanPlace, Structure, TensorPlace
from ckptguard.scan import ScanOptions, digest_places, scan_files
from ckptguard.scan.byte_pass import BytePass, numbers_of
from ckptguard.scan.numbers import ArrayTally, Reading
from ckptguard.scan.plan import Part, plan_of
from ckptguard.scan.tallies import merge
from ckptguard.scan.whole_file_digests import DigestThreads
from ckptguard.storage import open_storage

MIB = 1 << 20


def test_digests_of_a_large_file(tmp_path: Path) -> None:
    """Whole-file digests, span digests and the envelope of a file of many blocks are exactly those of its bytes."""
    tensors = {f"w{i}": torch.randn(700_001) for i in range(4)}
    data = safetensors_bytes(tensors)
    done: list[int] = []
    (tmp_path / "m.safetensors").write_bytes(data)
    options = ScanOptions(sums=("sha256", "sha1", "md5"), spare_cache=True)
    scan = scan_files(open_storage(tmp_path), ["m.safetensors"], options, done.append)
    file = scan.file("m.safetensors")
    assert file is not None
    assert file.md5 == hashlib.md5(data).hexdigest()
    assert file.sums == {n: hashlib.new(n, data).hexdigest() for n in ("sha256", "sha1", "md5")}
    spans = file.structure.spans
    assert list(file.span_digests) == [blake3(data[s.offset : s.offset + s.length]).hexdigest() for s in spans]
    assert file.envelope == blake3(data[: spans[0].offset]).hexdigest()
    assert sum(done) == len(data)
    places = [(s.offset, s.length) for s in spans]
    assert digest_places(open_storage(tmp_path), "m.safetensors", [*places, (len(data) - 1, 2)]) == (
        *file.span_digests,
        None,
    )


def test_a_file_without_spans_is_all_envelope(tmp_path: Path) -> None:
    """The envelope of a plain file is the BLAKE3 of the file, also of an empty one."""
    for data in (b"", b"{}", b"x" * (2 * MIB + 1)):
        file = scan_of(tmp_path, "notes.txt", data).files[0]
        assert (file.envelope, file.md5) == (blake3(data).hexdigest(), hashlib.md5(data).hexdigest())
        assert file.span_digests == ()


def test_no_files_and_many_files(tmp_path: Path) -> None:
    """An empty list scans; many small files are scanned in order and without threads."""
    storage = open_storage(tmp_path)
    assert scan_files(storage, []).files == ()
    names = [f"f{i}.json" for i in range(300)]
    for name in names:
        (tmp_path / name).write_text(name)
    before = threading.active_count()
    seen: list[int] = []
    scan = scan_files(storage, names, progress=lambda n: seen.append(threading.active_count()))
    assert [f.entry.key for f in scan.files] == names
    assert max(seen) == before


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_pattern_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    """NaN, infinities and the largest magnitude agree with torch over all (or many) bit patterns."""
    size = torch.empty(0, dtype=dtype).element_size()
    if size <= 2:
        bits = np.arange(1 << (8 * size), dtype=f"<u{size}")
    else:
        bits = np.random.default_rng(5).integers(0, 2 ** (8 * size) - 1, 50_000, dtype=f"<u{size}", endpoint=True)
    values = torch.from_numpy(bits.view(np.uint8).copy()).view(dtype).to(torch.float64)
    tally = ArrayTally(Reading(str(dtype).removeprefix("torch."), "little"))
    tally.add(memoryview(bits.tobytes()))
    numbers = merge([tally])
    assert numbers.nan == int(values.isnan().sum())
    assert numbers.posinf == int((values == math.inf).sum())
    assert numbers.neginf == int((values == -math.inf).sum())
    assert numbers.largest == float(values[values.isfinite()].abs().max())
    bad = (~values.isfinite()).nonzero()
    assert numbers.first_bad == (int(bad[0]) if len(bad) else None)


@pytest.mark.parametrize(
    ("dtype", "code", "nan"), [("float64", "d", 8), ("float32", "f", 4), ("float16", "e", 2), ("complex64", "f", 4)]
)
def test_big_endian_numbers(dtype: str, code: str, nan: int) -> None:
    """A big-endian archive's numbers are read in its own byte order."""
    data = struct.pack(f">6{code}", 1.0, 2.0, math.nan, -3.0, math.inf, 0.0)
    tally = ArrayTally(Reading(dtype, "big"))
    tally.add(memoryview(data))
    numbers = merge([tally])
    assert (numbers.nan, numbers.posinf, numbers.first_bad, numbers.largest) == (1, 1, 2, 3.0)


@pytest.mark.parametrize("block", [16, 17, 64, 1000])
@pytest.mark.parametrize("offset", [0, 1, 3, 8, 13])
def test_spans_at_odd_offsets_and_any_block_size(block: int, offset: int) -> None:
    """No float is ever split or read askew, whatever the offset of its span and the size of the blocks."""
    values = np.arange(200, dtype="<f8")
    values[150] = math.nan
    data = b"e" * offset + values.tobytes() + b"tail"
    structure = Structure(
        format="any",
        spans=(SpanPlace(offset, 1600),),
        tensors=(
            TensorPlace("all", "float64", (200,), 0, 0, 200),
            TensorPlace("part", "float64", (60,), 0, 100, 160),
            TensorPlace("other", "float32", (20,), 0, 0, 20),
        ),
    )
    plan, envelope = plan_of(structure), blake3()
    one_pass = BytePass(plan, Part(0, len(data), 0, 1), envelope)
    position = 0
    for end in one_pass.ends(block):
        assert position < end <= position + block
        one_pass.add(memoryview(bytearray(data[position:end])))
        position = end
    assert position == len(data)
    whole, part, other = numbers_of(plan, one_pass.tallies)
    assert whole is not None
    assert part is not None
    assert other is not None
    assert (whole.count, whole.nan, whole.first_bad, whole.largest) == (200, 1, 150, 199.0)
    assert (part.count, part.nan, part.first_bad, part.largest) == (60, 1, 50, 159.0)
    assert other.count == 20
    assert one_pass.digests == [blake3(values.tobytes()).hexdigest()]
    assert envelope.hexdigest() == blake3(b"e" * offset + b"tail").hexdigest()


def test_constant_zero_and_masks(tmp_path: Path) -> None:
    """Constant, zero and mask-like tensors are told apart, across blocks too."""
    large = torch.zeros(400_000)
    mask = torch.full((9, 9), -math.inf).triu(1)
    last = large.clone()
    last[-1] = 1
    tensors = {"zero": large, "negative": -large, "mask": mask, "ones": torch.ones(5), "last": last}
    file = scan_of(tmp_path, "c.pt", torch_bytes(tensors)).files[0]
    found = {
        t.name: (n.constant, n.zero, n.single_finite)
        for t, n in zip(file.structure.tensors, file.numbers, strict=True)
        if n
    }
    assert found == {
        "zero": (True, True, True),
        "negative": (True, True, True),
        "mask": (False, False, True),
        "ones": (True, False, True),
        "last": (False, False, False),
    }


def test_integers_are_not_counted(tmp_path: Path) -> None:
    """Integer and bool tensors have no numbers."""
    file = scan_of(tmp_path, "i.pt", torch_bytes({"i": torch.arange(3), "b": torch.tensor([True])})).files[0]
    assert file.numbers == (None, None)


def test_a_file_that_changes_gets_no_result(tmp_path: Path) -> None:
    """A file that is written or cut while it is read raises, instead of being judged."""
    path = tmp_path / "m.safetensors"
    data = safetensors_bytes({"w": torch.ones(MIB)})
    storage = open_storage(tmp_path)
    for change in (lambda: path.write_bytes(data[: 2 * MIB]), path.unlink):
        path.write_bytes(data)
        calls = iter([change])

        def progress(_: int, calls: object = calls) -> None:
            for call in calls:  # type: ignore[attr-defined]
                call()

        with pytest.raises(ChangedWhileReadError):
            scan_files(storage, ["m.safetensors"], progress=progress)
    with pytest.raises(StorageError):
        scan_files(storage, ["absent.pt"])


class _Failing:
    """A digest that fails at its second block."""

    def __init__(self) -> None:
        self.blocks = 0

    def update(self, data: memoryview, /) -> None:
        self.blocks += 1
        if self.blocks == 2:
            raise MemoryError("no room")

    def hexdigest(self) -> str:
        return ""


def test_an_error_in_a_thread_comes_out_and_nothing_hangs() -> None:
    """What fails in a digest's thread is raised to the feeder; the threads end all the same."""
    before = threading.active_count()
    threads = DigestThreads(2, 3)
    block = memoryview(bytearray(10))

    def feed_on() -> None:
        hashers = [_Failing(), hashlib.md5()]
        for _ in range(50):
            threads.wait_for_room()
            threads.feed(hashers, block)
        threads.drain()

    with pytest.raises(MemoryError):
        feed_on()
    threads.close()
    assert threading.active_count() == before


def test_importing_the_scan_is_light() -> None:
    """numpy and blake3 are loaded by the first scan, not by the import; torch never is."""
    code = (
        "import sys, ckptguard.scan, ckptguard.formats\n"
        "print([m for m in ('numpy', 'blake3', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

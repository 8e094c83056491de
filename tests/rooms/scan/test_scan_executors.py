"""Inline, threads, processes and parts of a file: one result, and "could not tell" whenever something fails."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.format_files import FLOATS, safetensors_bytes, some_tensors, torch_bytes

from ckptguard.errors import ChangedWhileReadError, ObjectMissingError, WorkerError
from ckptguard.formats.dcp import metadata as dcp_metadata
from ckptguard.scan import Scan, Scanner, ScanOptions, one_file, scan_files, scanner_of
from ckptguard.scan.numbers import ArrayTally, Reading
from ckptguard.scan.one_file import Structures
from ckptguard.scan.plan import Region, parts_of
from ckptguard.scan.process.process_scanner import ProcessScanner
from ckptguard.scan.process.worker_process import WorkerLimits
from ckptguard.scan.tallies import merge
from ckptguard.storage import open_storage
from ckptguard.values.settings import Settings

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every format, two of them large enough to be cut into parts."""
    made = tmp_path_factory.mktemp("files")
    generator = torch.Generator().manual_seed(3)
    large = {f"w{i}": torch.randn(MIB, generator=generator) for i in range(6)}
    large["w2"][12_345] = math.nan
    large["b"] = torch.randn(3 * MIB + 1, generator=generator).to(torch.bfloat16)
    (made / "large.safetensors").write_bytes(safetensors_bytes(large))
    (made / "large.pt").write_bytes(torch_bytes({**large, "view": large["w3"][::2]}))
    (made / "small.safetensors").write_bytes(safetensors_bytes(some_tensors()))
    (made / "small.pt").write_bytes(torch_bytes(some_tensors()))
    (made / "legacy.pt").write_bytes(torch_bytes(some_tensors(), _use_new_zipfile_serialization=False))
    np.savez(made / "arrays.npz", a=np.arange(9.0), b=np.ones(3, "f4"))
    (made / "notes.bin").write_bytes(bytes(range(256)) * 9000)
    (made / "empty.json").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process only
        dcp.save({"m": torch.arange(700.0), "n": torch.ones(3)}, checkpoint_id=made / "dcp", no_dist=True)
    return made


def keys_of(folder: Path) -> list[str]:
    """All files below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def scan_in(folder: Path, options: ScanOptions, workers: int) -> Scan:
    """What so many threads find in all files, but for how long it took."""
    scanner = scanner_of(Settings(workers=workers))
    return untimed(scanner(open_storage(folder), keys_of(folder), options, None))


def untimed(scan: Scan) -> Scan:
    """A scan without its time."""
    return msgspec.structs.replace(scan, seconds=0.0)


@pytest.mark.parametrize("options", [ScanOptions(sums=("sha256",)), ScanOptions(md5=False)], ids=["md5", "blake3"])
def test_threads_and_processes_find_the_same(folder: Path, options: ScanOptions) -> None:
    """Digests, numbers, problems and structures are equal, also of files that another file explains."""
    inline = scan_in(folder, options, workers=1)
    assert scan_in(folder, options, workers=3) == inline
    with ProcessScanner(WorkerLimits(memory=2**32, seconds=60)) as scanner:
        assert untimed(scanner(open_storage(folder), keys_of(folder), options)) == inline
    assert [f.entry.key for f in inline.files] == keys_of(folder)
    shard = next(f for f in inline.files if f.entry.key.endswith(".distcp"))
    assert {t.name for t in shard.structure.tensors} == {"m", "n"}
    assert inline.file("large.pt").numbers[2].first_bad == 12_345  # type: ignore[union-attr]


@pytest.mark.parametrize("reverse", [False, True])
def test_what_explains_another_file_is_read_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """``.metadata`` is scanned itself and explains the shard, in whichever order; another one is another."""
    seen: list[int] = []
    real = dcp_metadata.read_metadata_pickle
    monkeypatch.setattr(dcp_metadata, "read_metadata_pickle", lambda data: [seen.append(len(data)), real(data)][1])
    keys = sorted((".metadata", "__0_0.distcp"), reverse=reverse)
    scan = scan_files(open_storage(folder / "dcp"), keys)
    assert len(seen) == 1
    assert [len(file.structure.tensors) for file in scan.files] == [2, 2]
    structures = Structures(open_storage(tmp_path))
    for count in (1, 2):
        (tmp_path / ".metadata").unlink(missing_ok=True)
        state = {f"t{n}": torch.ones(n + 1) for n in range(count)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        with open_storage(tmp_path).open(".metadata") as reader:
            assert len(structures.read(reader, ".metadata").tensors) == count


def test_large_files_are_cut_into_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without whole-file digests, spans of one file are read by several threads."""
    readers: set[str] = set()
    everyone = threading.Barrier(2, timeout=100)

    class Watched(one_file.ThreadBuffers):
        def run(self, *arguments: object) -> None:
            if threading.current_thread().name not in readers:
                readers.add(threading.current_thread().name)
                everyone.wait()  # only another thread can let this one go on
            super().run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(one_file, "ThreadBuffers", Watched)
    options = ScanOptions(md5=False, workers=2)
    assert scan_files(open_storage(folder), ["large.safetensors"], options).files[0].md5 is None
    assert len(readers) == 2


@pytest.mark.parametrize("md5", [True, False])
def test_a_wrong_crc_names_its_tensor_in_any_part(folder: Path, tmp_path: Path, md5: bool) -> None:
    """Damage in the last span of a file in parts is found and named as in one pass."""
    data = bytearray((folder / "large.pt").read_bytes())
    storage = open_storage(folder)
    structure = scan_files(storage, ["large.pt"], ScanOptions(structure_only=True)).files[0].structure
    data[structure.spans[-1].offset + 5] ^= 1
    (tmp_path / "large.pt").write_bytes(data)
    (file,) = scan_files(open_storage(tmp_path), ["large.pt"], ScanOptions(md5=md5, workers=3)).files
    last = len(structure.spans) - 1
    assert [p.tensor for p in file.structure.problems] == [next(t.name for t in structure.tensors if t.span == last)]


def test_parts_hold_every_span_whole() -> None:
    """Parts cover all regions once and in order; a wide gap is left between two of them."""
    ends = [(100, 200), (200, 1000), (1010, 1100), (200_000, 200_100), (200_100, 200_100 + 5000), (205_100, 205_110)]
    regions = [Region(begin, end, None, ()) for begin, end in ends]
    parts = parts_of(regions, 900)
    assert [(p.begin, p.end) for p in parts] == [(100, 1000), (1010, 1100), (200_000, 205_100), (205_100, 205_110)]
    assert [i for p in parts for i in range(p.first_region, p.last_region)] == list(range(6))


def test_a_change_under_several_threads(tmp_path: Path) -> None:
    """Files that are cut or removed while several threads read them are never judged."""
    data = safetensors_bytes({f"w{i}": torch.ones(MIB) for i in range(6)})
    names = ["a.safetensors", "b.safetensors"]

    def cut() -> None:
        os.truncate(tmp_path / names[1], len(data) - 10)

    def remove() -> None:
        (tmp_path / names[1]).unlink()

    def replace() -> None:
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").rename(tmp_path / names[1])

    for change in (cut, remove, replace):
        for md5 in (True, False):  # a thread for each of two files, and two threads for one
            for name in names:
                (tmp_path / name).write_bytes(data)
            both_read = threading.Barrier(2, action=change, timeout=100)  # nobody reads on before the change is made
            keys = names if md5 else names[1:]
            with pytest.raises(ChangedWhileReadError) as caught:
                scan_files(open_storage(tmp_path), keys, ScanOptions(md5=md5, workers=2), after_both(both_read))
            assert caught.value.key == names[1]


def after_both(both_read: threading.Barrier) -> Callable[[int], None]:
    """A progress that waits until two threads have read a block."""
    first_blocks: set[int] = set()
    lock = threading.Lock()

    def progress(_: int) -> None:
        with lock:
            mine = threading.get_ident() not in first_blocks and len(first_blocks) < 2
            first_blocks.add(threading.get_ident())
        if mine:
            both_read.wait()

    return progress


def test_the_reason_is_raised_and_all_threads_end(folder: Path) -> None:
    """Of many files one is gone: that is the error, and nobody works on."""
    before = threading.active_count()
    storage = open_storage(folder)
    for md5 in (True, False):
        with pytest.raises(ObjectMissingError) as caught:
            scan_files(storage, ["large.pt", "large.safetensors", "gone.pt"], ScanOptions(md5=md5, workers=3))
        assert caught.value.key == "gone.pt"

    def fail(_: int) -> None:
        raise BrokenPipeError("nobody watches")

    for md5 in (True, False):
        with pytest.raises(BrokenPipeError):
            scan_files(storage, ["large.pt", "large.safetensors"], ScanOptions(md5=md5, workers=3), fail)
    assert threading.active_count() == before


def test_a_process_keeps_to_its_memory(tmp_path: Path) -> None:
    """A header that needs more memory than a process may take is not judged."""
    names = {f"layer.{n}.{'x' * 900}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(80_000)}
    header = msgspec.json.encode(names)
    (tmp_path / "big.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "other.safetensors").write_bytes(safetensors_bytes({"w": torch.ones(3)}))
    with ProcessScanner(WorkerLimits(memory=256 * MIB, seconds=60)) as scanner, pytest.raises(WorkerError):
        scanner(open_storage(tmp_path), ["big.safetensors", "other.safetensors"], ScanOptions(), None)


def test_a_process_keeps_to_its_time(folder: Path) -> None:
    """A scan past its time is WorkerError."""
    scanner: Scanner
    with ProcessScanner(WorkerLimits(memory=2**32, seconds=0.001)) as scanner, pytest.raises(WorkerError):
        scanner(open_storage(folder), ["large.pt", "large.safetensors"], ScanOptions(), None)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_rms_does_not_depend_on_blocks(dtype: torch.dtype) -> None:
    """The root mean square is that of all elements in small tensors, near it in large ones, and never a matter of
    how the bytes came."""
    name = str(dtype).removeprefix("torch.")
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    values[100:102] = math.nan
    data = memoryview(values.view(torch.uint8).numpy().tobytes())
    size = values.element_size()

    def rms(part: memoryview, block: int) -> float | None:
        tally = ArrayTally(Reading(name, "little"))
        for begin in range(0, len(part), block * size):
            tally.add(part[begin : begin + block * size])
        return merge([tally]).rms

    found = {rms(data, block) for block in (300_000, 65_536, 4096, 999, 31_000)}
    assert len(found) == 1
    exact = values.to(torch.complex128 if dtype.is_complex else torch.float64)
    exact = (torch.view_as_real(exact) if dtype.is_complex else exact).reshape(-1)
    assert found.pop() == pytest.approx(float(exact[exact.isfinite()].square().mean().sqrt()), rel=0.02)
    few = exact[: 2000 * (2 if dtype.is_complex else 1)]
    small = rms(data[: 2000 * size], 123)
    assert small == pytest.approx(float(few[few.isfinite()].square().mean().sqrt()), rel=1e-12)


def test_rms_of_extremes() -> None:
    """Huge values do not overflow, and nothing finite has no mean."""

    def rms(values: list[float]) -> float | None:
        tally = ArrayTally(Reading("float64", "little"))
        tally.add(memoryview(np.array(values).tobytes()))
        return merge([tally]).rms

    assert rms([1e300, -1e300, math.inf]) == pytest.approx(1e300)
    assert rms([math.nan, math.inf]) is None
    assert rms([0.0, -0.0]) == 0.0

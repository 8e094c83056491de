"""Our safetensors files: what others read, what the manifest says, and no load of damaged bytes."""

import contextlib
import fcntl
import math
import os

import pytest
import safetensors.torch
import torch
from support.faults import flip

from ckptguard.errors import SickTrainingError, StateError, StorageFullError
from ckptguard.scan import scan_files
from ckptguard.storage import open_storage
from ckptguard.training.content.safetensors_file import (
    FileStream,
    NotAsSealed,
    fitting,
    plan_file,
    read_file,
    write_tensors,
)
from ckptguard.training.content.tensor_bytes import is_finite, view_of
from ckptguard.verification.collect_evidence import manifest_file

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def tensors():
    """Every dtype, a scalar, an empty one, views with gaps, and a tied pair."""
    torch.manual_seed(0)
    made = {f"t.{str(d).removeprefix('torch.')}": (torch.rand(3, 5) * 4).to(d) for d in DTYPES}
    square = torch.randn(6, 6)
    made |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "turned": square.t(), "every.2nd": square[:, ::2]}
    tied = torch.randn(4)
    return made | {"head": tied, "body": tied}


def write(folder, values, key="a.safetensors"):
    """Write; returns the manifest's File."""
    descriptor = os.open(folder / key, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with contextlib.closing(FileStream(descriptor, key=key, where=str(folder))) as stream:
            file = write_tensors(stream, values, key=key, role="model")
            stream.finish()
            return file
    finally:
        os.close(descriptor)


def raw(tensor):
    """The bytes of a tensor's elements."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_others_read_what_was_written(tmp_path):
    """The reference implementation loads every tensor, bit for bit; tied names are stored once."""
    values = tensors()
    write(tmp_path, values)
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(values) - set(loaded) == {"body"}
    for name, tensor in loaded.items():
        assert tensor.dtype == values[name].dtype
        assert raw(tensor).equal(raw(values[name]))


def test_a_conjugated_view_has_numbers_of_its_own(tmp_path):
    """It shares the memory of the other, and is no other name of it."""
    plain = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j])
    assert write(tmp_path, {"plain": plain, "turned": plain.conj()}).aliases == ()
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert loaded["turned"].equal(plain.conj().resolve_conj())


def test_the_manifest_is_what_a_scan_finds(tmp_path):
    """Digests taken from memory while writing are those of the bytes on disk: spans, envelope, size, tensors."""
    file = write(tmp_path, tensors())
    (scanned,) = scan_files(open_storage(str(tmp_path)), ["a.safetensors"]).files
    assert not scanned.structure.problems
    assert (file.size, file.envelope, file.format) == (scanned.entry.size, scanned.envelope, scanned.structure.format)
    assert [(s.offset, s.length) for s in file.spans] == [(s.offset, s.length) for s in scanned.structure.spans]
    assert [s.blake3 for s in file.spans] == list(scanned.span_digests)
    found = {t.name: (t.dtype, t.shape, t.span) for t in scanned.structure.tensors}
    assert {t.name: (t.dtype, t.shape, t.span) for t in file.tensors} == found
    assert file.aliases == ("body",)
    assert all(s.offset % 8 == 0 for s in file.spans[:2])


def values_of(dtype, size):
    """Values of a type by their bits: any bits, and what is finite of them; equal ones, zeros and huge ones."""
    generator = torch.Generator().manual_seed(size)
    unit = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.bool:
        return {"any": torch.rand(size, generator=generator) < 0.5}
    bits = torch.randint(0, 256, (size * unit,), dtype=torch.uint8, generator=generator)
    made = {"any": bits.view(dtype), "zero": torch.zeros(size, dtype=dtype), "one": torch.ones(size, dtype=dtype)}
    if dtype.is_floating_point or dtype.is_complex:
        made |= {"finite": (torch.rand(size, generator=generator) - 0.5).to(dtype)}
        made |= {"one bad": made["finite"].clone(), "all bad": torch.full((size,), float("nan"), dtype=dtype)}
        made["one bad"][size // 2 : size // 2 + 1] = float("inf")
    if dtype == torch.float64:
        made["huge"] = made["finite"] * 1e300
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(0, 1, 3), (1, 16, 17, 1000, 8192, 40_000), (700_001,)], ids=str)
def test_a_save_records_the_numbers_of_a_scan(dtype, sizes, tmp_path):
    """Of every type and any values: largest, rms and zeros, to the last digit, however large the tensor and the
    file. What has no floats has none."""
    values = {f"{name}.{size}": one for size in sizes for name, one in values_of(dtype, size).items()}
    values |= {f"{name} in gaps": one[::3] for name, one in values.items()} | {"scalar": values_of(dtype, 1)["any"][0]}
    file = write(tmp_path, values)
    (scanned,) = scan_files(open_storage(str(tmp_path)), ["a.safetensors"]).files
    found = manifest_file(scanned, ("model",) * len(scanned.structure.tensors)).tensors
    assert {t.name: t for t in file.tensors} == {t.name: t for t in found}
    has_floats = dtype.is_floating_point or dtype.is_complex
    assert all((t.largest is None) is not (has_floats and math.prod(t.shape) > 0) for t in file.tensors)


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    """The order of names does not matter."""
    values = {n: t for n, t in tensors().items() if n not in ("head", "body")}
    write(tmp_path, values, "a.safetensors")
    write(tmp_path, dict(reversed(values.items())), "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_loading_in_place(tmp_path):
    """Tensors that are there get their elements where they are, also those with gaps; aliases too."""
    values = tensors()
    file = write(tmp_path, values)
    targets = {n: torch.zeros_like(t, memory_format=torch.preserve_format) for n, t in values.items()}
    targets["turned"] = torch.zeros(6, 6).t()
    before = {n: t.data_ptr() for n, t in targets.items()}
    with open_storage(str(tmp_path)).open("a.safetensors") as reader:
        loaded = read_file(reader, file, targets)
    assert set(loaded) == set(values)
    assert {n: t.data_ptr() for n, t in targets.items()} == before
    for name, tensor in targets.items():
        assert raw(tensor).equal(raw(values[name]))


@pytest.mark.parametrize("place", [0, 9, 200, -1, -100])
def test_damaged_bytes_are_not_loaded(tmp_path, place):
    """One flipped bit anywhere in the file is noticed while it is loaded."""
    file = write(tmp_path, tensors())
    path = tmp_path / "a.safetensors"
    flip(path, place, 4, new_times=True)
    with (
        open_storage(str(tmp_path)).open("a.safetensors") as reader,
        pytest.raises(NotAsSealed, match=r"a\.safetensors"),
    ):
        read_file(reader, file, {})


def test_another_shape_is_refused_before_anything_is_touched(tmp_path):
    """A target that does not fit is a StateError that names both, and stays as it was."""
    file = write(tmp_path, {"w": torch.ones(2, 3)})
    target = torch.zeros(3, 2)
    with open_storage(str(tmp_path)).open("a.safetensors") as reader, pytest.raises(StateError, match=r"\[3, 2\]"):
        read_file(reader, file, {"w": target})
    assert not target.any()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.empty(2, device="meta")],
    ids=["complex128", "sparse", "meta"],
)
def test_what_safetensors_cannot_hold_is_refused(tensor):
    """StateError names the tensor before anything is written."""
    with pytest.raises(StateError, match=r"layers\.0"):
        plan_file({"layers.0": tensor})


def test_a_full_disk_says_so(tmp_path, monkeypatch):
    """No space left is a StorageFullError."""
    real = os.write

    def full(descriptor, data):
        if len(data) > 4096:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFullError, match="no space left"):
        write(tmp_path, {"w": torch.zeros(100_000)})


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str)
def test_nan_and_infinity_are_found_exactly(dtype):
    """By their bits, in every float type: each value of the small types, each kind of value of the others."""
    size = torch.empty(0, dtype=dtype).element_size()
    if size <= 2:
        bits = torch.arange(2 ** (8 * size)).to(torch.uint8 if size == 1 else torch.int16)
        values = bits.view(dtype)
    else:
        parts = [0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-45, float("nan"), float("inf"), float("-inf")]
        values = torch.tensor([complex(a, b) for a in parts for b in parts] if dtype.is_complex else parts, dtype=dtype)
    finite = torch.view_as_real(values).isfinite().all(-1) if dtype.is_complex else values.float().isfinite()
    name = str(dtype).removeprefix("torch.")
    whole = view_of(values)
    for number, fine in enumerate(finite.tolist()):
        assert is_finite(whole[number * size : (number + 1) * size], name) is fine
    assert is_finite(view_of(values[finite].contiguous()), name)
    assert not is_finite(whole, name)


def test_poison_is_neither_written_nor_loaded(tmp_path):
    """NaN is refused by name where it is said to be wrong, and passes where it is not."""
    poisoned = {"fine": torch.ones(3), "w": torch.tensor([1.0, float("nan")])}
    asked = []
    file = write(tmp_path, poisoned)

    def sick(name, tensor):
        asked.append(name)
        return bool(tensor.isnan().any())

    with open_storage(str(tmp_path)).open("a.safetensors") as reader:
        assert set(read_file(reader, file, {})) == {"fine", "w"}
        with pytest.raises(NotAsSealed, match=r"^w in a\.safetensors holds NaN or infinity$"):
            read_file(reader, file, {}, sick=sick)
    with open(tmp_path / "b", "wb") as target:
        stream = FileStream(target.fileno(), key="b", where=str(tmp_path))
        with contextlib.closing(stream), pytest.raises(SickTrainingError, match="w holds NaN"):
            write_tensors(stream, poisoned, key="b", role="model", sick=sick)
    assert asked == ["w", "w"]


def test_moments_that_are_there_are_loaded_in_place(tmp_path):
    """What fits takes the elements where it is; what has another shape, gaps or shared memory is made anew."""
    values = {"a": torch.ones(4), "b": torch.ones(4) * 2, "c": torch.ones(2, 2), "d": torch.ones(4), "e": torch.ones(4)}
    file = write(tmp_path, values)
    shared = torch.zeros(4)
    there = {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.zeros(4, 2)[::2], "d": shared, "e": shared}
    assert set(fitting(file, there)) == {"a"}


def test_a_file_system_without_direct_writes_gets_the_same_bytes(tmp_path, monkeypatch):
    """Whether it says so when asked or at the first write."""
    values = {"w": torch.randn(2_000_000)}
    write(tmp_path, values, "a.safetensors")
    real, refused = os.write, []

    def refuse(descriptor, data):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(22, "Invalid argument")
        return real(descriptor, data[: len(data) // 2 + 1])

    monkeypatch.setattr(os, "write", refuse)
    write(tmp_path, values, "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert len(refused) <= 1

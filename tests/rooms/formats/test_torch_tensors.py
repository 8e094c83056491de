"""Every kind of tensor that torch saves: exact numbers where it holds floats, no alarm where it is clean."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.format_files import bad_numbers, repacked, safetensors_bytes, scan_of, structure_of, torch_bytes
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ckptguard.formats.dtypes import DTYPES
from ckptguard.scan import ScannedFile

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of half of these types

NAN = math.nan

# dtype -> (bits of 1.0, bits of one NaN, bits of +infinity if it has one)
FLOAT_BITS: dict[torch.dtype, tuple[int, int, int | None]] = {
    torch.float64: (0x3FF0000000000000, 0x7FF0000000000001, 0x7FF0000000000000),
    torch.float32: (0x3F800000, 0xFF800001, 0x7F800000),
    torch.float16: (0x3C00, 0x7C01, 0x7C00),
    torch.bfloat16: (0x3F80, 0xFF81, 0x7F80),
    torch.float8_e4m3fn: (0x38, 0xFF, None),
    torch.float8_e5m2: (0x3C, 0x7D, 0x7C),
    torch.float8_e4m3fnuz: (0x40, 0x80, None),
    torch.float8_e5m2fnuz: (0x40, 0x80, None),
}
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    FLOAT_BITS[torch.float8_e8m0fnu] = (0x7F, 0xFF, None)
COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
PACKED = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))  # since torch 2.8
BITS = (torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2)
OPAQUE = (*PACKED, *BITS, *QUANTISED)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
EVERY = (*FLOAT_BITS, *COMPLEX, *OPAQUE, *INTEGERS, *UNSIGNED)

SINCE_2_5 = hasattr(torch.nn, "Buffer")

Writer = Callable[[dict[str, object]], bytes]


def zipped(state: dict[str, object]) -> bytes:
    """As torch.save writes it."""
    return torch_bytes(state)


def legacy(state: dict[str, object]) -> bytes:
    """As torch.save wrote it before its zip format."""
    return torch_bytes(state, _use_new_zipfile_serialization=False)


def safe(state: dict[str, object]) -> bytes:
    """As safetensors writes it."""
    return safetensors_bytes({name: t for name, t in state.items() if isinstance(t, torch.Tensor)})


WRITERS: dict[str, Writer] = {"m.pt": zipped, "m.pth": legacy, "m.safetensors": safe}
TORCH_WRITERS = [(name, writer) for name, writer in WRITERS.items() if writer is not safe]


def size_of(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return DTYPES[str(dtype).removeprefix("torch.")].size


def patterns(dtype: torch.dtype, bits: list[int]) -> torch.Tensor:
    """A tensor of exactly these bits."""
    size = size_of(dtype)
    raw = b"".join(b.to_bytes(size, "little") for b in bits)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def clean(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of 12 elements that are all right."""
    if dtype in FLOAT_BITS:
        return patterns(dtype, [FLOAT_BITS[dtype][0]] * 12)
    if dtype in COMPLEX:
        return patterns(COMPLEX[dtype], [FLOAT_BITS[COMPLEX[dtype]][0]] * 24).view(dtype)
    return torch.arange(12 * size_of(dtype), dtype=torch.uint8).view(dtype)


def saved(tmp_path: Path, name: str, state: dict[str, object]) -> ScannedFile:
    """The scan of a file of this state; a structure problem fails."""
    file = scan_of(tmp_path, name, WRITERS[name](state)).files[0]
    assert file.structure.problems == ()
    return file


def can_save(dtype: torch.dtype, name: str) -> bool:
    """safetensors has no words for complex numbers but complex64, nor for quantised ones; torch before 2.5 has none
    for the larger unsigned ones."""
    if WRITERS[name] is safe:
        return dtype not in (torch.complex32, torch.complex128, *BITS, *QUANTISED)
    return SINCE_2_5 or dtype not in UNSIGNED[1:]


CASES = [(n, d) for n in WRITERS for d in EVERY if can_save(d, n)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_clean_tensor_of_every_type_raises_nothing(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Names, types and shapes are the writer's; nothing is found, also in empty and 0-dim tensors."""
    whole = clean(dtype)
    state = {"w": whole}
    if dtype not in OPAQUE:
        state |= {"empty": torch.empty(0, 3, dtype=dtype), "scalar": whole[1].clone()}
    file = saved(tmp_path, name, dict(state))
    assert bad_numbers(file) == {}
    assert file.structure.unread == ()
    assert file.structure.leaves == ()
    found = {t.name: t for t in file.structure.tensors}
    assert set(found) == set(state)
    if WRITERS[name] is safe and dtype in PACKED:
        return  # there it has a name of its own, and each half byte counts
    assert found["w"].shape == (12,)
    assert {t.dtype for t in found.values()} == {str(dtype).removeprefix("torch.")}
    known = DTYPES[found["w"].dtype]
    counted = dict(zip((t.name for t in file.structure.tensors), file.numbers, strict=True))["w"]
    assert (counted is None) == (known.float is None)


FLOAT_CASES = [(n, d) for n, d in CASES if d in FLOAT_BITS or d in COMPLEX]


@pytest.mark.parametrize(("name", "dtype"), FLOAT_CASES, ids=str)
def test_bad_numbers_of_every_float_type(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """NaN and infinity are counted exactly, with the first index, under the tensor's name."""
    part = COMPLEX.get(dtype, dtype)
    one, nan, infinity = FLOAT_BITS[part]
    bits = [one] * 24
    bits[7] = bits[20] = nan
    if infinity is not None:
        bits[5] = infinity
        bits[9] = infinity | 1 << (8 * size_of(part) - 1)
    file = saved(tmp_path, name, {"before": clean(dtype), "w": patterns(part, bits).view(dtype)})
    assert bad_numbers(file) == {"w": (2, 0 if infinity is None else 2, 7 if infinity is None else 5)}


BIG = [d for d in (*FLOAT_BITS, *COMPLEX) if size_of(d) > 1]


@pytest.mark.parametrize("dtype", BIG, ids=str)
def test_big_endian_archives(tmp_path: Path, dtype: torch.dtype) -> None:
    """An archive that says so holds its numbers with the highest byte first."""
    part = COMPLEX.get(dtype, dtype)
    one, nan, _ = FLOAT_BITS[part]
    size = size_of(part)
    tensor = patterns(part, [one] * 3 + [nan] + [one] * 8)
    data = torch_bytes({"w": tensor.view(dtype)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}
    raw = names["data/0"]
    swapped = b"".join(raw[i : i + size][::-1] for i in range(0, len(raw), size))
    file = scan_of(tmp_path, "big.pt", repacked(data, **{"byteorder": b"big", "data/0": swapped})).files[0]
    assert file.structure.problems == ()
    assert bad_numbers(file) == {"w": (1, 0, 3)}
    numbers = file.numbers[0]
    assert numbers is not None
    assert numbers.largest == 1.0


def test_legacy_files_are_little_endian_whatever_wrote_them(tmp_path: Path) -> None:
    """torch swapped the bytes of legacy storages as it wrote them on big-endian machines."""
    data = legacy({"w": torch.tensor([1.0, NAN, 2.0])})
    stated = b"little_endian\x71\x02\x88"
    assert data.count(stated) == 1
    file = scan_of(tmp_path, "m.pth", data.replace(stated, stated[:-1] + b"\x89")).files[0]
    assert bad_numbers(file) == {"w": (1, 0, 1)}


def with_nan() -> torch.Tensor:
    """4 x 6, with NaN at row 1, column 2."""
    tensor = torch.ones(4, 6)
    tensor[1, 2] = NAN
    return tensor


class Tagged(torch.Tensor):
    """A subclass that adds nothing."""


def parameter_with_attribute() -> torch.nn.Parameter:
    """A parameter that carries a tensor and a number of its own."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.extra = torch.tensor([1.0, NAN])  # type: ignore[attr-defined]
    return parameter


def module_with_nan() -> torch.nn.Module:
    """A whole module instead of its state."""
    module = torch.nn.Linear(2, 3)
    with torch.no_grad():
        module.weight[0, 1] = NAN
    return module


SPECIAL: dict[str, tuple[Callable[[], object], dict[str, tuple[int, int, int]]]] = {
    "parameter": (lambda: torch.nn.Parameter(with_nan()), {"w": (1, 0, 8)}),
    "attribute": (parameter_with_attribute, {"w.extra": (1, 0, 1)}),
    "subclass": (lambda: with_nan().as_subclass(Tagged), {"w": (1, 0, 8)}),
    "coo": (lambda: with_nan().to_sparse(), {"w.values": (1, 0, 8)}),
    "csr": (lambda: with_nan().to_sparse_csr(), {"w.values": (1, 0, 8)}),
    "csc": (lambda: with_nan().to_sparse_csc(), {"w.values": (1, 0, 9)}),
    "bsr": (lambda: with_nan().to_sparse_bsr((2, 2)), {"w.values": (1, 0, 6)}),
    "sparse parameter": (lambda: torch.nn.Parameter(with_nan().to_sparse()), {"w.values": (1, 0, 8)}),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.tensor([1.0, NAN])]),
        {"w.values": (1, 0, 4)},
    ),
    "scales": (
        lambda: torch.quantize_per_channel(
            torch.ones(3, 4), torch.tensor([0.1, NAN, 0.1]), torch.tensor([0, 0, 0]), 0, torch.qint8
        ),
        {"w.scales": (1, 0, 1)},
    ),
    "zero points": (
        lambda: torch.quantize_per_channel(
            torch.ones(3, 4), torch.tensor([0.1, 0.1, 0.1]), torch.tensor([0.0, 0.0, NAN]), 0, torch.quint4x2
        ),
        {"w.zero_points": (1, 0, 2)},
    ),
    "storage": (lambda: torch.FloatStorage([1.0, NAN]), {"w": (1, 0, 1)}),
    "transposed": (lambda: with_nan().t(), {"w": (1, 0, 8)}),
    "row": (lambda: with_nan()[1], {"w": (1, 0, 2)}),
    "other column": (lambda: with_nan()[:, 1], {}),
    "expanded": (lambda: torch.tensor([NAN]).expand(3, 3), {"w": (1, 0, 0)}),
    "0-dim": (lambda: torch.tensor(NAN), {"w": (1, 0, 0)}),
    "no elements": (lambda: with_nan()[:0], {}),
    "imaginary parts": (lambda: torch.tensor([1 + 1j, complex(1, NAN)]).imag, {"w": (1, 0, 1)}),
    "module": (module_with_nan, {"w.weight": (1, 0, 1)}),
}
if SINCE_2_5:
    SPECIAL["buffer"] = (lambda: torch.nn.Buffer(with_nan()), {"w": (1, 0, 8)})


@pytest.mark.parametrize("name", [name for name, _ in TORCH_WRITERS])
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tensors(tmp_path: Path, name: str, kind: str) -> None:
    """What is made of several tensors, or sees a part of one, is looked at exactly, by names that people know."""
    make, expected = SPECIAL[kind]
    file = saved(tmp_path, name, {"w": make()})
    assert bad_numbers(file) == expected
    assert file.structure.unread == ()


@pytest.mark.parametrize("name", [name for name, _ in TORCH_WRITERS])
def test_a_quantised_tensor_of_one_scale(tmp_path: Path, name: str) -> None:
    """Its one scale is a number in the pickle; a NaN there spoils every element."""
    clean_one = torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8)
    assert saved(tmp_path, name, {"w": clean_one}).structure.leaves == ()
    spoilt = torch._empty_affine_quantized((3,), scale=NAN, zero_point=0, dtype=torch.qint8)
    leaves = saved(tmp_path, name, {"w": spoilt}).structure.leaves
    assert [(leaf.name, math.isnan(leaf.value), leaf.of_array) for leaf in leaves] == [("w.scale", True, True)]


@pytest.mark.parametrize("name", [name for name, _ in TORCH_WRITERS])
def test_untyped_storages_are_not_called_clean(tmp_path: Path, name: str) -> None:
    """Bytes of no type may hold floats: nobody can look at them, and that is said."""
    assert saved(tmp_path, name, {"w": with_nan().untyped_storage()}).structure.unread == ("w",)


def test_views_of_storages_as_the_oldest_torch_wrote_them(tmp_path: Path) -> None:
    """A persistent id may point into another storage: elements are counted from there."""
    data = bytearray(legacy({"w": torch.tensor([NAN, 1.0, 2.0, 3.0])[2:]}))
    # ... K\x04 N t Q: four elements, no view -> a view of three elements from the second on
    at = data.index(b"K\x04Nt")
    data[at : at + 4] = b"K\x04U\x01vK\x01K\x03\x87t"
    at = data.index(b"Q", at)
    assert data[at : at + 3] == b"QK\x02"
    data[at + 2] = 1
    file = scan_of(tmp_path, "m.pth", bytes(data)).files[0]
    assert file.structure.problems == ()
    place = file.structure.tensors[0]
    assert (place.start, place.stop) == (2, 4)
    data[at + 2] = 2
    problems = structure_of(tmp_path, "m.pth", bytes(data)).problems
    assert [p.tensor for p in problems] == ["w"]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A device mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", [name for name, _ in TORCH_WRITERS])
def test_distributed_tensors(tmp_path: Path, name: str, mesh: DeviceMesh) -> None:
    """A DTensor's own elements go under its name; the mesh that all of them share is no state."""
    if SINCE_2_5:
        from torch.distributed.tensor import Replicate, distribute_tensor
    else:
        from torch.distributed._tensor import Replicate, distribute_tensor

    whole = [Replicate()]
    state: dict[str, object] = {f"scaler.{i}": distribute_tensor(torch.ones(2, 2), mesh, whole) for i in range(20)}
    state["w"] = torch.nn.Parameter(distribute_tensor(with_nan(), mesh, whole))
    file = saved(tmp_path, name, state)
    assert [t.name for t in file.structure.tensors] == list(state)
    assert bad_numbers(file) == {"w": (1, 0, 8)}
    assert (file.structure.unread, file.structure.leaves, file.structure.containers) == ((), (), ())


def test_a_float8_tensor_with_a_gradient_loads_nowhere(tmp_path: Path) -> None:
    """torch writes it, and cannot set the elements of what it made a leaf."""
    data = torch_bytes({"w": torch.zeros(3).to(torch.float8_e4m3fn).requires_grad_()})
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match="leaf"):
        torch.load(io.BytesIO(data), weights_only=True)
    assert structure_of(tmp_path, "w.pt", data).problems
    fine = torch_bytes({"w": torch.zeros(3).to(torch.float8_e4m3fn)})
    assert not structure_of(tmp_path, "v.pt", fine).problems

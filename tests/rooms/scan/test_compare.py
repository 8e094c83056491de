"""Two tensors side by side: exact distances in every type, whatever their order in the file, in bounded blocks."""

import math

import numpy as np
import pytest
import torch
from support.format_files import safetensors_bytes, torch_bytes

from ckptguard.formats import read_structure
from ckptguard.formats.structure import TensorPlace
from ckptguard.scan import compare as compare_module
from ckptguard.scan.compare import LocatedTensor, NotComparable, compare
from ckptguard.scan.decode import Decoder
from ckptguard.storage import open_storage

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.fixture
def stored(tmp_path):
    """Save one tensor with torch.save, and say where it is."""
    readers = []

    def place(tensor, *, data=None):
        name = f"{len(readers)}.{'safetensors' if data else 'pt'}"
        (tmp_path / name).write_bytes(data or torch_bytes({"t": tensor}))
        reader = open_storage(tmp_path).open(name)
        readers.append(reader)
        structure = read_structure(reader, name)
        assert structure.problems == ()
        [found] = structure.tensors
        return LocatedTensor(reader, structure.spans[found.span].offset, found)

    yield place
    for reader in readers:
        reader.close()


@pytest.fixture
def raw(tmp_path):
    """Bytes of a file as a tensor of a place of one's own."""
    count = iter(range(100))

    def place(data, **fields):
        name = f"raw{next(count)}"
        (tmp_path / name).write_bytes(data)
        defaults = {"name": "t", "span": 0, "start": 0}
        return LocatedTensor(open_storage(tmp_path).open(name), 0, TensorPlace(**defaults | fields))

    return place


def random(shape, dtype, seed):
    """Reproducible values of a type."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *SMALL_FLOATS], ids=str)
def test_every_float_type_is_decoded_as_torch_does(dtype):
    """All bit patterns of 8 and 16 bits, and many of larger ones, mean what torch says."""
    if dtype.itemsize == 1:
        tensor = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    elif dtype.itemsize == 2:
        tensor = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        tensor = torch.cat([random(500, dtype, 1), torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=dtype)])
    found = Decoder(str(dtype).removeprefix("torch."), "little").values(tensor.view(torch.uint8).numpy())
    expected = tensor.to(torch.float64).numpy()
    np.testing.assert_array_equal(found, expected)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()


@pytest.mark.parametrize("block", [7, 1 << 18])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_distances_are_those_of_the_values(stored, monkeypatch, dtype, block):
    """Relative L2, largest change and its index agree with torch in float64, whatever the block."""
    monkeypatch.setattr(compare_module, "_BLOCK", block)
    a, b = random((6, 11), dtype, 1), random((6, 11), dtype, 2)
    found = compare(stored(a), stored(b))
    x, y = a.double(), b.double()
    assert found.relative_l2 == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-12)
    assert found.largest_change == (x - y).abs().max().item()
    assert (x - y).abs()[found.largest_index].item() == found.largest_change
    assert found.differing == int((a.view(torch.uint8) != b.view(torch.uint8)).view(66, -1).any(1).sum())
    assert (found.count, found.became_nonfinite) == (66, 0)


def test_complex_elements_are_one_each(stored):
    """A complex element's change is its modulus, and it counts once."""
    a = torch.complex(random(40, torch.float32, 1), random(40, torch.float32, 2))
    b = a.clone()
    b[17] += 3 + 4j
    b[30] = complex(math.nan, 0)
    found = compare(stored(a), stored(b))
    assert found.largest_change == pytest.approx(5.0, rel=1e-6)
    assert (found.largest_index, found.differing, found.nan_b, found.became_nonfinite) == ((17,), 2, 1, 1)
    assert found.first_nonfinite == (30,)


def test_numbers_that_are_not_finite_are_counted_apart(stored, monkeypatch):
    """NaN and infinity spoil no distance; what became non-finite has its first index."""
    monkeypatch.setattr(compare_module, "_BLOCK", 5)
    a = random((4, 5), torch.bfloat16, 1)
    b = a.clone()
    a[0, 1] = b[0, 1] = math.nan
    b[2, 3], b[3, 0], b[3, 1] = math.nan, math.inf, a[3, 1] + 2
    a[3, 4] = -math.inf
    found = compare(stored(a), stored(b))
    assert (found.nan_a, found.inf_a, found.nan_b, found.inf_b) == (1, 1, 2, 1)
    assert (found.became_nonfinite, found.first_nonfinite) == (2, (2, 3))
    assert (found.largest_change, found.largest_index) == (2.0, (3, 1))
    assert math.isfinite(found.relative_l2)


def test_nothing_finite_has_no_distance(stored):
    """Where no element is finite on both sides there is no distance, and not one of zero."""
    found = compare(stored(torch.ones(3)), stored(torch.full((3,), math.inf)))
    assert (found.relative_l2, found.largest_change, found.became_nonfinite) == (None, None, 3)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e-310])
def test_norms_neither_overflow_nor_vanish(stored, scale):
    """The squares of float64 numbers may leave its range, the norms do not."""
    a = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
    found = compare(stored(a), stored(a * 1.5))
    assert found.relative_l2 == pytest.approx(0.5, rel=1e-6)


def test_a_change_from_zero_is_infinitely_far(stored):
    """Against a tensor of zeros every change is infinite, and none is none."""
    zero = torch.zeros(4)
    assert compare(stored(zero), stored(torch.ones(4))).relative_l2 == math.inf
    signs = compare(stored(zero), stored(-zero))
    assert (signs.relative_l2, signs.differing) == (0.0, 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.int16], ids=str)
def test_integers_are_counted(stored, dtype):
    """Integers have no distance; elements that differ are counted."""
    a = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    b = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    found = compare(stored(a), stored(b))
    assert (found.count, found.differing, found.relative_l2) == (5, 2, None)


def test_other_types_are_compared_by_value(stored):
    """float32 against bfloat16 differs by the rounding; equal integers of other sizes do not differ."""
    a = random((8, 8), torch.float32, 1)
    found = compare(stored(a), stored(a.bfloat16()))
    assert found.largest_change == (a - a.bfloat16().float()).abs().max().item()
    assert compare(stored(torch.arange(5)), stored(torch.arange(5, dtype=torch.int8))).differing == 0
    assert compare(stored(torch.arange(5)), stored(torch.arange(5.0))).differing == 0


def test_a_transposed_view_is_compared_by_index(stored):
    """The order of the elements in the file does not matter, only that of their indices."""
    a = random((5, 7), torch.float32, 1)
    view = a.t().contiguous().t()
    assert not view.is_contiguous()
    assert compare(stored(a), stored(view)).differing == 0
    changed = view.clone(memory_format=torch.preserve_format)
    changed[3, 2] += 9
    found = compare(stored(view), stored(changed))
    assert (found.differing, found.largest_index) == (1, (3, 2))


def test_views_with_gaps_and_repetitions_are_compared_by_index(stored):
    """A slice leaves elements out, an expanded tensor repeats them."""
    base = random((6, 6), torch.float32, 1)
    other = base.clone()
    other[:, 1::2] += 1  # outside the view
    assert compare(stored(base[:, ::2]), stored(other[:, ::2])).differing == 0
    row = random((1, 4), torch.float32, 2)
    assert compare(stored(row.expand(3, 4)), stored(row.expand(3, 4).contiguous())).differing == 0


def test_another_byte_order_is_the_same_value(raw):
    """Big-endian elements are compared with little-endian ones by value."""
    numbers = np.arange(6, dtype="<f4") + 0.5
    fields = {"dtype": "float32", "shape": (2, 3), "stop": 6}
    little, big = raw(numbers.tobytes(), **fields), raw(numbers.astype(">f4").tobytes(), byte_order="big", **fields)
    found = compare(little, big)
    assert (found.differing, found.relative_l2) == (0, 0.0)


def test_formats_do_not_matter(stored):
    """The same tensor in safetensors and in a torch archive is the same."""
    tensor = random((3, 9), torch.float16, 4)
    assert compare(stored(tensor), stored(None, data=safetensors_bytes({"t": tensor}))).differing == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F4", "shape": (4,), "stop": 4},
        {"dtype": "float32", "shape": (2, 2), "stop": 3},
        {"dtype": "float32", "shape": (2, 2), "stop": 4, "strides": (3, 2)},
        {"dtype": "float32", "shape": (2, 2), "stop": 4, "strides": (-2, 1)},
        {"dtype": "float32", "shape": (1 << 40, 2), "stop": 2, "strides": (0, 1)},
        {"dtype": "complex64", "shape": (2, 1), "stop": 2},
        {"dtype": "qint8", "shape": (2, 2), "stop": 4},
    ],
    ids=lambda f: f"{f['dtype']}{f['shape']}{f.get('strides', '')}",
)
def test_what_cannot_be_put_side_by_side_says_so(raw, fields):
    """Opaque types, impossible strides and absurd sizes end in a sentence before anything is read or allocated."""
    plain = raw(bytes(16), dtype="float32", shape=fields["shape"], stop=4)
    with pytest.raises(NotComparable):
        compare(plain, raw(bytes(16), **fields))


def test_large_tensors_in_another_order_are_not_gathered(stored, monkeypatch):
    """Putting elements in order takes all of them into memory, so it has a limit."""
    monkeypatch.setattr(compare_module, "_LARGEST_GATHERED", 64)
    a = random((5, 7), torch.float32, 1)
    with pytest.raises(NotComparable, match="another order"):
        compare(stored(a), stored(a.t().contiguous().t()))

"""Shapes beyond what loaders can count: zeros in them help some loaders and not others. GOOD means that all load it."""

import json
import struct
import tempfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.format_files import structure_of, torch_bytes

SIZES = st.sampled_from([0, 0, 1, 2, 3, 4, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64])
SHAPES = st.lists(SIZES, min_size=1, max_size=4).map(tuple)


class Made:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def plain(shape):
    """A tensor of no elements, or of one that is repeated: torch needs no memory for it."""
    strides = (0,) * len(shape)
    storage = torch.zeros(4).storage()
    return torch_bytes({"w": Made(torch._utils._rebuild_tensor_v2, storage, 0, shape, strides, False, OrderedDict())})


def sparse(shape):
    """A sparse tensor of one element."""
    indices, values = torch.zeros(len(shape), 1, dtype=torch.int64), torch.ones(1)
    parts = (indices, values, Made(torch.Size, shape), True)
    return torch_bytes({"w": Made(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, parts)})


def size(shape):
    """A shape that nothing has."""
    return torch_bytes({"shape": Made(torch.Size, shape)})


def flat(shape):
    """A safetensors file without data."""
    header = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(header)) + header


def array(shape):
    """A numpy file without data."""
    header = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def load_torch(data):
    """With `weights_only` and without."""
    for weights_only in (True, False):
        torch.load(BytesIO(data), weights_only=weights_only)


def load_safetensors(data):
    """By both of its loaders."""
    safetensors.torch.load(data)
    safetensors.numpy.load(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "load", "name", "whole_with_zero"),
    [
        (plain, load_torch, "w.pt", None),
        (sparse, load_torch, "w.pt", False),
        (size, load_torch, "w.pt", None),
        (flat, load_safetensors, "w.safetensors", True),
        (array, lambda data: np.load(BytesIO(data)), "w.npy", True),
    ],
)
@settings(max_examples=150, deadline=None, database=None)
@given(shape=SHAPES)
def test_what_is_called_whole_loads(make, load, name, whole_with_zero, shape):
    """Every loader of the format takes a file in which no problem is found. Small sizes are none, but for the files
    without data: these need a zero, which a sparse tensor with an element cannot have."""
    data = make(shape)
    with tempfile.TemporaryDirectory() as folder:
        found = structure_of(Path(folder), name, data)
    if found.problems:
        assert max(shape) >= 2**31 or (whole_with_zero is not None and (0 in shape) is not whole_with_zero)
    else:
        load(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", ["2", 1.5, None, (2,), True, [2]])
@pytest.mark.parametrize("make", [plain, sparse, size])
def test_what_is_no_size_is_a_problem(tmp_path, make, wrong):
    """Anything may stand in a pickle where a size belongs."""
    assert structure_of(tmp_path, "w.pt", make((2, wrong))).problems

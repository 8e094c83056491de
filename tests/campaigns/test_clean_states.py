"""Random clean state dicts through every writer: no false alarm, whatever the names, shapes, dtypes and views."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.runs import QUICK, save_file

from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verify.selection import Selection
from ckptguard.verify.target import verify_target

EXAMPLES = 2000 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 60

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

names = (
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12), min_size=1, max_size=4
    )
    .map(".".join)
    .filter(lambda name: name != "__metadata__")
)  # safetensors keeps it for itself
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw, kinds):
    """A finite tensor: ordinary values, extremes of its dtype, subnormals, negative zeros; sometimes a view."""
    dtype = draw(st.sampled_from(kinds))
    shape = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype in WHOLE:
        tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    elif dtype in COMPLEX:
        tensor = torch.view_as_complex(torch.randn(*shape, 2, generator=generator).contiguous()).to(dtype)
    else:
        tensor = torch.randn(shape, generator=generator).clamp(-3, 3).add(0.01).to(dtype)
        extreme = draw(st.sampled_from(("none", "max", "tiny", "negative zero")))
        if extreme != "none" and tensor.numel() > 2 and dtype in FLOATS:
            info = torch.finfo(dtype)
            tensor.view(-1)[0] = {"max": info.max, "tiny": info.tiny / 2, "negative zero": -0.0}[extreme]
    view = draw(st.sampled_from(("none", "transposed", "narrowed", "expanded")))
    if view == "transposed" and tensor.ndim > 1:
        tensor = tensor.transpose(0, 1)
    elif view == "narrowed" and tensor.ndim and tensor.shape[0] > 1:
        tensor = tensor[1:]
    elif view == "expanded" and tensor.ndim == 0:
        tensor = tensor.expand(3)
    return tensor


def states(*kinds):
    """State dicts of at most six tensors, and one matrix that every model has."""
    return st.dictionaries(names, tensors(kinds), max_size=6).map(lambda s: {"layers.0.weight": torch.eye(3) + 1.0} | s)


def write_torch(state, folder):
    torch.save({"model": state, "step": 3, "tied": next(iter(state.values()))}, folder / "net-3.pt")


def write_legacy(state, folder):
    torch.save(state, folder / "net-3.pt", _use_new_zipfile_serialization=False)


def write_safetensors(state, folder):
    save_file(contiguous(state), folder / "net-3.safetensors")


def write_index(state, folder):
    (folder / "m-3").mkdir()
    flat = contiguous(state)
    flat |= {} if len(flat) > 1 else {"head.weight": torch.ones(2, 2)}
    shards = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(flat)}
    for shard in sorted(set(shards.values())):
        safetensors.torch.save_file({n: t for n, t in flat.items() if shards[n] == shard}, folder / "m-3" / shard)
    (folder / "m-3" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def write_npz(state, folder):
    arrays = {f"a{i}": t.numpy() for i, t in enumerate(state.values())}
    np.savez(folder / "weights-3.npz", **arrays)


def write_dcp(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state, "step": 3}, checkpoint_id=str(folder / "step-3"), no_dist=True)


def contiguous(state):
    """What safetensors takes: no shared storage, no strides."""
    return {n: t.contiguous().clone() for n, t in state.items()}


WRITERS = {
    "torch": (write_torch, (*FLOATS, *SMALL_FLOATS, *COMPLEX, *WHOLE)),
    "legacy": (write_legacy, (*FLOATS, *COMPLEX, *WHOLE)),
    "safetensors": (write_safetensors, (*FLOATS, *SMALL_FLOATS, torch.complex64, *WHOLE)),
    "index": (write_index, (*FLOATS, *WHOLE)),
    "npz": (write_npz, (torch.float64, torch.float32, torch.float16, *COMPLEX, *WHOLE)),
    "dcp": (write_dcp, (*FLOATS, *COMPLEX, *WHOLE)),
}


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_random_clean_states_raise_no_alarm(kind):
    """GOOD, and nothing heavier than a notice."""
    write, kinds = WRITERS[kind]

    @seed(7)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(state=states(*kinds))
    def check(state):
        with tempfile.TemporaryDirectory() as folder:
            write(state, Path(folder))
            report = verify_target(folder, QUICK, Selection(wait=0, record=False))
        heavy = [f for c in report.checkpoints for f in c.findings if f.severity is not Severity.NOTICE]
        assert (report.outcome, len(report.checkpoints), heavy) == (Outcome.GOOD, 1, []), report

    check()

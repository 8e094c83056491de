"""Random clean state dicts through every writer: no false alarm, whatever the names, shapes, dtypes and views."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, event, given, reject, seed, settings
from hypothesis import strategies as st
from support.runs import QUICK, save_file
from support.torch_values import COMPLEX, FLOATS, SMALL_FLOATS, WHOLE, Poison, names, nests, tensors

from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

EXAMPLES = 2000 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 60


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


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # torch's, about tensors that are rare
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("archive", [True, False], ids=["zip", "legacy"])
def test_nests_raise_no_alarm_and_hide_no_nan(archive):
    """What `torch.save` writes and `weights_only` reads is never BAD; any float of it that becomes NaN is found. A
    tensor without numbers is a question."""

    @seed(11)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(nest=nests(), which=st.integers(0, 2**20))
    def check(nest, which):
        state = {"model": {"w": torch.eye(2)}, "rest": nest}
        report = saved_and_judged(state, archive=archive)
        heavy = [f for c in report.checkpoints for f in c.findings if f.severity is Severity.ERROR]
        count = Poison(-1)
        count(nest)
        expected = Outcome.SUSPECT if count.without_numbers else Outcome.GOOD
        assert (report.outcome, heavy) == (expected, []), report
        if count.floats:
            state["rest"] = Poison(which % count.floats)(nest)
            report = saved_and_judged(state, archive=archive)
            assert any(f.check == "finite" for c in report.checkpoints for f in c.findings), (state, report)

    check()


def saved_and_judged(state, *, archive):
    """The report on what torch wrote; a state that torch refuses itself is none."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "net-3.pt")
        try:
            torch.save(state, path, _use_new_zipfile_serialization=archive)
            torch.load(path, weights_only=True)
        except (
            RuntimeError,
            pickle.UnpicklingError,
            TypeError,
            AttributeError,
            NotImplementedError,
            OverflowError,
        ) as error:
            event(type(error).__name__)
            reject()
        return verify_target(str(path), QUICK, Selection(wait=0, record=False))

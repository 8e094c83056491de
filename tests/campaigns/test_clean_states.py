"""Random clean state dicts through every writer: no false alarm, whatever the names, shapes, dtypes and views."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, event, given, reject, seed, settings
from hypothesis import strategies as st
from support.runs import QUICK, save_file

from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

names = (
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12), min_size=1, max_size=4
    )
    .map(".".join)
    .filter(lambda name: name != "__metadata__")  # safetensors keeps it for itself
)
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


def _finite(width: int = 64) -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, allow_infinity=False, width=width)


@st.composite
def odd_tensors(draw):
    """Parameters, tensors with attributes, sparse and nested ones, and two that share a storage."""
    kind = draw(st.sampled_from(("parameter", "attribute", "coo", "csr", "nested", "shared", "quantised")))
    matrix = torch.rand(2, 3, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) + 0.5
    if kind == "parameter":
        return torch.nn.Parameter(matrix, requires_grad=draw(st.booleans()))
    if kind == "attribute":
        matrix.note = draw(st.one_of(_finite(), st.text(max_size=3), tensors(FLOATS)))
        return matrix
    if kind == "coo":
        return matrix.to_sparse()
    if kind == "csr":
        return matrix.to_sparse_csr()
    if kind == "nested":
        return torch.nested.nested_tensor([matrix[0], matrix[1, :2]])
    if kind == "quantised":
        return torch.quantize_per_tensor(matrix, 0.1, 3, torch.qint8)
    return [matrix, matrix[1], matrix.t(), matrix]


keys = st.one_of(names, st.integers(-(2**70), 2**70), _finite(), st.booleans(), st.none(), st.tuples(names, _finite()))
_tensors = st.one_of(tensors((*FLOATS, *SMALL_FLOATS, *COMPLEX, *WHOLE)), odd_tensors())
_words = st.one_of(st.text(st.characters(codec="utf-8"), max_size=8), st.binary(max_size=8))
_plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    _finite(),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
    _words,
    st.binary(max_size=8).map(bytearray),
    st.sampled_from((torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.Size([]))),
)
_hashable = st.one_of(
    st.none(), st.booleans(), st.integers(), _finite(), st.text(st.characters(codec="utf-8"), max_size=3)
)


def _around(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Containers of such values; sometimes the same value twice, sometimes a list that holds itself."""
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(names, st.integers(), max_size=3).map(Counter),
        st.sets(_hashable, max_size=3),
        inner.map(lambda value: [value, {"again": value}]),
        inner.map(_cycle),
    )


def _cycle(value: object) -> list[object]:
    found = [value]
    found.append(found)
    return found


_nests = st.recursive(st.one_of(_plain, _tensors), _around, max_leaves=12)


@st.composite
def nests(draw):
    """A nest of containers, plain values and tensors, in which all numbers are finite."""
    return draw(_nests)


NAN = float("nan")


class Poison:
    """Walks a nest and makes its float number `at` NaN, in place or in a copy of what cannot be changed; with -1 none.
    `floats` is how many there are, and `without_numbers` whether some tensor has a shape only."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._done: dict[int, object] = {}
        self._kept: list[object] = []
        self.floats = 0
        self.without_numbers = False

    def _hit(self) -> bool:
        self.floats += 1
        return self.floats - 1 == self._at

    def __call__(self, value: object) -> object:
        """The value with the float in it made NaN."""
        if isinstance(value, bool):
            return value
        if isinstance(value, float):
            return NAN if self._hit() else value
        if isinstance(value, complex):
            return complex(1.0, NAN) if self._hit() else value
        if id(value) in self._done:
            return self._done[id(value)]
        self._kept.append(value)
        self._done[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, list):
            value[:] = [self(item) for item in value]
        elif type(value) is tuple:
            self._done[id(value)] = tuple(self(item) for item in value)
        elif isinstance(value, set):
            self._done[id(value)] = {self(item) for item in value}
        elif isinstance(value, dict) and not isinstance(value, Counter):
            pairs = [(self(key), self(item)) for key, item in value.items()]
            value.clear()
            value.update(pairs)
        return self._done[id(value)]

    def _tensor(self, value: torch.Tensor) -> None:
        self.without_numbers |= value.is_meta
        for part in _dense_parts(value):
            if part.numel() and (part.is_floating_point() or part.is_complex()) and self._hit():
                spot = torch.tensor(NAN).to(part.dtype)
                with torch.no_grad():
                    part[tuple(0 for _ in part.shape)] = spot
        if vars(value):
            value.note = self(value.note)


def _dense_parts(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Where its elements are stored."""
    if value.is_quantized:
        return
    if value.is_nested:
        yield value.values()
    elif value.layout is torch.sparse_coo:
        yield value._values()
    elif value.layout is torch.sparse_csr:
        yield value.values()
    else:
        yield value.detach()


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

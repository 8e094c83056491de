"""State as tagged JSON: nothing lost, nothing pickled, nothing that would turn into something else."""

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.errors import StateError
from ckptguard.training.content.tagged_json import decode_state, encode_state, from_text, to_text

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.integers(-100, 100).map(numpy.int16),
    st.floats(width=32).map(numpy.float32),
    st.lists(st.floats(width=32), max_size=4).map(lambda v: numpy.array(v, dtype=numpy.float32)),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False), st.tuples(st.integers()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.lists(inner, max_size=4).map(deque),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.text(), max_size=4),
        st.dictionaries(st.text(), st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=20,
)


def same(a, b):
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | complex | numpy.generic):
        return numpy.array(a).tobytes() == numpy.array(b).tobytes() or (a != a and b != b)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(a[k], b[m]) for k, m in zip(a.keys(), b.keys(), strict=True)
        )
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(trees)
def test_the_round_trip_law(tree):
    """decode(encode(x)) is x: types, order, signs of zero and NaN."""
    text = to_text(encode_state(tree, path="x"))
    assert same(decode_state(from_text(text)), tree)


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        -0.0,
        2**200,
        {"$float": "nan"},
        {"$": 1},
        {1: 2, "1": 3},
        bytearray(b"ab"),
        deque([1], maxlen=3),
        defaultdict(list, a=[1]),
        numpy.random.RandomState(1).get_state(),
        random.Random(1).getstate(),
        torch.Size([2, 3]),
        torch.bfloat16,
        "\ud800",
    ],
    ids=repr,
)
def test_what_is_easily_lost_comes_back(value):
    """Values that plain JSON loses, confuses or refuses."""
    assert same(decode_state(from_text(to_text(encode_state(value, path="x")))), value)


@pytest.mark.parametrize(
    "value", [object(), lambda: 1, numpy.array([object()]), type("Text", (str,), {})("a"), {1: random.Random()}]
)
def test_what_cannot_be_kept_is_refused_by_its_path(value):
    """StateError names where it is; nothing is turned into text."""
    with pytest.raises(StateError, match=r"state\.a\.0"):
        encode_state({"a": [value]}, path="state")


def test_a_tree_that_holds_itself_is_refused():
    """A cycle is a StateError, no endless recursion."""
    tree = []
    tree.append(tree)
    with pytest.raises(StateError):
        encode_state(tree, path="x")


def test_tensors_go_elsewhere_by_name():
    """Tensors leave the tree under the name that the taker gives them, and come back as they are given."""
    taken = {}

    def take(path, tensor):
        taken[path] = tensor
        return path

    tensor = torch.ones(2)
    encoded = encode_state({"state": {0: {"exp_avg": tensor}}}, path="o", take_tensor=take)
    assert list(taken) == ["o.state.0.exp_avg"]
    assert decode_state(encoded, taken)["state"][0]["exp_avg"] is tensor
    with pytest.raises(StateError, match="exp_avg"):
        decode_state(encoded, {})


@pytest.mark.parametrize("text", [b"", b"[", b'{"$float": "x"}', b'{"$new": 1}', b'{"$ndarray": [1]}', b'{"$int": 3}'])
def test_damaged_text_is_a_state_error(text):
    """Text that is none of ours ends in StateError, never in something else."""
    with pytest.raises(StateError):
        decode_state(from_text(text))


def test_it_is_plain_json():
    """Other tools can read it: strict JSON without bare NaN."""
    text = to_text(encode_state({"lr": math.nan}, path="x"))
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word)) == {"lr": {"$float": "nan"}}

"""What people put into checkpoints, drawn at random: tensors, and nests of them with Python's own values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

import torch
from hypothesis import strategies as st

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

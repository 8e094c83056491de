"""Small pickles out of right and wrong pieces, for archives whose storages are known."""

from __future__ import annotations

import struct

import torch
from hypothesis import strategies as st

from support.format_files import repacked, torch_bytes

NAN = float("nan")
STORED = {  # key -> (storage class, elements)
    "0": ("FloatStorage", torch.arange(8, dtype=torch.float32)),
    "1": ("LongStorage", torch.arange(8)),
    "2": ("FloatStorage", torch.tensor([1.0, NAN])),
    "3": ("BFloat16Storage", torch.ones(4, dtype=torch.bfloat16)),
    "4": ("FloatStorage", torch.zeros(0)),
    "5": ("LongStorage", torch.tensor([1.0, NAN], dtype=torch.float64).view(torch.int64)),
    "6": ("QInt8Storage", torch.ones(4, dtype=torch.int8)),
}


def archive_of(pickle: bytes) -> bytes:
    """A torch archive of this pickle and all of `STORED`."""
    data = torch_bytes({str(i): t for i, (_, t) in enumerate(STORED.values())})
    return repacked(data, data__pkl=pickle)


def text(word: str) -> bytes:
    raw = word.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: float) -> bytes:
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    return b"J" + struct.pack("<i", value) if isinstance(value, int) else b"G" + struct.pack(">d", value)


def named(dotted: str) -> bytes:
    module, _, name = dotted.rpartition(".")
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def many(parts: list[bytes]) -> bytes:
    """A tuple."""
    return b"(" + b"".join(parts) + b"t"


def storage(key: str, kind: str = "", count: int | None = None, device: str = "cpu") -> bytes:
    stated, elements = STORED.get(key, ("FloatStorage", torch.zeros(1)))
    size = len(elements) if count is None else count
    return many([text("storage"), named(f"torch.{kind or stated}"), text(key), text(device), number(size)]) + b"Q"


HOOKS = named("collections.OrderedDict") + b")R"


def view(key: str = "0", *, size: int = 2, more: bytes = b"", function: str = "_rebuild_tensor_v2") -> bytes:
    parts = [storage(key), number(0), many([number(size)]), many([number(1)]), b"\x89", HOOKS, more]
    return named(f"torch._utils.{function}") + many(parts) + b"R"


GOOD_NAMES = [
    *("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"),
    *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_qtensor"),
    *("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_meta_tensor_no_storage", "torch.Tensor"),
    *("torch._utils._rebuild_nested_tensor", "torch._utils._rebuild_wrapper_subclass", "torch.float32", "torch.int64"),
    *("torch._utils._rebuild_device_tensor_from_numpy", "torch._utils._rebuild_device_tensor_from_cpu_tensor"),
    *("torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout", "torch.Size", "torch.device"),
    *("torch.FloatTensor", "torch.LongTensor", "torch.nn.parameter.Parameter", "torch.FloatStorage"),
    *("torch.storage.UntypedStorage", "torch.storage.TypedStorage", "torch.per_tensor_affine"),
    *("collections.OrderedDict", "collections.Counter", "collections.defaultdict", "collections.deque"),
    *("_codecs.encode", "__builtin__.set", "__builtin__.bytearray", "__builtin__.complex", "__builtin__.frozenset"),
    *("__builtin__.float", "__builtin__.int", "__builtin__.list", "__builtin__.dict", "__builtin__.tuple"),
    *("__builtin__.bytes", "__builtin__.str", "numpy.float64", "numpy.core.multiarray.scalar", "numpy.dtype"),
    *("numpy.core.multiarray._reconstruct", "numpy.ndarray", "argparse.Namespace", "datetime.timedelta"),
    *("builtins.set", "builtins.complex", "fractions.Fraction", "decimal.Decimal", "types.SimpleNamespace"),
]
BAD_NAMES = [
    *("torch.float99", "torch.FooTensor", "torch._utils._rebuild_nothing_at_all", "torch.FooStorage", "torch.nothing"),
    *("collections.Nothing", "__builtin__.nothing", "_codecs.nothing", "torch.tensor", "torch.full", "numpy.full"),
]

words = st.sampled_from(["a", "b", "model", "weight", "", "latin1", "utf-8", "cpu", "nan", "torch.strided", "f4", "f8"])
ints = st.sampled_from([0, 1, 2, 3, 8, -1, 2**31 - 1])
floats = st.sampled_from([0.5, 1.0, 0.0, 2.0, 0.1, 0.25, 3.5, NAN, float("inf")])
atoms = st.one_of(
    st.just(b"N"), st.booleans().map(number), ints.map(number), floats.map(number), words.map(text),
    st.sampled_from([b")", b"]", b"}", b"\x8f", HOOKS]),
    st.binary(max_size=8).map(lambda raw: b"C" + bytes([len(raw)]) + raw),
)  # fmt: skip
keys = st.one_of(words.map(text), words.map(text), ints.map(number), floats.map(number))
_KINDS = [""] * 12 + ["FloatStorage", "LongStorage", "UntypedStorage"]
_COUNTS = [None] * 12 + [1, 2, 0]
_DEVICES = ["cpu"] * 12 + ["meta", "cqu"]
stored = st.builds(
    storage,
    st.sampled_from([*STORED, *STORED, "0", "3", "9"]),
    st.sampled_from(_KINDS),
    st.sampled_from(_COUNTS),
    st.sampled_from(_DEVICES),
)


def sized(numbers: list[int]) -> bytes:
    return many([number(n) for n in numbers])


sizes = st.lists(st.integers(0, 3), max_size=2).map(sized)


@st.composite
def tensors(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    """A call of a function that makes tensors; in each, at most a few arguments are wrong."""
    shape = draw(st.lists(st.integers(0, 2), max_size=2))
    right = [2, 1][2 - len(shape) :]
    steps = draw(st.sampled_from([right] * 6 + [[0] * len(shape), [1], [1, 3]]))
    offset = draw(st.sampled_from([0] * 8 + [1, 7, -1]))
    plain = [draw(stored), number(offset), sized(shape), sized(steps)]
    flag = number(draw(st.sampled_from([False] * 5 + [True])))
    hooks = draw(st.sampled_from([HOOKS, HOOKS, b"N", named("collections.OrderedDict") + b"]\x85R"]))
    inner = draw(st.one_of(st.just(view()), st.just(view("2")), st.just(view("1")), values))
    dtype = named("torch." + draw(st.sampled_from(["float32", "int64", "float64", "bfloat16", "int8", "float99"])))
    state = draw(st.one_of(st.just(b"N"), st.just(b"}" + text("x") + view("2") + b"s"), values))
    layout = named("torch.serialization._get_layout") + text("torch.sparse_coo") + b"\x85R"
    indices = named("torch._utils._rebuild_tensor_v2") + many(
        [storage("1"), number(0), sized([1, 2]), sized([2, 1]), b"\x89", HOOKS]
    ) + b"R"  # fmt: skip
    scheme = many([named("torch.per_tensor_affine"), number(draw(floats)), number(0)])
    choices = {
        "torch._utils._rebuild_tensor": plain,
        "torch._utils._rebuild_tensor_v2": [*plain, flag, hooks],
        "torch._utils._rebuild_tensor_v3": [*plain, flag, hooks, dtype],
        "torch._utils._rebuild_parameter": [inner, flag, hooks],
        "torch._utils._rebuild_parameter_with_state": [inner, flag, hooks, state],
        "torch._utils._rebuild_meta_tensor_no_storage": [dtype, *plain[2:], flag],
        "torch._utils._rebuild_sparse_tensor": [layout, many([indices, inner, sized([8]), b"\x89"])],
        "torch._utils._rebuild_qtensor": [*plain, scheme, flag, hooks],
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": [inner, dtype, text("cpu"), flag],
        "torch._tensor._rebuild_from_type_v2": [
            named("torch._utils._rebuild_tensor_v2"),
            named("torch.nn.parameter.Parameter"),
            many([*plain, flag, hooks]),
            state,
        ],
    }  # fmt: skip
    name = draw(st.sampled_from(sorted(choices)))
    parts = list(choices[name])
    wrong = draw(st.sampled_from(["no"] * 20 + ["less", "more", "other"]))
    if wrong == "less":
        parts = parts[:-1]
    elif wrong == "more":
        parts.append(draw(values))
    elif wrong == "other":
        parts[draw(st.integers(0, len(parts) - 1))] = draw(values)
    return named(name) + many(parts) + draw(st.sampled_from([b"R"] * 30 + [b"\x81"]))


def _right(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Containers as a writer makes them, of such values."""
    several = st.lists(values, max_size=3)
    pairs = st.lists(st.tuples(keys, values).map(b"".join), max_size=3).map(b"".join)
    dicts = st.sampled_from([b"}", b"}", HOOKS, named("collections.Counter") + b")R"])
    return st.one_of(
        tensors(values),
        several.map(lambda v: b"](" + b"".join(v) + b"e"),
        several.map(many),
        st.tuples(dicts, pairs).map(lambda p: p[0] + b"(" + p[1] + b"u"),
        st.tuples(pairs, pairs).map(lambda p: HOOKS + b"(" + p[0] + b"u}(" + p[1] + b"ub"),
        st.tuples(values, values).map(lambda p: HOOKS + text("a") + p[0] + b"s}" + text("_metadata") + p[1] + b"sb"),
    )


def _wrong(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Calls of anything with anything, and changes of values that may take none."""
    several = st.lists(values, max_size=3)
    keyed = st.lists(st.tuples(st.one_of(keys, values), values).map(b"".join), max_size=2).map(b"".join)
    names = st.sampled_from([*GOOD_NAMES, *GOOD_NAMES, *BAD_NAMES]).map(named)
    calls = st.sampled_from([b"R", b"R", b"R", b"\x81"])
    changes = st.one_of(
        keyed.map(lambda p: b"(" + p + b"u"),
        values.map(lambda v: number(0) + v + b"s"),
        values.map(lambda v: v + b"a"),
        several.map(lambda v: b"(" + b"".join(v) + b"e"),
        several.map(lambda v: b"(" + b"".join(v) + b"\x90"),
        values.map(lambda v: v + b"b"),
        keyed.map(lambda p: b"}(" + p + b"ub"),
        values.map(lambda v: v + b"0"),
        values.map(lambda v: b"(" + v + b"1"),
        values.map(lambda v: v + b"\x86"),
        st.sampled_from([b"2\x86", b"q\x01", b"q\x02", b"h\x01\x86", b"h\x02\x86"]),
    )
    return st.one_of(
        names,
        stored,
        several.map(lambda v: b"\x8f(" + b"".join(v) + b"\x90"),
        several.map(lambda v: b"(" + b"".join(v) + b"\x91"),
        st.tuples(names, several, calls).map(lambda c: c[0] + many(c[1]) + c[2]),
        st.tuples(names, several.map(lambda v: b"](" + b"".join(v) + b"e\x85"), calls).map(b"".join),
        st.tuples(values, several, calls).map(lambda c: c[0] + many(c[1]) + c[2]),
        st.tuples(values, changes).map(b"".join),
        st.tuples(values, changes).map(b"".join),
    )


right = st.recursive(st.one_of(atoms, tensors(atoms)), _right, max_leaves=5)
wrong = _wrong(right)
values = st.one_of(_right(right), _right(right), _right(st.one_of(right, wrong)), wrong)


@st.composite
def pickles(draw: st.DrawFn) -> bytes:
    """A pickle of such a value, in a dict or alone; sometimes with a few bytes changed."""
    body = draw(values)
    if draw(st.booleans()):
        body = b"}" + text("model") + body + b"s"
    start = draw(st.sampled_from([b"\x80\x02"] * 6 + [b"\x80\x04", b""]))
    data = bytearray(start + body + b".")
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b"N", b"0", b"2", b"R", b"b", b"s", b"a", b"u", b"\x85"])
        )
    return bytes(data)


_CODE = {name.rpartition(".")[0] for name in GOOD_NAMES} - {"fractions", "decimal", "datetime", "argparse", "types"}


def is_of_known_code(names: tuple[str, ...]) -> bool:
    """Whether all that a file names is of modules that a checkpoint is read by: of others only their owner knows."""
    return all(name in GOOD_NAMES or name.rpartition(".")[0] in _CODE for name in names)

"""A torch archive that is read without a problem loads, and no number in what it yields was overlooked.

torch.load itself says so, in a process of its own. Pickles are put together from right and wrong pieces.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import functools
import io
import json
import math
import os
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec
import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from support.format_files import repacked, scan_of, torch_bytes

from ckptguard.scan import ScannedFile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

MEMORY = 8 << 30
SECONDS = 20

_WORKER = """
import collections, json, math, resource, sys, time, warnings
import numpy as np, torch
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def bad_tensor(t, waiting):
    waiting += list(getattr(t, "__dict__", {}).values()) + [t._backward_hooks]
    if t.is_meta:
        return t.numel() > 0
    if t.layout is not torch.strided:
        t = t._values() if t.layout is torch.sparse_coo else t.values()
    if t.is_nested:
        t = t.values()
    if t.is_quantized:
        try:
            t = t.dequantize()
        except RuntimeError:
            return False  # bare integers, without a scale
    if not t.numel():
        return False
    if t.untyped_storage().nbytes() < t.numel():
        t = torch.as_strided(t, [1 if not s else n for n, s in zip(t.shape, t.stride())], t.stride())
    return bool(not torch.isfinite(t.double() if not t.is_complex() else t).all())

def all_finite(value):
    waiting, seen = [value], set()
    while waiting:
        v = waiting.pop()
        if isinstance(v, (float, complex)) or isinstance(v, np.generic):
            if isinstance(v, (float, complex, np.inexact)) and not np.isfinite(v):
                return False
            continue
        if id(v) in seen or isinstance(v, (str, bytes, int, type)) or v is None:
            continue
        seen.add(id(v))
        kept.append(v)
        if isinstance(v, torch.Tensor):
            if bad_tensor(v, waiting):
                return False
            continue
        if isinstance(v, (torch.UntypedStorage, torch.TypedStorage)):
            if isinstance(v, torch.TypedStorage) and v.dtype.is_floating_point and v.device.type != "meta":
                waiting.append(torch.empty(0, dtype=v.dtype).set_(v._untyped_storage))
            continue
        if isinstance(v, np.ndarray):
            waiting += v.ravel().tolist()
            continue
        if isinstance(v, dict):
            waiting += list(v) + list(v.values())
        elif isinstance(v, (list, tuple, set, frozenset, collections.deque)):
            waiting += list(v)
        waiting += list(getattr(v, "__dict__", {}).values())
    return True

for line in sys.stdin:
    path = json.loads(line)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + int(sys.argv[2]) + 1, resource.RLIM_INFINITY))
    answer = {"loads": False, "finite": True, "why": ""}
    for options in ({"weights_only": True}, {"weights_only": False}, {"weights_only": False, "encoding": "latin1"}):
        kept = []
        try:
            loaded = torch.load(path, **options)
        except BaseException as error:
            answer["why"] += f"{options}: {type(error).__name__}: {error}"[:300] + "; "
            continue
        try:
            answer = {"loads": True, "finite": all_finite(loaded), "why": repr(options)}
        except BaseException as error:
            answer = {"loads": True, "finite": True, "why": f"not looked at: {error!r}"}
        loaded = None
        break
    print(json.dumps(answer), flush=True)
"""


class Loaded(msgspec.Struct, frozen=True):
    """Whether torch.load loads a file, and whether all numbers in what it yields are finite."""

    loads: bool
    finite: bool
    why: str


class TorchLoader:
    """Loads one file after the other; a process that dies or takes too long is replaced, and its file loads not."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> TorchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def load(self, path: Path) -> Loaded:
        """What torch.load makes of this file."""
        if self._process is None:
            command = [sys.executable, "-c", _WORKER, str(MEMORY), str(SECONDS)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(str(path)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._end()
            return Loaded(loads=False, finite=True, why="it died, or took too long")
        return msgspec.json.decode(line, type=Loaded)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


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


EXAMPLES = 20_000 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 80
BAD, DOUBT, SEEN, NAMED = "bad", "doubt", "seen", "named"
_NAN = number(NAN)
_TENSOR = "torch._utils._rebuild_tensor_v2"


@pytest.fixture(scope="module")
def loader() -> Iterator[TorchLoader]:
    """The real loader."""
    with TorchLoader() as one:
        yield one


def numbers_seen(file: ScannedFile) -> bool:
    """Whether a number that is not finite was found."""
    leaves = any(not math.isfinite(leaf.value) for leaf in file.structure.leaves)
    return leaves or any(n is not None and n.nan + n.posinf + n.neginf > 0 for n in file.numbers)


def what_was_read(file: ScannedFile) -> str:
    """The heaviest thing that is said of a file; "" if nothing is."""
    if file.structure.is_broken:
        return BAD
    if file.structure.problems:
        return DOUBT
    if file.structure.unread or file.structure.not_understood:
        return NAMED
    return SEEN if numbers_seen(file) else ""


def tensor(*arguments: bytes) -> bytes:
    """A plain tensor's call, with such arguments in place of the last ones."""
    usual = [storage("0"), number(0), sized([2]), sized([1]), b"\x89", HOOKS]
    return named(_TENSOR) + many([*usual[: 6 - len(arguments)], *arguments]) + b"R"


def of_kind(kind: str, size: int) -> bytes:
    """A tensor of storage 5, which is said to be of this kind."""
    view_of = [storage("5", kind), number(0), sized([size]), sized([1]), b"\x89", HOOKS]
    return named(_TENSOR) + many(view_of) + b"R"


def array(*states: bytes) -> bytes:
    """An array of numpy with such states."""
    made = named("numpy.core.multiarray._reconstruct") + many([named("numpy.ndarray"), sized([0]), b"C\x01b"]) + b"R"
    return made + b"".join(state + b"b" for state in states)


def state_of(raw: bytes, count: int) -> bytes:
    """The state of an array of float32."""
    order = [number(3), text("<"), b"N", b"N", b"N", number(-1), number(-1), number(0)]
    dtype = named("numpy.dtype") + many([text("f4"), b"\x89", b"\x88"]) + b"R" + many(order) + b"b"
    return many([number(1), sized([count]), dtype, b"\x89", b"C" + bytes([len(raw)]) + raw])


FLOATS = struct.pack("<2f", 1, 2)
SPOILT = struct.pack("<2f", 1, NAN)
CASES: dict[str, tuple[bytes, str]] = {
    "an element set in a tensor": (view() + number(0) + _NAN + b"s", DOUBT),
    "elements set in a tensor": (view() + b"(" + number(0) + _NAN + b"u", DOUBT),
    "an element set in a list": (b"]K\x01a" + number(0) + _NAN + b"s", DOUBT),
    "an element of a list set by name": (b"]K\x01a" + text("a") + _NAN + b"s", BAD),
    "an element set in a text": (text("a") + number(0) + _NAN + b"s", BAD),
    "appended to a tensor": (view() + _NAN + b"a", BAD),
    "appended to a dict": (HOOKS + _NAN + b"a", BAD),
    "added to a list": (b"](" + _NAN + b"\x90", BAD),
    "a tensor made of numbers": (named("torch.Tensor") + b"](" + _NAN + _NAN + b"e\x85R", DOUBT),
    "a tensor made by name": (named("torch.tensor") + b"](" + _NAN + b"e\x85R", DOUBT),
    "a tensor's attribute that has no name": (
        named("torch._tensor._rebuild_from_type_v2")
        + many(
            [
                named(_TENSOR),
                named("torch.nn.parameter.Parameter"),
                many([storage("0"), number(0), sized([2]), sized([1]), b"\x89", HOOKS]),
                HOOKS + number(0) + b"Ns",
            ]
        )
        + b"R",
        DOUBT,
    ),
    "an attribute of a dict": (HOOKS + b"}" + text("x") + view("2") + b"sb", SEEN),
    "in _metadata": (HOOKS + b"}" + text("_metadata") + b"}" + text("y") + view("2") + b"ssb", SEEN),
    "a version": (HOOKS + b"}" + text("_metadata") + HOOKS + text("") + b"}" + text("version") + _NAN + b"sssb", SEEN),
    "in a tensor's hooks": (
        b"(" + HOOKS + b"q\x01" + tensor(b"h\x01") + b"h\x01" + text("h") + view("2") + b"st",
        DOUBT,
    ),
    "a key": (b"}" + _NAN + b"K\x01s", SEEN),
    "in a key": (b"}" + _NAN + b"\x85K\x01s", SEEN),
    "a number made of a text": (named("__builtin__.float") + text("nan") + b"\x85R", DOUBT),
    "any object made of a text": (named("decimal.Decimal") + text("NaN") + b"\x85R", DOUBT),
    "numbers out of bytes": (named("struct.unpack") + text("<2f") + b"C\x08" + SPOILT + b"\x86R", DOUBT),
    "an array out of bytes": (named("numpy.frombuffer") + b"C\x08" + SPOILT + text("<f4") + b"\x86R", DOUBT),
    "bytes of another encoding": (named("_codecs.encode") + text("x") + text("utf-16") + b"\x86R", DOUBT),
    "too few arguments": (named(_TENSOR) + many([storage("0"), number(0), sized([2]), sized([1])]) + b"R", BAD),
    "too many arguments": (tensor()[:-2] + b"NNtR", DOUBT),
    "a text called": (text("a") + b")R", BAD),
    "a tensor called": (view() + b")R", BAD),
    "a type called": (named("torch.float32") + b")R", BAD),
    "a function made an object of": (tensor()[:-1] + b"\x81", BAD),
    "a list as a key": (b"}]K\x01s", BAD),
    "a list in a set": (b"\x8f(]\x90", BAD),
    "a bytearray as a key": (b"\x80\x05}\x96" + struct.pack("<Q", 1) + b"aK\x01s", BAD),
    "an unknown type": (named("torch.float99"), DOUBT),
    "an unknown class": (named("torch.FooTensor"), DOUBT),
    "an unknown function": (named("torch._utils._rebuild_nothing_at_all") + b")R", DOUBT),
    "a dict of a number": (named("collections.OrderedDict") + b"K\x05\x85R", BAD),
    "a size of a text": (named("torch.Size") + text("x") + b"\x85R", BAD),
    "an unknown encoding": (named("_codecs.encode") + text("x") + text("nope") + b"\x86R", DOUBT),
    "an unknown device": (tensor(storage("0", device="cqu"), number(0), sized([2]), sized([1]), b"\x89", HOOKS), DOUBT),
    "a meta storage": (tensor(storage("2", device="meta"), number(0), sized([2]), sized([1]), b"\x89", HOOKS), DOUBT),
    "a meta tensor": (
        named("torch._utils._rebuild_meta_tensor_no_storage")
        + many([named("torch.float32"), sized([2]), sized([1]), b"\x89"])
        + b"R",
        DOUBT,
    ),
    "whole numbers with a gradient": (tensor(storage("1"), number(0), sized([2]), sized([1]), b"\x88", HOOKS), BAD),
    "more elements than can be counted": (tensor(sized([2**30] * 3), sized([0] * 3), b"\x89", HOOKS), BAD),
    "a missing storage of no elements": (tensor(storage("9"), number(0), sized([0]), sized([1]), b"\x89", HOOKS), BAD),
    "one storage of two kinds": (many([of_kind("DoubleStorage", 0), of_kind("LongStorage", 2)]), DOUBT),
    "a reference with more parts": (b"(" + storage("0")[1:-2] + b"NtQ", BAD),
    "a reference to a number": (b"K\x01Q", BAD),
    "an array of fewer bytes": (array(state_of(FLOATS, 3)), DOUBT),
    "an array set twice": (array(state_of(SPOILT, 2), state_of(FLOATS, 2)), DOUBT),
    "a spoilt array": (array(state_of(SPOILT, 2)), SEEN),
    "a class changed": (named("collections.OrderedDict") + b"}" + text("x") + _NAN + b"sb", DOUBT),
    "a number out of a list": (named("builtins.complex") + b"](" + _NAN + b"e\x85R", DOUBT),
    "a number too great for a float": (named("builtins.float") + b"\x8a\x90" + bytes(143) + b"\x01\x85R", DOUBT),
    "a number with a line in it": (b"F1_0\n", BAD),
    "bytes without an encoding": (named("builtins.bytearray") + text("a") + b"\x85R", DOUBT),
    "a plain object called": (named("builtins.object") + b")R)R", BAD),
    "an object of a type that has none": (named("typing.Any") + b")R", DOUBT),
    "a day without a year": (named("datetime.datetime") + b")\x81", BAD),
    "a thirteenth month": (named("datetime.datetime") + b"C\x0a\x07\xea\x0d" + bytes(7) + b"\x85R", DOUBT),
    "a plain object of something": (named("argparse.Namespace") + b"N\x85R", DOUBT),
    "a plain object as a key": (b"}" + named("argparse.Namespace") + b")RK\x01s", BAD),
    "a UUID of nothing": (named("uuid.UUID") + b")R", BAD),
    "a UUID of another kind": (named("uuid.UUID") + b")\x81}" + text("int") + _NAN + b"sb", DOUBT),
    "a class of storages called": (named("torch.FloatStorage") + b"](" + _NAN + b"e\x85R", DOUBT),
    "a member of no enumeration": (
        named("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING") + b"K\x07\x85R",
        DOUBT,
    ),
    "an index without tensors": (named("torch.distributed.checkpoint.metadata.Metadata") + b")R", BAD),
    "an index as a key": (
        b"}" + named("torch.distributed.checkpoint.metadata.BytesStorageMetadata") + b")\x81K\x01s",
        BAD,
    ),
    "a state that is no dict": (HOOKS + b"N}" + text("a") + b"K\x01s\x86b", DOUBT),
    "a state of nothing set on an array": (array(b"N"), DOUBT),
    "a shape without a flag": (named("torch.nn.parameter.UninitializedParameter") + b"](" + _NAN + b"e\x85R", DOUBT),
    "a tensor with such hooks": (
        named(_TENSOR)
        + many([storage("0"), number(0), sized([2]), sized([1]), b"\x89", named("collections.OrderedDict") + b"K\x01R"])
        + b"R",
        DOUBT,
    ),
    "places that are no whole numbers": (
        named("torch._utils._rebuild_sparse_tensor")
        + named("torch.serialization._get_layout")
        + text("torch.sparse_coo")
        + b"\x85R"
        + many([tensor(storage("0"), number(0), sized([1, 2]), sized([2, 1]), b"\x89", HOOKS), tensor(), sized([9])])
        + b"\x86R",
        DOUBT,
    ),
    "a value left out": (view(size=50) + b"0K\x01", DOUBT),
    "a nest of doubles": (b"K\x01" + b"2\x86" * 40, DOUBT),
    "a key of more depth than a stack has": (b"})" + b"\x85" * 2**20 + b"K\x01s", NAMED),
    "a list deep in a key": (b"}]" + b"\x85" * 100 + b"K\x01s", BAD),
    "a list in a set that is made": (named("builtins.set") + b"](]]e\x85R", BAD),
    "a list in a frozenset that is made": (named("builtins.frozenset") + b"](]]e\x85\x81", BAD),
    "a list as a key of a dict that is made": (named("collections.OrderedDict") + b"](]K\x01\x86e\x85R", BAD),
}  # fmt: skip
CLEAN: dict[str, bytes] = {
    "a tensor": view(),
    "an array": array(state_of(FLOATS, 2)),
    "a dict": HOOKS + b"(" + text("a") + view() + b"u}" + text("_metadata") + HOOKS + text("") + b"}ssb",
    "a nest of pairs": b"K\x01" + b"q\x01h\x01\x86" * 40,  # each part is looked at, and not for ever
    "a list that holds itself": b"]q\x01h\x01a",
    "a key of many parts": b"}(" + b"K\x01" * 20_000 + b"tK\x01s",
    "a deep key": b"})" + b"\x85" * 190 + b"K\x01s",
}

_ZONE = datetime.timezone(datetime.timedelta(hours=-5), "EST")
ORDINARY: dict[str, object] = {
    "arguments": argparse.Namespace(lr=0.1, betas=(0.9, 0.999), out=pathlib.PurePosixPath("/data/run")),
    "simple": types.SimpleNamespace(a=1),
    "when": [datetime.datetime(2026, 12, 31, 23, tzinfo=_ZONE), datetime.datetime(2024, 2, 29)],
    "day": (datetime.date(2024, 2, 29), datetime.time(23, 59, 59, 7), datetime.timedelta(-1, 5)),
    "zones": [datetime.UTC, _ZONE],
    "numbers": [1 + 2j, complex(-0.0, 3), 1e300, -(2**70), decimal.Decimal("-1.5E+3"), fractions.Fraction(-2, 3)],
    "dicts": [collections.defaultdict(list, a=[1]), collections.OrderedDict(a=1), collections.Counter("abca")],
    "sets": [{1, 2}, frozenset((3, "a")), collections.deque([1, 2], 5), range(1, 9, 2), slice(1, None)],
    "bytes": [b"", b"ab\xff", bytearray(b"\xffa"), bytearray()],
    "scalars": [numpy.float32(2.5), numpy.int64(3), numpy.bool_(True), numpy.float64(1), numpy.dtype("f4")],
    "generators": [numpy.random.RandomState(1), numpy.random.default_rng(2), random.Random(3).getstate()],
    "names": [uuid.UUID(int=7), {uuid.UUID(int=8): 1}, len, object(), type(None)],
    "partial": functools.partial(max, 3),
}


def pickled(body: bytes) -> bytes:
    """The whole pickle."""
    return (body if body[:1] == b"\x80" else b"\x80\x02" + body) + b"."


@pytest.mark.parametrize("kind", CASES)
def test_what_is_not_understood_is_not_good(tmp_path: Path, loader: TorchLoader, kind: str) -> None:
    """What cannot load is a problem, what nobody can tell is a doubt, and what is not finite is seen."""
    body, expected = CASES[kind]
    file = scan_of(tmp_path, "f.pt", archive_of(pickled(body))).files[0]
    assert what_was_read(file) == expected, file.structure
    loaded = loader.load(tmp_path / "f.pt")
    assert expected != BAD or not loaded.loads, loaded
    assert expected != SEEN or (loaded.loads and not loaded.finite), loaded


def test_what_trainers_write_beside_tensors_raises_nothing(tmp_path: Path) -> None:
    """Objects of Python's own library, as each protocol writes them."""
    for protocol in range(5):
        new = {"file": io.BytesIO(b"ab")} if protocol > 1 else {}  # the first protocols cannot write it
        raw = pickle.dumps(ORDINARY | new, protocol)
        file = scan_of(tmp_path, "f.pkl", raw).files[0]
        assert what_was_read(file) == "", (protocol, file.structure)
        assert pickle.loads(raw).keys() == ORDINARY.keys() | new.keys()


@pytest.mark.parametrize("kind", CLEAN)
def test_what_is_clean_raises_nothing(tmp_path: Path, loader: TorchLoader, kind: str) -> None:
    """Pickles as they are written load, and nothing is said of them."""
    file = scan_of(tmp_path, "f.pt", archive_of(pickled(CLEAN[kind]))).files[0]
    assert what_was_read(file) == "", file.structure
    assert loader.load(tmp_path / "f.pt").loads


@pytest.mark.parametrize("kind", ["frozenset", "set", "dict"])
def test_a_name_of_python_2_is_read_as_that_of_python_3(tmp_path: Path, kind: str) -> None:
    """What has no hash is no element and no key, whoever is asked to make it one."""
    unhashable = named("collections.OrderedDict") + b")R"
    for element, outcome in [(unhashable, BAD), (text("a"), "")]:
        items = b"](" + (many([element, number(1)]) if kind == "dict" else element) + b"e"
        for module in ("__builtin__", "builtins"):
            body = named(f"{module}.{kind}") + items + b"\x85R"
            said = what_was_read(scan_of(tmp_path, "f.pt", archive_of(pickled(body))).files[0])
            assert said == outcome, (module, element)


@pytest.mark.parametrize("times", [60, 100])
def test_a_key_that_takes_for_ever_to_hash(tmp_path: Path, times: int) -> None:
    """Python would hash each of its 2**60 parts, and there is no telling how long somebody waits."""
    body = b"}K\x01" + b"q\x01h\x01\x86" * times + b"K\x01s"
    assert what_was_read(scan_of(tmp_path, "f.pt", archive_of(pickled(body))).files[0]) == DOUBT


def test_a_doubt_is_suspect(tmp_path: Path) -> None:
    """Nobody can tell: neither GOOD nor BAD."""
    (tmp_path / "net-1.pt").write_bytes(archive_of(pickled(b"}" + text("w") + CASES["a meta tensor"][0] + b"s")))
    [checked] = verify_target(str(tmp_path), Settings(settle=0), Selection(wait=0, record=False)).checkpoints
    assert checked.outcome is Outcome.SUSPECT
    [said] = [f for f in checked.findings if f.severity is Severity.SICKNESS]
    assert (said.check, said.tensor) == ("structure", "w")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_pickles_load_as_they_are_read(tmp_path: Path, loader: TorchLoader) -> None:
    """Of nothing that torch.load refuses, or that yields NaN, it is said that all is well."""

    @seed(12)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(pickle=pickles())
    @example(pickle=b"\x80\x02" + view("2") + b".")
    def check(pickle: bytes) -> None:
        file = scan_of(tmp_path, "f.pt", archive_of(pickle)).files[0]
        said = what_was_read(file)
        if said in ("", SEEN) and is_of_known_code(file.structure.globals):
            loaded = loader.load(tmp_path / "f.pt")
            assert loaded.loads, loaded
            assert loaded.finite or said == SEEN, loaded

    check()

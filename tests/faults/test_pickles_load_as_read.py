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
import math
import os
import pathlib
import pickle
import random
import struct
import types
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from support.format_files import scan_of
from support.opcode_pickles import (
    HOOKS,
    NAN,
    archive_of,
    is_of_known_code,
    many,
    named,
    number,
    pickles,
    sized,
    storage,
    text,
    view,
)
from support.torch_loader import TorchLoader

from ckptguard.scan import ScannedFile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

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

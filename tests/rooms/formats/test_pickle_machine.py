"""The pickle machine against Python's own pickles, and the tree that is walked from them."""

from __future__ import annotations

import collections
import io
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from support.format_files import scan_of, structure_of, torch_bytes

from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import Call, Global, Mapping, Sequence, SetOf
from ckptguard.formats.pickle.machine import Pickled, read_pickle
from ckptguard.formats.torch.state_tree import walk


def plain(value: object) -> object:
    """An inert value as the Python value that it stands for."""
    if isinstance(value, Mapping):
        return {plain(k): plain(v) for k, v in zip(value.flat[::2], value.flat[1::2], strict=True)}
    if isinstance(value, Sequence):
        return [plain(v) for v in value.items]
    if isinstance(value, SetOf):
        return {plain(v) for v in value.items}
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    return value


VALUES = [
    None, True, False, 0, 255, 256, 65_536, -1, 2**31, -(2**40), 10**300, 0.5, -math.inf, "text", "ümlaut", "x" * 300,
    [1, [2, [3]]], {"a": {"b": (1, 2, 3, 4)}}, (), (1,), [()] * 3, {1: "one", None: 2.5, (1, 2): 3},
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:20])
def test_plain_values_come_back(value: object, protocol: int) -> None:
    """Every protocol's spelling of plain values is understood."""
    assert plain(read_pickle(pickle.dumps(value, protocol)).value) == value


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_bytes_and_sets_come_back(protocol: int) -> None:
    """Bytes of all sizes, and sets where the protocol has opcodes for them."""
    value = [b"", b"abc", b"x" * 300]
    assert plain(read_pickle(pickle.dumps(value, protocol)).value) == value
    if protocol >= 4:
        assert plain(read_pickle(pickle.dumps({1, 2}, protocol)).value) == {1, 2}


def test_what_would_be_called_is_kept_with_its_parts() -> None:
    """A call keeps its arguments, items and state, and its global is named."""
    made = read_pickle(pickle.dumps(collections.OrderedDict(a=1), 2))
    assert isinstance(made.value, Call)
    assert isinstance(made.value.func, Global)
    assert made.value.flat == ["a", 1]
    assert made.globals == {"collections.OrderedDict"}


def test_names_are_dotted_paths(tmp_path: Path) -> None:
    """Nested containers, optimizer states and whole modules give names that people know."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "whole": model}
    structure = structure_of(tmp_path, "c.pt", torch_bytes(state))
    assert structure.problems == ()
    names = {t.name for t in structure.tensors}
    assert {"model.weight", "model.bias", "optimizer.state.0.exp_avg", "whole.weight"} <= names
    leaves = {leaf.name: leaf.value for leaf in structure.leaves}
    assert (leaves["step"], leaves["optimizer.param_groups.0.lr"]) == (7, 0.25)


def test_tied_and_sliced_tensors_share_a_storage(tmp_path: Path) -> None:
    """NaN outside a view belongs to no tensor; tied tensors have equal numbers."""
    base = torch.arange(12, dtype=torch.float32)
    base[11] = math.nan
    base[5] = math.inf
    state = {"all": base, "tied": base, "low": base[:4], "middle": base[4:8], "column": base[:10].view(5, 2)[:, 0]}
    file = scan_of(tmp_path, "v.pt", torch_bytes(state)).files[0]
    numbers = dict(zip((t.name for t in file.structure.tensors), file.numbers, strict=True))
    found = {k: (n.count, n.nan, n.posinf, n.first_bad, n.largest) for k, n in numbers.items() if n}
    assert found == {
        "all": (12, 1, 1, 5, 10.0),
        "tied": (12, 1, 1, 5, 10.0),
        "low": (4, 0, 0, None, 3.0),
        "middle": (4, 0, 1, 1, 7.0),
        "column": (5, 0, 0, None, 8.0),
    }


def test_a_gap_that_no_tensor_covers_is_not_counted(tmp_path: Path) -> None:
    """Poison in a part of a storage that no tensor refers to is nobody's."""
    base = torch.ones(10)
    base[5] = math.nan
    file = scan_of(tmp_path, "g.pt", torch_bytes({"a": base[:5], "b": base[6:]})).files[0]
    assert [n.nan for n in file.numbers if n] == [0, 0]


def test_numpy_values_are_looked_at(tmp_path: Path) -> None:
    """numpy scalars are leaves; of a float array one element that is not finite."""
    state = {
        "lr": np.float64(0.5),
        "half": np.float16(math.inf),
        "fine": np.ones(100, np.float32),
        "bad": np.array([1.0, math.nan], np.float32),
        "ints": np.arange(5),
    }
    for protocol in (2, 4, 5):
        structure = structure_of(tmp_path, f"n{protocol}.pkl", pickle.dumps(state, protocol))
        leaves = {leaf.name: leaf.value for leaf in structure.leaves}
        assert structure.problems == ()
        assert leaves.pop("lr") == 0.5
        assert leaves.pop("half") == math.inf
        assert math.isnan(leaves.pop("bad"))
        assert leaves == {}


def test_wrapped_and_special_tensors(tmp_path: Path) -> None:
    """Parameters, subclasses' parts, sparse parts, empty and meta tensors are all understood."""
    state = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.tensor([[0.0, 2.0]]).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "expanded": torch.ones(1).expand(4),
        "list": [torch.zeros(1), torch.ones(1)],
        "complex": torch.tensor([complex(1, math.nan)]),
    }
    file = scan_of(tmp_path, "s.pt", torch_bytes(state)).files[0]
    assert [(p.tensor, p.doubt) for p in file.structure.problems] == [("meta", True)]  # it was saved without numbers
    names = {t.name for t in file.structure.tensors}
    assert {"parameter", "meta", "expanded", "list.0", "list.1", "complex"} <= names
    assert any(n.startswith("sparse.") for n in names)
    numbers = dict(zip((t.name for t in file.structure.tensors), file.numbers, strict=True))
    assert numbers["complex"] is not None
    assert (numbers["complex"].count, numbers["complex"].nan, numbers["complex"].first_bad) == (2, 1, 1)


def test_a_lone_value_has_a_name(tmp_path: Path) -> None:
    """A file that holds one tensor or number alone still names it."""
    assert [t.name for t in structure_of(tmp_path, "t.pt", torch_bytes(torch.ones(1))).tensors] == ["value"]
    assert walk(Pickled(2.5, frozenset(), 0)).leaves[0].name == "value"


@pytest.mark.parametrize("places", [(0, 1, 2), (1, 2, 3), (2, 0, 1), (7, 7, 9), (60_000, 3, 60_001), (1 << 30, 0, 1)])
def test_a_memo_with_any_numbers_is_read_as_python_reads_it(places: tuple[int, ...]) -> None:
    """Python 2 counted from 1, and a number may be used again, or left out; MEMOIZE counts what is kept. A number far
    beyond all others is in doubt, as Python's array would need gigabytes for it."""
    puts = b"".join(bytes([0x4B, n]) + b"r" + place.to_bytes(4, "little") for n, place in enumerate(places))
    gets = b"".join(b"j" + place.to_bytes(4, "little") for place in sorted({*places}))
    kept = len({*places})
    data = b"\x80\x04(" + puts + gets + b"K\x09\x94" + b"j" + kept.to_bytes(4, "little") + b"t."
    read = read_pickle(data)
    assert read.value == pickle._Unpickler(io.BytesIO(data)).load()  # Python's own, whose memo is a dict
    assert bool(read.doubts) == (max(places) > 1 << 24)
    unset = next(n for n in range(9) if n not in places)
    with pytest.raises(PickleProblem):
        read_pickle(b"\x80\x04(" + puts + b"j" + unset.to_bytes(4, "little") + b"t.")

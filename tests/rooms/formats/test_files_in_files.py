"""Files that a checkpoint holds as bytes are read like those that it consists of."""

from __future__ import annotations

import io
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.format_files import safetensors_bytes, scan_of, torch_bytes

from ckptguard.scan import ScannedFile

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:The given buffer is not writable")
NAN = math.nan


def as_tensor(raw: bytes) -> torch.Tensor:
    """Bytes as Transformer Engine saves a layer's state."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def file_in_memory(raw: bytes) -> io.BytesIO:
    """As older versions of it did."""
    return io.BytesIO(raw)


def with_attribute(value: object) -> torch.nn.Module:
    """A whole module, with something of its own."""
    module = torch.nn.Linear(2, 2)
    module.own = value  # type: ignore[assignment]
    return module


WRITE: dict[str, Callable[[object], bytes]] = {
    **{f"pickle {protocol}": lambda value, protocol=protocol: pickle.dumps(value, protocol) for protocol in range(6)},
    "zip": torch_bytes,
    "zip 4": lambda value: torch_bytes(value, pickle_protocol=4),
    "legacy": lambda value: torch_bytes(value, _use_new_zipfile_serialization=False),
}
HOLD: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "BytesIO": file_in_memory,
    "tensor": as_tensor,
    "padded tensor": lambda raw: as_tensor(raw + bytes(7)),
    "numpy": lambda raw: np.frombuffer(raw, np.uint8),
    "storage": lambda raw: as_tensor(raw).untyped_storage(),
}
AROUND: dict[str, Callable[[object], object]] = {
    "dict": lambda value: {"a": 1, "inner": value},
    "list": lambda value: [None, value],
    "long list": lambda value: [*range(100), value],
    "set": lambda value: {value},
    "key": lambda value: {value: 1},
    "tuple": lambda value: ("x", value, 2.5),
    "module": with_attribute,
}
CORES: dict[str, Callable[[float], object]] = {
    "number": lambda bad: {"scale": bad},
    "tensor": lambda bad: {"scale": torch.tensor([1.0, bad, 2.0])},
    "half": lambda bad: torch.tensor([bad], dtype=torch.bfloat16),
    "byte": lambda bad: {"a": torch.tensor([bad, 1.0]).to(torch.float8_e4m3fn)},
    "parameter": lambda bad: torch.nn.Parameter(torch.full((2, 2), bad)),
    "array": lambda bad: np.array([bad, 1.0]),
}
# Only a binary pickle says by itself where it ends.
UNFIT = {(write, "padded tensor") for write in ("pickle 0", "pickle 1", "zip", "zip 4", "legacy")}
FILES = st.tuples(st.sampled_from(sorted(WRITE)), st.sampled_from(sorted(HOLD))).filter(lambda f: f not in UNFIT)
STEPS = st.lists(st.one_of(FILES, st.sampled_from(sorted(AROUND))), max_size=4)


def nested(core: object, steps: list[object]) -> object:
    """The core within what the steps say, the innermost first."""
    value = core
    for step in steps:
        value = AROUND[step](value) if isinstance(step, str) else HOLD[step[1]](WRITE[step[0]](value))  # type: ignore[index]
    return value


def found_in(file: ScannedFile) -> int:
    """How many tensors and numbers are not finite."""
    tensors = sum(n is not None and n.first_bad is not None for n in file.numbers)
    return tensors + sum(not math.isfinite(leaf.value) for leaf in file.structure.leaves)


@given(core=st.sampled_from(sorted(CORES)), first=FILES, steps=STEPS, outer=st.sampled_from(["zip", "legacy"]))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_nan_is_found_wherever_it_lies(
    tmp_path: Path, core: str, first: object, steps: list[object], outer: str
) -> None:
    """However deep, and in whatever files in files; and the same nest without it is no alarm."""
    for bad in (NAN, 1.0):
        try:
            value = nested(CORES[core](bad), [first, *steps])
        except TypeError:
            assume(False)  # the old protocols cannot hold a BytesIO
        file = scan_of(tmp_path, "n.pt", WRITE[outer]({"model": torch.ones(2), "layer": value})).files[0]
        assert file.structure.problems == ()
        assert file.structure.unread == ()
        assert (found_in(file) > 0) is (bad is NAN), [leaf for leaf in file.structure.leaves if leaf.value != 1]


@pytest.mark.parametrize("name", ["n.pt", "n.safetensors"])
def test_bytes_that_are_no_file_are_no_alarm(tmp_path: Path, name: str) -> None:
    """States of generators, images, quantised weights: of thousands of tensors of bytes none looks like a file."""
    chance = random.Random(7)
    made = {f"t{i}": as_tensor(chance.randbytes(chance.randint(1, 600))) for i in range(4000)}
    made |= {f"first{i}": as_tensor(bytes([i]) + b"some text.") for i in range(256)}
    made["rng"] = torch.get_rng_state()
    made["json"] = as_tensor(b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}')
    raw = torch_bytes(made) if name == "n.pt" else safetensors_bytes(made)
    file = scan_of(tmp_path, name, raw).files[0]
    assert (file.structure.problems, file.structure.unread, found_in(file)) == ((), (), 0)


CUT = pickle.dumps({"scale": [NAN] * 9})


@pytest.mark.parametrize(
    "raw",
    [CUT[:-5] + b".", torch_bytes({"a": torch.ones(3)})[:-30], b"\x93NUMPY\1\0" + bytes(80)],
    ids=["pickle", "archive", "array"],
)
@pytest.mark.parametrize("hold", sorted(HOLD))
def test_what_only_looks_like_a_file_is_told_of(tmp_path: Path, raw: bytes, hold: str) -> None:
    """It is no damage of the file around it, but nobody looked into it."""
    file = scan_of(tmp_path, "n.pt", torch_bytes({"layer": HOLD[hold](raw)})).files[0]
    assert file.structure.problems == ()
    assert [name.partition(".")[0] for name in file.structure.unread] == ["layer"]


def test_the_state_of_a_layer_in_a_form_of_its_own_is_told_of(tmp_path: Path) -> None:
    """Only its name says that it is one; an empty one holds nothing."""
    state = {"a._extra_state": as_tensor(b"\1\2\3"), "b._extra_state": torch.empty(0, dtype=torch.uint8)}
    assert scan_of(tmp_path, "n.pt", torch_bytes(state)).files[0].structure.unread == ("a._extra_state",)


def test_what_a_file_inside_would_call_is_named(tmp_path: Path) -> None:
    """Also where the pickle throws it away at once; torch's own loader is read through."""
    armed = b"\x80\x02cos\nsystem\nX\1\0\0\0x\x85R0N."
    state = {"a": armed, "b": pickle.dumps(torch.ones(2)), "c": as_tensor(armed)}
    names = scan_of(tmp_path, "n.pt", torch_bytes(state)).files[0].structure.globals
    assert "os.system" in names
    assert "torch.storage._load_from_bytes" not in names
    hidden = b"\x80\x02ctorch.storage\n_load_from_bytes\nU" + bytes([len(armed)]) + armed + b"\x85R0N."
    names = scan_of(tmp_path, "n.pkl", hidden).files[0].structure.globals
    assert {"os.system", "torch.storage._load_from_bytes"} & set(names)


def test_files_in_files_without_end_are_told_of(tmp_path: Path) -> None:
    """They cost little, and nobody follows them for ever."""
    raw: object = {"scale": NAN}
    for _ in range(40):
        raw = pickle.dumps(raw)
    file = scan_of(tmp_path, "n.pt", torch_bytes({"layer": raw})).files[0]
    assert file.structure.unread != ()
    many = [pickle.dumps([i, *range(50)]) for i in range(3000)]
    assert scan_of(tmp_path, "n.pt", torch_bytes({"layers": many})).files[0].structure.unread == ()

"""Long byte strings and texts stay in their file: whatever their size, they are read, and in bounded memory."""

from __future__ import annotations

import collections
import io
import math
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.format_files import scan_of, torch_bytes
from support.judged_files import findings_of

from ckptguard.formats.pickle import long_values, machine
from ckptguard.formats.pickle.long_values import LONG
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.storage import open_storage
from ckptguard.values.verdict import Outcome, judge

MARGIN, WINDOW, BLOCK = 20_000, 50_000, 4096
DTYPES = ("float16", "float32", "float64", ">f4", "complex64", "uint8")


def in_zip(value: object, protocol: int) -> bytes:
    """A pickle as one file of an archive."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("state.pkl", pickle.dumps(value, protocol))
    return target.getvalue()


# How it is written, under which name, and how it is loaded.
CONTAINERS: dict[str, tuple[str, Callable[[object, int], bytes], Callable[[bytes], object]]] = {
    "archive": (
        "n-5.pt",
        lambda value, protocol: torch_bytes(value, pickle_protocol=protocol),
        lambda data: torch.load(io.BytesIO(data), weights_only=False),
    ),
    "legacy": (
        "n-5.pth",
        lambda value, protocol: torch_bytes(value, pickle_protocol=protocol, _use_new_zipfile_serialization=False),
        lambda data: torch.load(io.BytesIO(data), weights_only=False),
    ),
    "pickle": ("n-5.pkl", lambda value, protocol: pickle.dumps(value, protocol), pickle.loads),
    "zip": ("n-5.zip", in_zip, lambda data: pickle.loads(zipfile.ZipFile(io.BytesIO(data)).read("state.pkl"))),
}
HOLD: dict[str, Callable[[np.ndarray], object]] = {
    "array": lambda array: array,
    "matrix": lambda array: array[: len(array) // 2 * 2].reshape(2, -1),
    "deque": lambda array: collections.deque((array[i : i + 700], i, 0.5) for i in range(0, len(array), 700)),
    "file in bytes": lambda array: torch_bytes({"a": torch.zeros(1), "inner": array}),
    "pickle in a bytearray": lambda array: bytearray(pickle.dumps(array, 2)),
}
SIZES = sorted(
    {near + more for near in (LONG, BLOCK, MARGIN, WINDOW, WINDOW - MARGIN, 3 * WINDOW) for more in range(-40, 41, 8)}
)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and blocks that small files pass."""
    for module, limits in ((long_values, ("MARGIN", "WINDOW", "BLOCK")), (machine, ("MARGIN",))):
        for name in limits:
            monkeypatch.setattr(module, name, globals()[name])


def bad_numbers(file: object) -> int:
    """How many numbers outside tensors are not finite."""
    return sum(not math.isfinite(leaf.value) for leaf in file.structure.leaves)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_small")
@given(
    container=st.sampled_from(sorted(CONTAINERS)),
    holds=st.sampled_from(sorted(HOLD)),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from(SIZES),
    protocol=st.integers(2, 5),
    place=st.floats(0, 1),
    before=st.integers(0, 3000),
)
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_long_value_is_read_like_a_short_one(
    tmp_path: Path, container: str, holds: str, dtype: str, size: int, protocol: int, place: float, before: int
) -> None:
    """Around every limit, in every protocol: what its loader loads has no problem, and a NaN in it is found."""
    name, write, load = CONTAINERS[container]
    kind = np.dtype(dtype)
    floats = kind.kind != "u"
    array = np.random.default_rng(size).integers(0, 200, max(size // kind.itemsize, 2)).astype(kind)
    for bad in (False, True) if floats else (False,):
        if bad:
            array[int(place * (len(array) // 2 * 2 - 1))] = math.nan
        value = {"first": "t" * before, "replay": HOLD[holds](array), "last": [1.5, "ä" * (before // 2), b"x" * before]}
        if container in ("archive", "legacy"):
            value["w"] = torch.ones(2, 3)
        data = write(value, protocol)
        assert load(data).keys() == value.keys()  # type: ignore[attr-defined]
        file = scan_of(tmp_path, name, data).files[0]
        assert (file.structure.problems, file.structure.unread, file.structure.not_understood) == ((), (), ())
        assert (bad_numbers(file) > 0) is bad


@pytest.mark.usefixtures("_small")
@given(
    container=st.sampled_from(["archive", "legacy", "pickle"]),
    protocol=st.integers(2, 5),
    size=st.sampled_from(SIZES),
    cut=st.floats(0, 0.999),
    letter=st.sampled_from(["x", "ä", "€"]),
)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_in_a_long_value_is_found(
    tmp_path: Path, container: str, protocol: int, size: int, cut: float, letter: str
) -> None:
    """What its loader cannot load because the end is missing has a problem, and the whole file has none."""
    name, write, load = CONTAINERS[container]
    data = write({"b": bytes(size), "t": letter * size, "a": np.ones(size // 4, np.float32)}, protocol)
    assert load(data)["t"] == letter * size  # type: ignore[index]
    assert scan_of(tmp_path, name, data).files[0].structure.problems == ()
    short = data[: int(cut * len(data))]
    with pytest.raises(Exception):  # noqa: B017
        load(short)
    structure = scan_of(tmp_path, f"cut-{name}", short).files[0].structure
    assert structure.problems


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("protocol", [2, 3])
def test_a_long_text_that_is_no_utf8_is_refused(tmp_path: Path, protocol: int) -> None:
    """A damaged byte in a long text is found as its loader finds it."""
    data = bytearray(pickle.dumps({"t": "ab" * 60_000}, protocol))
    data[90_000] = 0xFF
    with pytest.raises(UnicodeDecodeError):
        pickle.loads(bytes(data))
    assert [p.message for p in scan_of(tmp_path, "n.pkl", bytes(data)).files[0].structure.problems] == [
        "a text is not UTF-8"
    ]


class _Shared:
    """Pickled as an array with this state."""

    def __init__(self, made: tuple[object, ...], state: tuple[object, ...]) -> None:
        self.made, self.state = made, state

    def __reduce__(self) -> tuple[object, ...]:
        return (*self.made[:2], self.state)


@pytest.mark.parametrize("times", [2, 40])
def test_a_value_that_is_read_again_and_again_is_a_limit(
    tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many arrays of the same long bytes are not read without end. Then it is a question, and not bad."""
    monkeypatch.setattr(long_values, "_ROOM", 0)
    raw, made = bytes(3 << 20), np.ones(1).__reduce_ex__(4)
    arrays = [_Shared(made, (1, (len(raw) // 4,), np.dtype("float32"), False, raw)) for _ in range(times)]
    data = pickle.dumps(arrays, 4)
    assert len(pickle.loads(data)) == times
    structure = scan_of(tmp_path, "n.pkl", data).files[0].structure
    assert structure.problems == ()
    assert bool(structure.not_understood) is (times > 30)


@pytest.mark.parametrize("kind", ["one array", "one byte string", "many arrays"])
def test_memory_is_bounded(tmp_path: Path, kind: str) -> None:
    """A replay buffer takes no more memory than a window, however large it is."""
    made = {
        "one array": lambda: np.ones(40_000_000, np.float32),
        "one byte string": lambda: bytes(160_000_000),
        "many arrays": lambda: [np.full(1000, n, np.float32) for n in range(40_000)],
    }
    torch.save({"w": torch.ones(2, 3), "replay": made[kind]()}, tmp_path / "n-5.pt", pickle_protocol=4)
    tracemalloc.start()
    try:
        file = scan_files(open_storage(tmp_path), ["n-5.pt"], ScanOptions(md5=False)).files[0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (file.structure.problems, file.structure.not_understood, file.structure.unread) == ((), (), ())
    assert peak < 50 << 20


def test_a_replay_buffer_is_good(tmp_path: Path) -> None:
    """Beside weights it is no question, and a lone NaN in it is a notice like that of any vector that is no state."""
    for bad, outcome in ((0.5, Outcome.GOOD), (math.nan, Outcome.GOOD)):
        saved = {"w": torch.ones(2, 3), "replay": [np.full(60_000, bad, np.float32)]}
        assert judge(findings_of(tmp_path, {"n-5.pt": torch_bytes(saved)}), sealed=False) is outcome

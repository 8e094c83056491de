"""A limit is no verdict: what is too large to be read is digested and named, and neither bad nor good by itself."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.format_files import npz_bytes, torch_bytes
from support.judged_files import findings_of

from ckptguard.formats import json_files
from ckptguard.formats.numpy import arrays
from ckptguard.formats.torch import files
from ckptguard.formats.zip import directory
from ckptguard.values.verdict import Outcome, Severity, judge

MANY = {f"a{n}": np.full((2, 3), n, np.float32) for n in range(300)}
BYTES = {"buffer": np.zeros(20_000, np.uint8), "w": torch.ones(2, 3)}
DEEP: object = 1.0
for _ in range(300):
    DEEP = [DEEP]


OBJECTS = {"o": np.array([{"x": list(range(3000))}], dtype=object)}
# Name, content, and the limits that make it too large: (module, name, limit).
KINDS: dict[str, tuple[str, Callable[[], bytes], tuple[tuple[object, str, object], ...]]] = {
    "values in an archive": ("n-5.pt", lambda: torch_bytes(MANY), ((files, "ROOM_EACH", 1), (files, "BUDGET", 5000))),
    "nodes in an archive": ("n-5.pt", lambda: torch_bytes({"l": [MANY] * 3}), ((files, "MAX_NODES", 100),)),
    "deep in an archive": ("n-5.pt", lambda: torch_bytes(DEEP), ()),
    "records": (
        "n-5.pt",
        lambda: torch_bytes({str(n): torch.ones(2, 3) for n in range(50)}),
        ((directory, "MAX_ENTRIES", 40),),
    ),
    "a legacy file": (
        "n-5.pth",
        lambda: torch_bytes(MANY, _use_new_zipfile_serialization=False),
        ((files, "BUDGET", 5000),),
    ),
    "a pickle of many values": ("n-5.pkl", lambda: pickle.dumps(MANY), ((files, "BUDGET", 5000),)),
    "an archive of arrays": ("n-5.npz", lambda: npz_bytes(MANY), ((directory, "MAX_ENTRIES", 40),)),
    "objects": ("n-5.npz", lambda: npz_bytes(OBJECTS), ((arrays, "MAX_STREAM", 1000),)),
    "packed objects": (
        "n-5.npz",
        lambda: npz_bytes(OBJECTS, deflated=True),
        ((arrays, "_ROOM", 1000), (arrays, "_ROOM_TIMES", 0)),
    ),
    "trainer state": (
        "trainer_state.json",
        lambda: json.dumps({"log_history": [{"loss": 1.0}] * 500}).encode(),
        ((json_files, "MAX_STATE", 1000),),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_is_neither_bad_nor_good(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is good within the limits, and a question beyond them. All bytes have a digest, and the part is named."""
    name, make, limits = KINDS[kind]
    saved = {name: make()}
    if name.endswith(".json"):
        saved["model.pt"] = torch_bytes(BYTES)
    before = findings_of(tmp_path, saved)
    if limits:
        assert judge(before, sealed=False) in (Outcome.GOOD, Outcome.INCOMPLETE)  # a state without weights is no save
    for module, limit, value in limits:
        monkeypatch.setattr(module, limit, value)
    if any(limit == "BUDGET" for _, limit, _ in limits):
        _give_less(monkeypatch, budget=5000)
    if any(limit == "MAX_NODES" for _, limit, _ in limits):
        _give_less(monkeypatch, nodes=100)
    found = findings_of(tmp_path, saved)
    heavy = [f for f in found if f.severity in (Severity.ERROR, Severity.SICKNESS)]
    assert [(f.check, f.severity) for f in heavy] == [("understood", Severity.SICKNESS)]
    assert heavy[0].file == name


def _give_less(monkeypatch: pytest.MonkeyPatch, **room: int) -> None:
    """Let every reading begin with less room."""
    full = files.ReadingBudget
    monkeypatch.setattr(files, "ReadingBudget", lambda *args, **more: full(*args, **{**more, "each": 0, **room}))


def test_names_that_run_code_are_found_before_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large is no place to hide: the names that were met are judged, and it is never good."""
    data = b"cos\nsystem\n(" + b"K\x01" * 5000 + b"l."
    _give_less(monkeypatch, budget=5000)
    found = findings_of(tmp_path, {"n-5.pkl": data})
    assert judge(found, sealed=False) is Outcome.BAD
    assert [f.check for f in found if f.severity is Severity.ERROR] == ["pickle-safety"]

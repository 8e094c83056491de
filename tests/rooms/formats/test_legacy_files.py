"""torch's legacy files: their pickles have no checksum, so what torch's loader wants is looked at word by word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.forked import Forked
from support.format_files import torch_bytes
from support.memory_reader import MemoryReader
from support.runs import QUICK

from ckptguard.formats import read_structure
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target

STATE = {"w": torch.ones(2), "b": torch.zeros(1, dtype=torch.int64), "lr": 0.5}
# In a process of its own: a flipped size may ask for all the memory there is.
LOAD = """
import io, json, resource, sys, warnings
import torch
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
raw, refused = open(sys.argv[1], "rb").read(), {}
for place in json.load(open(sys.argv[2])):
    flipped = bytearray(raw)
    flipped[place // 8] ^= 1 << place % 8
    for weights_only in (True, False):
        try:
            torch.load(io.BytesIO(bytes(flipped)), weights_only=weights_only)
            refused.pop(place, None)
            break
        except BaseException as error:
            refused[place] = f"{type(error).__name__}: {error}"
json.dump(refused, open(sys.argv[3], "w"))
"""


def flips(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Every single bit of it flipped."""
    for place in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        yield place, bytes(flipped)


def test_what_torch_refuses_has_a_problem(tmp_path: Path) -> None:
    """Every single bit flip, against torch itself."""
    raw = torch_bytes(STATE, _use_new_zipfile_serialization=False)
    passed = []
    for place, flipped in flips(raw):
        found = read_structure(MemoryReader("a.pt", flipped), "a.pt")
        if not found.problems and not found.unread:
            passed.append(place)
    assert len(passed) > 500
    (tmp_path / "a.pt").write_bytes(raw)
    (tmp_path / "places").write_text(json.dumps(passed))
    with Forked(LOAD, tmp_path / "a.pt", tmp_path / "places", tmp_path / "refused") as process:
        said = process.communicate(240)
        assert process.returncode == 0, said
    refused = json.loads((tmp_path / "refused").read_text())
    assert refused == {}


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:17", "mps", "xla:1", "npu:3"])
def test_any_device_that_torch_knows_is_a_place(device: str) -> None:
    """A checkpoint may come from another machine."""
    raw = torch_bytes(STATE, _use_new_zipfile_serialization=False, pickle_protocol=2)
    word = b"X" + len(device).to_bytes(4, "little") + device.encode()
    assert read_structure(MemoryReader("a.pt", raw), "a.pt").problems == ()
    moved = raw.replace(b"X\x03\x00\x00\x00cpu", word)
    assert moved != raw or device == "cpu"
    assert read_structure(MemoryReader("a.pt", moved), "a.pt").problems == ()


def test_that_nothing_vouches_for_it_is_said_once(tmp_path: Path) -> None:
    """At first sight: from then on its digests are on record. An archive with checksums is not told of."""
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "net-1.pt", _use_new_zipfile_serialization=False)
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "zip-1.pt")
    for seen in (1, 0):
        report = verify_target(str(tmp_path), QUICK, Selection(wait=0))
        assert report.outcome is Outcome.GOOD
        told = [f.file for c in report.checkpoints for f in c.findings if "no checksum of its own" in f.message]
        assert told == ["net-1.pt"] * seen

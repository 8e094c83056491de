"""Pickled modules and TorchScript: every parameter and buffer is a tensor by its name, as in a state dict."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import pytest
import torch
from support.format_files import scan_of, structure_of, torch_bytes
from support.runs import QUICK

from ckptguard.scan import ScannedFile
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

pytestmark = pytest.mark.filterwarnings("ignore")
SHARED = torch.nn.SiLU()


class Block(torch.nn.Module):
    """As in YOLO: an activation that all blocks share, and a tensor and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3), SHARED
        self.register_buffer("scale", torch.ones(2))
        self.stride, self.rate = torch.tensor([8.0]), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of it."""
        return self.act(self.norm(self.conv(x))) * self.rate


def bad(file: ScannedFile) -> list[str]:
    """What is not finite."""
    tensors = zip(file.structure.tensors, file.numbers, strict=True)
    return [t.name for t, n in tensors if n is not None and n.first_bad is not None] + [
        leaf.name for leaf in file.structure.leaves if not math.isfinite(leaf.value)
    ]


def test_a_module_is_read_like_its_state_dict(tmp_path: Path) -> None:
    """Under the same names; parts that hold no number are no alarm, however many share them."""
    model = torch.nn.Sequential(*(Block() for _ in range(40)))
    file = scan_of(tmp_path, "m.pt", torch_bytes({"model": model, "epoch": 3})).files[0]
    names = {t.name.removeprefix("model.") for t in file.structure.tensors}
    assert names == {*model.state_dict(), *(f"{i}.stride" for i in range(40))}
    assert (file.structure.problems, file.structure.unread, bad(file)) == ((), (), [])


@pytest.mark.parametrize("place", ["conv.weight", "norm.running_var", "scale", "stride", "rate"])
def test_a_nan_anywhere_in_a_module_is_found(tmp_path: Path, place: str) -> None:
    """In a parameter, a buffer, a plain tensor and a plain number."""
    model = torch.nn.Sequential(*(Block() for _ in range(20)))
    block = model[13]
    if place == "rate":
        block.rate = math.nan
    else:
        with torch.no_grad():
            part, _, name = f".{place}".rpartition(".")
            getattr(block.get_submodule(part[1:]), name).flatten()[0].fill_(math.nan)
    file = scan_of(tmp_path, "m.pt", torch_bytes(model)).files[0]
    assert bad(file) == [f"13.{place}"]


def test_what_is_not_read_is_told_in_one_line(tmp_path: Path) -> None:
    """However much of it there is."""
    import numpy as np

    held = {"model": {"w": torch.randn(3, 3)}, **{f"m{i}": np.longdouble(1) for i in range(55)}}
    torch.save(held, tmp_path / "net-1.pt")
    (checked,) = verify_target(str(tmp_path), QUICK, Selection(wait=0)).checkpoints
    warnings = [f for f in checked.findings if f.severity is Severity.WARNING]
    assert [(f.tensor, f.count) for f in warnings] == [("m0", 55)]
    assert len(warnings[0].message) < 100


def scripted(model: torch.nn.Module) -> bytes:
    """What torch.jit.save writes."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer)
    return buffer.getvalue()


class WithConstant(torch.nn.Module):
    """A traced one: the tensor that it adds becomes a constant."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer, self.value = torch.nn.Linear(4, 4), value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A layer and a constant."""
        return self.layer(x) + torch.full((4,), self.value)


def test_torchscript_is_read_and_good(tmp_path: Path) -> None:
    """Its tensors are those of its state dict; also for a file of unknown origin."""
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    structure = structure_of(tmp_path, "m.pt", scripted(model))
    assert structure.problems == ()
    assert {t.name for t in structure.tensors} >= set(model.state_dict())
    report = verify_target(str(tmp_path / "m.pt"), QUICK, Selection(record=False))
    heavy = [f for c in report.checkpoints for f in c.findings if f.severity is not Severity.NOTICE]
    assert (report.outcome, heavy) == (Outcome.GOOD, [])


def test_a_nan_in_torchscript_is_found(tmp_path: Path) -> None:
    """In a weight, and in a constant."""
    model = torch.nn.Sequential(Block())
    with torch.no_grad():
        model[0].conv.bias[1] = math.nan
    assert bad(scan_of(tmp_path, "m.pt", scripted(model)).files[0]) == ["0.conv.bias"]
    for value in (1.0, math.nan):
        buffer = io.BytesIO()
        with torch.no_grad():
            traced = torch.jit.trace(WithConstant(value), torch.ones(1, 4), check_trace=False)
            torch.jit.save(torch.jit.freeze(traced.eval()), buffer)
        file = scan_of(tmp_path, "m.pt", buffer.getvalue()).files[0]
        assert file.structure.problems == ()
        assert len(file.structure.tensors) >= 2
        assert (bad(file) != []) is math.isnan(value)


def test_every_record_of_torchscript_is_held_against_its_sum(tmp_path: Path) -> None:
    """Code is deflated; a byte that changes in any record is a problem."""
    raw = scripted(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()))
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        records = [i for i in archive.infolist() if i.compress_size > 4]
    assert any(i.compress_type == zipfile.ZIP_DEFLATED for i in records)
    for info in records:
        begin = info.header_offset + 30 + int.from_bytes(raw[info.header_offset + 26 :][:2], "little")
        begin += int.from_bytes(raw[info.header_offset + 28 :][:2], "little")
        damaged = bytearray(raw)
        damaged[begin + info.compress_size // 2] ^= 4
        assert scan_of(tmp_path, "m.pt", bytes(damaged)).files[0].structure.problems, info.filename

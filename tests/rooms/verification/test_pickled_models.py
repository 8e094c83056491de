"""A model that was pickled as a whole has one outcome, however it is addressed: it is judged in its folder."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from ckptguard import known_good, verify
from ckptguard.checks.pickle_safety import is_allowed
from ckptguard.engine.gate import gate
from ckptguard.errors import NoKnownGoodError
from ckptguard.runs.run_view import open_view
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Finding, Outcome, Severity

AT_ONCE = {"settle": 0.0}
# The files of two or three saves of one training, as trainers name them. A folder's other files hold no names.
LAYOUTS = {
    "numbered": ["epoch1.pt", "epoch2.pt", "epoch3.pt"],
    "yolo": ["best.pt", "last.pt"],
    "in a subfolder": ["weights/epoch4.pt", "weights/epoch5.pt"],
    "a number and a fixed name": ["ckpt_100.pth", "ckpt_200.pth", "best.pth"],
    "lightning": ["checkpoints/epoch=0-step=10.ckpt", "checkpoints/epoch=1-step=20.ckpt"],
    "folders": ["epoch1/model.pt", "epoch2/model.pt"],
    "trainer": ["checkpoint-100/pytorch_model.bin", "checkpoint-200/pytorch_model.bin"],
    "many": [f"net-{step}.pt" for step in range(10, 130, 10)],
}


class Armed:
    """Loading it would run a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def own_model() -> object:
    return sys.modules["mylib.nets"].Net()


def layers() -> object:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4), torch.nn.Dropout())


CONTENTS: dict[str, Callable[[], dict[str, object]]] = {
    "only tensors": dict,
    "torch's layers": lambda: {"model": layers()},
    "a class of the project": lambda: {"ema": own_model()},
    "both": lambda: {"model": layers(), "ema": own_model()},
    "armed": lambda: {"hook": Armed()},
    "armed, and unknown": lambda: {"model": layers(), "hook": Armed()},
}
EVERYWHERE = list(product(LAYOUTS, CONTENTS))


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose class pickles name."""
    module = types.ModuleType("mylib.nets")
    module.Net = type("Net", (), {"__module__": "mylib.nets"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mylib", types.ModuleType("mylib"))
    monkeypatch.setitem(sys.modules, "mylib.nets", module)


def save(path: Path, content: str, seed: int = 0) -> None:
    """Write one save, with weights of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {"weight": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))}
    torch.save({"weights": weights, **CONTENTS[content]()}, path)


def write(run: Path, layout: str, content: str) -> list[str]:
    """Write a training's saves, and return what a user may name: the run, each save, and each file in it."""
    for seed, file in enumerate(LAYOUTS[layout]):
        save(run / file, content, seed)
    parts = {place for file in LAYOUTS[layout] for place in (file, os.path.dirname(file)) if place}
    return [str(run), *(str(run / place) for place in sorted(parts))]


def told(target: str | Path) -> tuple[Outcome, tuple[Finding, ...], int]:
    """Return the outcome of a target, what is said of its pickles, and how many checkpoints it has."""
    report = verify(target, record=False, settings=AT_ONCE)
    findings = tuple(f for f in report.findings if f.check == "pickle-safety")
    return report.outcome, findings, len(report.checkpoints)


def named(content: str, folder: Path) -> set[str]:
    """Return the names outside the allow-list, as Python's own reader of opcodes finds them."""
    import pickletools
    import zipfile

    save(folder / "one.pt", content)
    with zipfile.ZipFile(folder / "one.pt") as archive:
        [data] = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    names = {str(text).replace(" ", ".") for opcode, text, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}
    return {name for name in names if not is_allowed(name)}


@pytest.mark.parametrize(("layout", "content"), EVERYWHERE)
def test_the_outcome_is_that_of_the_run(layout: str, content: str, tmp_path: Path) -> None:
    """The run, each save, and each file: one outcome. One line says all names of each save."""
    names = named(content, tmp_path / "alone")
    for target in write(tmp_path / "run", layout, content):
        outcome, findings, count = told(target)
        if "armed" in content:
            assert (outcome, {f.severity for f in findings} >= {Severity.ERROR}) == (Outcome.BAD, True), target
            continue
        assert (outcome, len(findings)) == (Outcome.GOOD, count if names else 0), target
        assert all(f.severity is Severity.WARNING for f in findings), target
        assert all(set((f.found or "").split(", ")) == names for f in findings), target


@pytest.mark.parametrize(("layout", "content"), EVERYWHERE)
def test_a_gate_and_the_records_agree(layout: str, content: str, tmp_path: Path) -> None:
    """What the files are by themselves, they are for a gate, and once the run has records."""
    settings, targets = Settings(**AT_ONCE), write(tmp_path / "run", layout, content)
    bad = "armed" in content
    view = open_view(str(tmp_path / "run"), settings)
    if bad:
        with pytest.raises(NoKnownGoodError):
            gate(view, attempts=3)
    else:
        assert gate(view, attempts=3).known_good is not None
        assert known_good(tmp_path / "run", settings=AT_ONCE) is not None
    folders = {str(tmp_path / "run" / name) for name in ("weights", "checkpoints")}  # no save: no target inside a run
    for target in targets:
        if target not in folders:
            assert told(target)[0] is (Outcome.BAD if bad else Outcome.GOOD), target


@pytest.mark.parametrize("content", [name for name in CONTENTS if name != "only tensors"])
def test_a_download_is_held_to_the_list(content: str, tmp_path: Path) -> None:
    """A file alone, beside what needs other names, or among the parts of one model keeps the allow-list."""
    lone = tmp_path / "alone" / "epoch2.pt"
    save(lone, content)
    other = tmp_path / "beside" / "epoch2.pt"
    save(other, content)
    save(other.with_name("epoch1.pt"), "only tensors")
    save(other.with_name("epoch3.pt"), "only tensors")
    for place in (lone, other):
        outcome, findings, _ = told(place)
        assert (outcome, {f.severity for f in findings}) == (Outcome.BAD, {Severity.ERROR})
    model = tmp_path / "model"
    for name in ("pytorch_model.bin", "optimizer.bin", "ema.bin"):
        save(model / name, content)
    for target in (model, *model.iterdir()):
        assert told(target)[0] is Outcome.BAD, target


def test_names_that_no_neighbour_needs_are_not_excused(tmp_path: Path) -> None:
    """A foreign file in the folder of a training is compared with what that training names."""
    for step, content in ((1, "torch's layers"), (2, "torch's layers"), (3, "both"), (4, "a class of the project")):
        save(tmp_path / f"epoch{step}.pt", content, step)
    outcomes = [told(tmp_path / f"epoch{step}.pt")[0] for step in (1, 2, 3, 4)]
    assert outcomes == [Outcome.GOOD, Outcome.GOOD, Outcome.BAD, Outcome.GOOD]


@pytest.mark.parametrize("damage", ["armed", "cut", "link", "gone"])
def test_a_neighbour_that_is_not_safe_excuses_nothing(damage: str, tmp_path: Path) -> None:
    """It must be whole, a file of its own, and free of what runs code."""
    one, two = tmp_path / "epoch1.pt", tmp_path / "epoch2.pt"
    save(one, "torch's layers", 1)
    save(two, "armed, and unknown" if damage == "armed" else "torch's layers", 2)
    if damage == "cut":
        two.write_bytes(two.read_bytes()[:-200])
    elif damage != "armed":
        two.unlink()
        if damage == "link":
            two.symlink_to(one)
    assert told(one)[0] is Outcome.BAD


def test_a_download_from_the_hub_is_no_training(tmp_path: Path) -> None:
    """`hf download --local-dir` notes what it fetched: two files with one class do not vouch for each other."""
    for seed, name in enumerate(("best.pt", "last.pt")):
        save(tmp_path / name, "a class of the project", seed)
    assert told(tmp_path / "best.pt")[0] is Outcome.GOOD
    notes = tmp_path / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    import hashlib

    for name in ("best.pt", "last.pt"):
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        (notes / f"{name}.metadata").write_text(f"{'0' * 40}\n{digest}\n4000000000.0\n")
    assert told(tmp_path / "best.pt")[0] is Outcome.BAD


def test_neighbours_are_read_only_after_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that names nothing unknown costs no look around, and one with them at most eight others."""
    from ckptguard.scan import files

    read: list[str] = []
    scan_files = files.scan_files
    monkeypatch.setattr(files, "scan_files", lambda s, keys, *rest: (read.extend(keys), scan_files(s, keys, *rest))[1])
    for step in range(1, 30):
        save(tmp_path / f"epoch{step}.pt", "only tensors", step)
    told(tmp_path / "epoch15.pt")
    assert set(read) == {"epoch15.pt"}
    read.clear()
    save(tmp_path / "epoch15.pt", "torch's layers")
    told(tmp_path / "epoch15.pt")
    assert set(read) == {f"epoch{step}.pt" for step in range(11, 20)}

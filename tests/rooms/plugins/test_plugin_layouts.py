"""Layouts of others: folders of files that only plugins read, and files that must be there."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from support.plugins import plant
from support.runs import QUICK
from support.views import look

from ckptguard.plugins.interface import FoundCheckpoint
from ckptguard.runs import plugin_layouts
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.storage.protocol import Entry
from ckptguard.testing import LayoutContract
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

READ = """
from ckptguard.plugins import FileContents, FoundCheckpoint, StoredTensor

def read(file):
    return FileContents((StoredTensor("w", "float32", (len(file.read()) // 12, 3), 0),))
"""
FIND = """
def find(names):
    for path in sorted({name.rpartition("/")[0] for name in names if name.startswith("it")}):
        own = tuple(name for name in names if name.startswith(path + "/"))
        yield FoundCheckpoint(path, own, () if path + "/DONE" in own else (path + "/DONE",))
"""
POINTS = [("formats", "weird.v1", "read"), ("layouts", "iterations.v1", "find")]
USED = QUICK.changed(layouts=("iterations",))


@pytest.fixture(autouse=True)
def _asked_again() -> None:
    plugin_layouts._answers.clear()


def digest_of(entries: Sequence[Entry]) -> str:
    """The digest of the names of the files."""
    names = sorted(entry.key for entry in entries if entry.kind == "file")
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def save(root: Path, step: int, value: float = 1.0, *, done: bool = True) -> None:
    """A folder of two files that only a plugin reads, and the mark that its writer leaves last."""
    folder = root / f"it{step}"
    folder.mkdir(parents=True)
    for name in ("params", "opt"):
        (folder / f"{name}.weird").write_bytes(torch.cat([torch.randn(500), torch.tensor([value])]).numpy().tobytes())
    if done:
        (folder / "DONE").write_text("yes")


class TestIterations(LayoutContract):
    """The contract."""

    name = "iterations"

    @pytest.fixture(autouse=True)
    def _installed(self, plugins: Path) -> None:
        plant(plugins, POINTS, READ + FIND)

    def names(self) -> Sequence[str]:
        return ("it1/params.weird", "it1/DONE", "it2/params.weird", "it2/DONE", "log.txt")

    def checkpoints(self) -> Mapping[str, Sequence[str]]:
        return {"it1": ("it1/params.weird", "it1/DONE"), "it2": ("it2/params.weird", "it2/DONE")}


def test_folders_are_checkpoints_with_all_that_they_need(tmp_path: Path, plugins: Path) -> None:
    """A whole one is good, one with NaN bad, one without its mark unfinished; and the verdict names both plugins."""
    plant(plugins, POINTS, READ + FIND)
    root = tmp_path / "run"
    save(root, 1)
    save(root, 2, math.nan)
    save(root, 3, done=False)
    found = verify_target(str(root), USED).checkpoints
    assert {c.path: c.outcome for c in found} == {"it1": Outcome.GOOD, "it2": Outcome.BAD, "it3": Outcome.INCOMPLETE}, (
        found[0].findings
    )
    known = find_known_good(look(str(root), USED).run)
    assert known is not None
    assert known.path.endswith("/it1")
    (entry,) = (root / "_ckptguard").glob("ledger/*/*1.1.0001.good.json")
    assert json.loads(entry.read_bytes().splitlines()[0])["plugins"] == ["formats/weird 1.5", "layouts/iterations 1.5"]


HOSTILE = {
    "claims our file": "def find(names): yield FoundCheckpoint('step-1', names)",
    "claims a shard": "def find(names): yield FoundCheckpoint('parts', ('parts/model-00001-of-00002.safetensors',))",
    "claims what is not there": "def find(names): yield FoundCheckpoint('it9', ('it9/params.weird',))",
    "claims elsewhere": "def find(names): yield FoundCheckpoint('../it1', names)",
    "claims everything": "def find(names): yield FoundCheckpoint('', names)",
    "claims text": "def find(names): yield FoundCheckpoint('notes', ('notes/README.md',))",
}
FAILS = {
    "fails": "def find(names): raise ValueError('no')",
    "hangs": "import time\ndef find(names): time.sleep(1000)",
    "returns other things": "def find(names): return ['it1']",
}


@pytest.mark.parametrize("how", [*HOSTILE, *FAILS])
def test_what_ours_found_keeps_its_verdict(
    how: str, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layout takes files of ours, or makes a checkpoint of them; one without an answer is a doubt."""
    plant(plugins, POINTS, READ + (HOSTILE | FAILS)[how])
    monkeypatch.setattr(plugin_layouts, "CALL_SECONDS", 2.0)
    root = tmp_path / "run"
    for step, value in ((1, 1.0), (2, math.nan)):
        (root / f"step-{step}").mkdir(parents=True)
        torch.save({"w": torch.full((8, 8), value) + torch.randn(8, 8)}, root / f"step-{step}" / "model.pt")
    (root / "notes").mkdir()
    (root / "notes" / "README.md").write_text("x" * 5000)
    before = {c.path for c in look(str(root), QUICK).checkpoints}
    report = verify_target(str(root), USED)
    good = Outcome.SUSPECT if how in FAILS else Outcome.GOOD
    assert {c.path: c.outcome for c in report.checkpoints} == {"step-1": good, "step-2": Outcome.BAD}
    assert before == {"step-1", "step-2"}
    again = verify_target(str(root), QUICK)
    assert {c.path: c.outcome for c in again.checkpoints}["step-1"] is Outcome.GOOD


def test_a_layout_may_ask_for_more_in_what_ours_found(tmp_path: Path, plugins: Path) -> None:
    """A checkpoint of ours without the file that it names is unfinished, and good once the file is there."""
    plant(
        plugins,
        POINTS,
        READ + "def find(names):\n    if 'step-1/DONE' not in names: yield FoundCheckpoint("
        "'step-1', (), ('step-1/DONE',))",
    )
    folder = tmp_path / "run" / "step-1"
    folder.mkdir(parents=True)
    torch.save({"w": torch.randn(8, 8)}, folder / "model.pt")
    assert verify_target(str(tmp_path / "run"), USED).outcome is Outcome.INCOMPLETE
    (folder / "DONE").write_text("yes")
    assert verify_target(str(tmp_path / "run"), USED).outcome is Outcome.GOOD


def test_a_layout_that_hangs_holds_up_one_listing(
    tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rests after that, also when files have come; and a listing without its answer is not kept."""
    asked = tmp_path / "asked"
    code = f"import time\ndef find(names):\n    open({str(asked)!r}, 'a').write('x')\n    time.sleep(1000)"
    plant(plugins, POINTS, READ + code)
    monkeypatch.setattr(plugin_layouts, "CALL_SECONDS", 3.0)
    monkeypatch.setattr(plugin_layouts, "_REST", 10_000.0)
    root = tmp_path / "run"
    for step in (1, 2):
        (root / f"step-{step}").mkdir(parents=True)
        torch.save({"w": torch.randn(8, 8)}, root / f"step-{step}" / "model.pt")
        view = look(str(root), USED)
        assert all(trouble for c in view.checkpoints for _, trouble in c.asked)
    assert asked.read_text() == "x"
    before = view.listing
    plugin_layouts._answers.clear()
    plugin_layouts._remember(("layouts/iterations 1.5", digest_of(view.entries)), plugin_layouts._Answer())
    assert view.list_after(before) is not before
    assert not any(trouble for c in view.checkpoints for _, trouble in c.asked)


def test_many_claims_take_no_longer_than_their_files(tmp_path: Path) -> None:
    """What is asked of the table of plugins grows with the claims, not with their square."""
    names = [f"it{number}/params.weird" for number in range(300)]
    asked = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plugin_layouts, "format_plugin", lambda path: asked.append(path) or None)
        claims = tuple(FoundCheckpoint(name.rpartition("/")[0], (name,)) for name in names)
        patched.setattr(plugin_layouts, "_asked", lambda *_: ("layouts/it 1", "", claims))
        entries = [Entry(key=name, kind="file", size=1) for name in names]
        (tmp_path / "run").mkdir()
        plugin_layouts.with_plugin_layouts(look(str(tmp_path / "run"), USED).run, entries, ())
    assert len(asked) == len(names)

"""The law of plugins: none makes a verdict better on anything that we understand ourselves, whatever it says."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path

import pytest
import torch
from support.plugins import forget, plant
from support.runs import QUICK, save_file
from support.views import look

from ckptguard.errors import WorkerError
from ckptguard.formats.structure import Structure
from ckptguard.plugins import formats
from ckptguard.plugins.formats import structure_of
from ckptguard.plugins.interface import FileContents, StoredTensor
from ckptguard.runs.results import Checked
from ckptguard.runs.work import Work
from ckptguard.scan import ScanOptions
from ckptguard.storage import open_storage
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import UNDERSTOOD, Outcome, Severity
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import read_by_plugins
from ckptguard.verification.target import verify_target

BETTER_FIRST = (Outcome.GOOD, Outcome.SUSPECT, Outcome.INCOMPLETE, Outcome.BAD)
NAMES = ("model.w", "model.b", "optimizer.exp_avg", "w", "layers.0.query.weight", "é", "x" * 999)
DTYPES = ("float32", "float16", "int64", "uint8", "bool", "complex64", "no type", "")
SIZE = 20_000
HOSTILE = {
    "fails": "def read(file): raise KeyError('lost')",
    "exits": "import sys\ndef read(file): sys.exit(0)",
    "dies": "import os\ndef read(file): os.kill(os.getpid(), 9)",
    "vanishes": "import os\ndef read(file): os._exit(0)",
    "hangs": "import time\ndef read(file): time.sleep(1000)",
    "waits for its child": (
        "import os, time\ndef read(file):\n    if os.fork(): os.wait()\n    else: time.sleep(1000)"
    ),
    "eats memory": "def read(file): return b'x' * 2**40",
    "returns nothing": "def read(file): return None",
    "returns a lie in prints": "def read(file): print('ok'); return 'ok'",
    "cannot be imported": "raise ImportError('no')",
    "is no function": "read = 3",
    "states a tensor beyond the end": (
        "from ckptguard.plugins import *\ndef read(f): return FileContents((StoredTensor('w', 'int8', (10**6,), 0),))"
    ),
    "states wrong types": (
        "from ckptguard.plugins import *\ndef read(f): return FileContents((StoredTensor('w', 'int8', 'abc', 0),))"
    ),
    "states too many tensors": (
        "from ckptguard.plugins import *\n"
        "def read(f): return FileContents((StoredTensor('w', 'int8', (1,), 0),) * (10**6 + 1))"
    ),
    "does not understand a lot": (
        "from ckptguard.plugins import *\ndef read(f): return FileContents(not_understood=('x',) * 10**7)"
    ),
    "states nothing": "from ckptguard.plugins import *\ndef read(f): return FileContents()",
    "states too little": (
        "from ckptguard.plugins import *\ndef read(f): return FileContents((StoredTensor('w', 'int8', (1,), 0),))"
    ),
}


def lies(chance: random.Random, *, clean: bool) -> FileContents:
    """What a plugin may say; `clean`: nothing of it can be seen to be wrong."""
    tensors, at = [], 0
    for name in chance.sample(NAMES, chance.randint(1, len(NAMES))):
        dtype = "float32" if clean else chance.choice(DTYPES)
        rows = chance.randint(1, 40)
        offset = at if clean or chance.random() < 0.7 else chance.randint(0, 2 * SIZE)
        tensors.append(StoredTensor(name, dtype, (rows, 16), offset))
        at = offset + 64 * rows
    if clean:
        tensors.append(StoredTensor("rest", "uint8", (SIZE - at,), at))
        return FileContents(tuple(tensors))
    problems = ("broken",) if chance.random() < 0.2 else ()
    unknown = ("a part",) if chance.random() < 0.2 else ()
    return FileContents(tuple(tensors), problems, truncated=chance.random() < 0.2, not_understood=unknown)


def save(root: Path, step: int, chance: random.Random) -> str:
    """A checkpoint of files that we know and two that we do not, healthy or with a fault."""
    folder = root / f"step-{step}"
    folder.mkdir(parents=True)
    fault = chance.choice(("", "nan", "zero", "zero vectors", "cut", "gone", "gone", "huge", "renamed"))
    scale = {"zero": 0.0, "zero vectors": 0.0, "huge": 1e30}.get(fault, 1.0)
    name = "other" if fault == "renamed" else "w"
    state = {name: scale * torch.randn(48, 48), "b": scale * torch.randn(48)}
    if fault == "zero vectors":
        state = {name: torch.zeros(48), "b": torch.zeros(48)}
    if fault == "nan":
        state[name][0] = math.nan
    save_file(state, folder / "model.safetensors")
    if fault == "cut":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    torch.save({"state": {0: {"exp_avg": state[name] * 0.1, "step": step}}, "param_groups": []}, folder / "optim.pt")
    if fault == "gone":
        (folder / "model.safetensors").unlink()
    (folder / "model.weird").write_bytes(torch.randn(SIZE // 4).numpy().tobytes())  # finite, for most lies
    if chance.random() < 0.5:
        (folder / "more.strange").write_bytes(b"\x00\x01" + chance.randbytes(3000))
    return folder.name


def judged(root: Path, path: str, settings: Settings, *, record: bool) -> Checked:
    """The verdict on one checkpoint."""
    view = look(str(root), settings)
    checkpoint = view.checkpoint(path)
    assert checkpoint is not None
    return verify_checkpoint(view, checkpoint, Verification(record=record))


def excused(checked: Checked) -> bool:
    """True if all that is wrong is that nobody understands the file that the plugin reads."""
    heavy = [f for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
    return all(f.check == UNDERSTOOD and f.file and f.file.endswith(".weird") for f in heavy)


@pytest.mark.parametrize("seed", range(30))
def test_no_lie_excuses_another_file(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any plugin, and after any plugin, a checkpoint is at best what it is without it."""
    chance, root = random.Random(seed), tmp_path / "run"
    torch.manual_seed(seed)
    said: dict[str, Structure] = {}
    monkeypatch.setattr(formats, "structures_by_plugins", lambda *_: dict(said))
    for step in (1, 2, 3):
        path = save(root, step, chance)
        contents = lies(chance, clean=chance.random() < 0.6)
        without = judged(root, path, QUICK.changed(no_plugins=True), record=False)
        said = {f"{path}/model.weird": structure_of(contents, SIZE, "formats/weird 1.5")}
        with_plugin = judged(root, path, QUICK, record=True)
        orders = [BETTER_FIRST.index(checked.outcome) for checked in (without, with_plugin)]
        assert orders[1] >= orders[0] or excused(without), (without.findings, with_plugin.findings)
        said = {}
        removed = judged(root, path, QUICK, record=False)  # the plugin is gone: that is no damage
        assert removed.outcome is not Outcome.BAD or without.outcome is Outcome.BAD, removed.findings


@pytest.mark.parametrize("places", [(), (5000,), (9000, 14000), (300, 5000, 9000, 14000)])
@pytest.mark.parametrize("installed", [False, True])
def test_new_content_of_its_file_does_not_excuse_damage(
    places: tuple[int, ...], installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged bit in our file is BAD, whatever its neighbour now holds; and both saved again is a new save."""
    torch.manual_seed(0)
    folder = tmp_path / "run" / "step-1"
    folder.mkdir(parents=True)
    known, other = folder / "model.safetensors", folder / "model.weird"
    tensors = tuple(StoredTensor(f"t{n}", "float32", (SIZE // 20,), n * SIZE // 5) for n in range(5))
    said = {"step-1/model.weird": structure_of(FileContents(tensors), SIZE, "formats/weird 1.5")} if installed else {}
    monkeypatch.setattr(formats, "structures_by_plugins", lambda *_: dict(said))
    for first in (True, False):
        if first or not places:
            save_file({"w": torch.randn(64, 64), "b": torch.randn(64)}, known)
        else:
            data = bytearray(known.read_bytes())
            for place in places:
                data[-place] ^= 4
            with open(known, "r+b") as file:
                file.write(data)
        other.write_bytes(torch.randn(SIZE // 4).numpy().tobytes())
        found = judged(tmp_path / "run", "step-1", QUICK, record=True)
        assert found.outcome is (Outcome.GOOD if first or (installed and not places) else found.outcome)
    assert (found.outcome is Outcome.BAD) is bool(places), found.findings


@pytest.mark.parametrize("how", HOSTILE)
def test_a_format_that_fails_is_no_verdict(
    how: str, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that only it can read is neither good nor bad, and files beside it keep their verdict."""
    plant(plugins, [("formats", "weird.v1", "read")], HOSTILE[how])
    monkeypatch.setattr(formats, "CALL_SECONDS", 2.0)
    alone = tmp_path / "model.weird"
    alone.write_bytes(bytes(range(1, 255)) * 80)
    report = verify_target(str(alone), QUICK)
    assert report.outcome is Outcome.PENDING
    assert report.could_not_tell
    root = tmp_path / "run"
    root.mkdir()
    alone.rename(root / "model_1.weird")
    torch.save({"w": torch.full((4, 4), math.nan)}, root / "model_1.pt")
    outcomes = {c.path: c.outcome for c in verify_target(str(root), QUICK).checkpoints}
    assert outcomes == {"model_1.weird": Outcome.SUSPECT, "model_1.pt": Outcome.BAD}


def test_a_format_that_hangs_is_asked_once_for_a_checkpoint(
    tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of many hostile files costs the time of one; and a stop does not wait for it."""
    asked = tmp_path / "asked"
    plant(
        plugins,
        [("formats", "weird.v1", "read")],
        f"import time\ndef read(file):\n    open({str(asked)!r}, 'a').write('x')\n    time.sleep(1000)",
    )
    folder = tmp_path / "run" / "step-1"
    folder.mkdir(parents=True)
    torch.save({"w": torch.randn(4, 4)}, folder / "model.pt")
    for number in range(4):
        (folder / f"{number}.weird").write_bytes(bytes(range(1, 255)) * 80)
    stop = threading.Event()
    stop.set()
    with pytest.raises(WorkerError, match="stopped"):
        read_by_plugins(open_storage(str(folder)), {"0.weird": "0.weird"}, ScanOptions(), QUICK, Work(stop=stop))
    asked.write_text("")
    monkeypatch.setattr(formats, "CALL_SECONDS", 3.0)
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.SUSPECT
    assert asked.read_text() == "x"


def test_without_a_place_for_its_answer_there_is_no_verdict(
    tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk for temporary files that is full or gone is "could not tell"."""
    plant(plugins, [("formats", "weird.v1", "read")], HOSTILE["states nothing"])
    (tmp_path / "model.weird").write_bytes(bytes(range(1, 255)) * 80)

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckptguard.plugins.call.tempfile.TemporaryFile", full)
    report = verify_target(str(tmp_path / "model.weird"), QUICK)
    assert report.outcome is Outcome.PENDING
    assert "No space left on device" in report.findings[0].message


CHECKS = {
    "says nothing": ("def check(saved): return []", Outcome.GOOD),
    "says it is good": ("from ckptguard.plugins import *\ndef check(s): yield Remark('good', 'notice')", Outcome.GOOD),
    "doubts": ("from ckptguard.plugins import *\ndef check(s): yield Remark('odd')", Outcome.SUSPECT),
    "condemns": ("from ckptguard.plugins import *\ndef check(s): yield Remark('wrong', 'error')", Outcome.BAD),
    "fails": ("def check(saved): raise ValueError('no')", Outcome.SUSPECT),
    "fails late": ("def check(saved):\n    yield from ()\n    raise ValueError('no')", Outcome.SUSPECT),
    "hangs": ("import time\ndef check(saved): time.sleep(1000)", Outcome.SUSPECT),
    "returns other things": ("def check(saved): return [{'outcome': 'good'}]", Outcome.SUSPECT),
    "invents a severity": ("def check(s): return [('fine', 'best')]", Outcome.SUSPECT),
}


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("how", CHECKS)
def test_a_check_only_adds_doubt(
    how: str, poison: bool, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is added; what it cannot say is a doubt that goes away with the trouble; ours stays."""
    code, expected = CHECKS[how]
    plant(plugins, [("checks", "rule.v1", "check")], code)
    monkeypatch.setattr("ckptguard.verification.plugin_checks.CALL_SECONDS", 2.0)
    root = tmp_path / "run"
    root.mkdir()
    state = {"model": {"w": torch.randn(8, 8)}, "step": 1}
    if poison:
        state["model"]["w"][0] = math.inf
    torch.save(state, root / "model_1.pt")
    settings = QUICK.changed(checks=("rule",))
    (found,) = verify_target(str(root), settings).checkpoints
    assert found.outcome is (Outcome.BAD if poison else expected), found.findings
    view = look(str(root))
    verdict = view.history.verdict(found.id)
    assert verdict.plugins == (() if poison else ("checks/rule 1.5",))
    if expected is Outcome.SUSPECT and how != "doubts" and not poison:
        (again,) = verify_target(str(root), QUICK).checkpoints
        assert again.outcome is Outcome.GOOD


REMOVED = {
    "removed": (None, ("rule",)),
    "failing": ("def check(saved): raise ValueError('no')", ("rule",)),
    "not named": ("", ()),
    "turned off": ("", None),
}


@pytest.mark.parametrize("how", REMOVED)
def test_what_a_check_condemned_is_not_good_without_it(how: str, tmp_path: Path, plugins: Path) -> None:
    """BAD becomes a suspicion, as often as it is verified without an answer; what the check takes back is good."""
    code, named = REMOVED[how]
    condemns = "from ckptguard.plugins import *\ndef check(saved): return [Remark('wrong', 'error')]"
    plant(plugins, [("checks", "rule.v1", "check")], condemns)
    root = tmp_path / "run"
    root.mkdir()
    torch.save({"w": torch.randn(8, 8)}, root / "model_1.pt")
    used = QUICK.changed(checks=("rule",))
    assert verify_target(str(root), used).outcome is Outcome.BAD
    if code is None:
        (plugins / "others-1.5.dist-info" / "entry_points.txt").unlink()
        forget()
    elif code:
        (plugins / "others.py").write_text(code)
    settings = used.changed(no_plugins=True) if named is None else used.changed(checks=named)
    assert [verify_target(str(root), settings).outcome for _ in range(2)] == [Outcome.SUSPECT] * 2
    assert verify_target(str(root), QUICK).outcome is Outcome.SUSPECT


def test_a_check_takes_back_what_it_said(tmp_path: Path, plugins: Path) -> None:
    """An error is its own to take back: a later version of the rule judges anew."""
    plant(plugins, [("checks", "rule.v1", "check")], CHECKS["condemns"][0])
    root = tmp_path / "run"
    root.mkdir()
    torch.save({"w": torch.randn(8, 8)}, root / "model_1.pt")
    used = QUICK.changed(checks=("rule",))
    assert verify_target(str(root), used).outcome is Outcome.BAD
    (plugins / "others.py").write_text("def check(saved): return ()  # a later version")
    assert verify_target(str(root), used).outcome is Outcome.GOOD

"""What `ckptguard` itself offers: its names, and what they cost."""

from __future__ import annotations

import inspect
import itertools
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptguard
from ckptguard.api import verbs
from ckptguard.errors import CkptguardError

ROOT = Path(__file__).resolve().parents[3]
VERBS = ("verify", "known_good", "restore", "checkpoints", "rollback", "diff", "incidents", "incident", "load", "seal")
ROOMS = sorted(p.name for p in (ROOT / "ckptguard").iterdir() if (p / "__init__.py").is_file() or p.suffix == ".py")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


def test_no_room_has_the_name_of_a_verb() -> None:
    """Importing a sub-package sets it as an attribute of the package, over a function of its name."""
    assert "verification" in ROOMS
    assert {Path(name).stem for name in ROOMS}.isdisjoint(ckptguard.__all__)


def test_a_verb_is_the_function_whatever_was_imported_before() -> None:
    """Every module of ours, every verb, in three orders, in fresh processes: a verb stays callable."""
    check = (
        "import importlib, pkgutil, sys\n"
        f"verbs = {VERBS!r}\n"
        "def rooms():\n"
        "    import ckptguard\n"
        "    for room in pkgutil.iter_modules(ckptguard.__path__, 'ckptguard.'):\n"
        "        if room.name not in ('ckptguard.__main__', 'ckptguard.testing'):\n"
        "            importlib.import_module(room.name)\n"
        "def functions():\n"
        "    import ckptguard\n"
        "    for verb in verbs:\n"
        "        found = getattr(ckptguard, verb)\n"
        "        assert callable(found) and found.__module__ == 'ckptguard.api.verbs', (verb, found)\n"
        "def stars():\n"
        "    space = {}\n"
        "    exec('from ckptguard import *', space)\n"
        "    assert all(callable(space[verb]) for verb in verbs)\n"
        "for name in sys.argv[1:]: globals()[name]()\n"
        "functions()\n"
    )
    for order in itertools.permutations(("rooms", "functions", "stars")):
        done = subprocess.run([sys.executable, "-c", check, *order], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), order


def test_all_names_are_there_and_are_shown() -> None:
    """Each public name loads, and completion in a shell offers exactly these."""
    assert set(VERBS) <= set(ckptguard.__all__)
    assert dir(ckptguard) == sorted(ckptguard.__all__)
    for name in ckptguard.__all__:
        assert getattr(ckptguard, name) is getattr(ckptguard, name)
    with pytest.raises(AttributeError, match="verfy"):
        _ = ckptguard.verfy


def test_help_begins_with_the_verbs() -> None:
    """One line for each verb, before anything else, and each function with its own help."""
    text = pydoc.plain(pydoc.render_doc(ckptguard))
    head = text[: text.index("PACKAGE CONTENTS")]
    for verb in (*VERBS, "check_pretrained", "TrainingGuard"):
        assert re.search(rf"^ +{verb}\(", head, re.MULTILINE), verb
    assert len(head.splitlines()) < 50
    for verb in VERBS:
        assert f"    {verb}(" in text[text.index("\nFUNCTIONS") :]


def test_every_verb_is_typed_and_says_what_it_raises() -> None:
    """Every argument has a type and is told of, and so is the answer."""
    for verb in VERBS:
        function = getattr(verbs, verb)
        said = inspect.signature(function)
        assert said.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in said.parameters.values())
        text = inspect.getdoc(function) or ""
        assert "Error" in text, verb
        if "Args:" in text:
            assert all(re.search(rf"^    {name}: ", text, re.MULTILINE) for name in said.parameters), verb


def test_a_guard_says_of_each_argument_what_it_is() -> None:
    """Its help has the type of each, and one line or two about it."""
    said = inspect.signature(ckptguard.TrainingGuard)
    assert all(p.annotation not in (inspect.Parameter.empty, "Any", Any) for p in said.parameters.values())
    text = inspect.getdoc(ckptguard.TrainingGuard) or ""
    for name in said.parameters:
        assert re.search(rf"^    {name}: .+\.$|^    {name}: .+\n        .+\.$", text, re.MULTILINE), name
    shown = pydoc.plain(pydoc.render_doc(ckptguard.TrainingGuard))
    for typed in ("model: 'Guarded'", "optimizer: 'Guarded | None'", "save: 'Callable[[str, int], object] | None'"):
        assert typed in shown


USER = """
import ckptguard
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
scaler = torch.amp.GradScaler("cpu")


class Mine:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


own: ckptguard.Guarded = Mine()
guard = ckptguard.TrainingGuard("r", model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
ckptguard.TrainingGuard("r", model=own, optimizer=Mine(), daemon="off")
for step, batch in guard.steps([("a", 1.5)], total=1, save_every=1):
    reveal_type(step)
    reveal_type(batch)
reveal_type(ckptguard.known_good("r").path)
ckptguard.TrainingGuard("r", model=3)
guard.steps(3, total=1, save_every=1)
"""


def test_a_users_file_is_checked_by_its_types(tmp_path: Path) -> None:
    """What torch makes may be guarded, and what has the two methods. Steps give the loader's batches, and a number is
    neither a model nor a loader."""
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(tmp_path / "user.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=550).stdout
    lines = [re.sub(r"^.*user\.py:\d+: (note: Revealed type is )?", "", line) for line in said.splitlines()]
    assert lines[:3] == ['"int"', '"tuple[str, float]"', '"str"'], said
    errors = [line for line in lines[3:] if line.startswith("error")]
    assert [line.rpartition("[")[2] for line in errors] == ["arg-type]"] * 2
    assert 'expected "Guarded"' in said


def test_errors_are_one_tree() -> None:
    """Every public error is a `CkptguardError`."""
    errors = [getattr(ckptguard, n) for n in ckptguard.__all__ if n.endswith("Error") or n == "RollbackExhausted"]
    assert len(errors) > 8
    assert all(issubclass(error, CkptguardError) for error in errors)


def test_importing_it_loads_nothing_else() -> None:
    """`import ckptguard` loads two modules of ours, and naming a verb neither torch nor numpy."""
    loaded = "sorted(n for n in sys.modules if n.startswith('ckptguard'))"
    assert python(f"import sys, ckptguard; print({loaded})") == "['ckptguard', 'ckptguard.version']"
    heavy = "{'torch', 'numpy', 'msgspec', 'rich', 'fsspec', 'blake3'} & set(sys.modules)"
    assert python(f"import sys\nfrom ckptguard import verify, load, seal\nprint({heavy} or 'none')") == "none"


def test_the_reference_names_everything_that_is_public() -> None:
    """The page for the Python API tells of each name, and of none that is not there."""
    page = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
    for name in ckptguard.__all__:
        assert name in page or name == "__version__", name
    named = set(re.findall(r"`ckptguard\.([A-Za-z_]+)[`(]", page))
    assert named - set(ckptguard.__all__) <= {"errors", "integrations", "testing", "toml", "__all__"}

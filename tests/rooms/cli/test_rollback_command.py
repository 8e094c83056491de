"""ckptguard rollback: how far back, and what is said of it."""

import re

import pytest
import torch
from support.runs import QUICK
from support.trainer_saves import load, open_clip, update_of
from support.views import look

from ckptguard.upkeep.reconcile import PassNotes, reconcile


@pytest.fixture
def epochs(root):
    """Three healthy epochs of open_clip."""
    notes = PassNotes()
    for epoch in (1, 2, 3):
        open_clip(root, epoch)
        reconcile(look(str(root), QUICK), notes)
    return root


@pytest.mark.parametrize("words", [("--step", "1"), ("--to", "epoch_1.pt"), ("--to", "1.1")])
def test_one_may_go_further_back(epochs, invoke, words):
    """By step, path or id; all that is newer goes, and the fixed name follows."""
    said = invoke("rollback", epochs, *words, "--force", "--dry-run").output
    assert "would quarantine epoch_3.pt" in said
    assert "would fill epoch_latest.pt with epoch_1.pt\n" in said
    assert re.search(r" from epoch 3: 2 epochs.* are made again, with all of their batches\n", said)
    assert invoke("rollback", epochs, *words, "--force").exit_code == 0
    assert sorted(p.name for p in epochs.glob("*.pt")) == ["epoch_1.pt", "epoch_latest.pt"]
    assert update_of(load(epochs / "epoch_latest.pt")) == 10


def test_the_plan_names_the_place_in_the_run(epochs, invoke):
    """Where the known-good lies afterwards, also if only its kept copy is left by now."""
    (epochs / "epoch_3.pt").unlink()
    (epochs / "epoch_latest.pt").unlink()
    said = invoke("rollback", epochs, "--step", "3", "--force", "--dry-run").output
    copied = "epoch_3.pt was gone: its kept copy would be used"
    assert said.startswith(f"would go back to {epochs / 'epoch_3.pt'}; {copied}\n")
    assert "_ckptguard" not in said


def test_what_is_not_known_good_is_not_gone_back_to(epochs, invoke):
    """13, in a sentence."""
    done = invoke("rollback", epochs, "--step", "9", "--force")
    assert done.exit_code == 13
    assert "no known-good checkpoint of step 9" in done.stderr
    assert invoke("rollback", epochs, "--step", "9", "--to", "1.1").exit_code == 2


@pytest.mark.parametrize("name", ["last.pt", "other/epoch_1.pt"])
def test_what_is_bad_in_another_folder_is_given_back_or_named(invoke, tmp_path, name):
    """Of the same training it holds the known-good content. A name that lies in two folders tells two trainings: it
    stays, and is named."""
    root = tmp_path / "run"
    for folder in ("epochs", "other"):
        (root / folder).mkdir(parents=True)
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 1}, root / "epochs" / "epoch_1.pt")
    model.weight.data.fill_(float("nan"))
    torch.save({"model": model.state_dict(), "epoch": 2}, root / name)
    assert invoke("verify", root).exit_code == 3
    done = invoke("rollback", root, "--force")
    assert done.exit_code == 0, done.stderr
    is_other = name.startswith("other/")
    assert (f"{name} is bad and stays, for it is of another training" in done.stderr) == is_other
    assert (f"quarantined {name}" in done.output) == (not is_other)
    weight, good = (torch.load(path)["model"]["weight"] for path in (root / name, root / "epochs/epoch_1.pt"))
    assert torch.equal(weight, good) == (not is_other)

"""A writer may pause between the files of one save for longer than `settle`. What comes late counts like the rest."""

import random
import shutil

import pytest
import torch
from support.faults import flip
from support.runs import QUICK, save_file, state_dict
from support.views import look

from ckptguard.keep.quarantine import mark_suspect
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint

STATE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
OTHER = ("README.md", "eval_results.json", "train.log", "training_args.bin")


def write(folder, name, step):
    """One file of a save."""
    numbers = torch.Generator().manual_seed(step)
    if name == "model.safetensors":
        save_file(state_dict(step), folder / name)
    elif name == "optimizer.pt":
        moments = {"exp_avg": torch.randn(48, 48, generator=numbers), "step": torch.tensor(float(step))}
        torch.save({"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}, folder / name)
    elif name == "rng_state.pth":
        torch.save({"cpu": torch.get_rng_state()}, folder / name)
    elif name in ("scheduler.pt", "training_args.bin"):
        torch.save({"last_epoch": step}, folder / name)
    else:
        (folder / name).write_text(f'{{"step": {step}}}')


@pytest.mark.parametrize("seed", range(40))
def test_late_files_count(root, seed):
    """Any order of files with a pass after any of them: at the end all state has digests and copies, and none of the
    passes found anything bad. Damage and loss of any file with state are seen. Other files make no generation."""
    chance = random.Random(seed)
    notes, settings = PassNotes(), QUICK.changed(keep_good=1)
    written = {}
    for step in range(1, 4):
        folder = root / f"ckpt-{step}"
        folder.mkdir()
        first = chance.choice(STATE[:2])
        rest = [name for name in (*STATE, *OTHER) if name != first and (name in STATE or chance.random() < 0.5)]
        chance.shuffle(rest)
        for name in (first, *rest):
            write(folder, name, step)
            if chance.random() < 0.6:
                checked = reconcile(look(str(root), settings), notes).checked
                assert {c.outcome for c in checked} <= {Outcome.GOOD, Outcome.INCOMPLETE}
            if chance.random() < 0.1:
                notes = PassNotes()
        reconcile(look(str(root), settings), notes)
        view = look(str(root), settings)
        id = view.current(view.checkpoint(folder.name))
        assert view.is_good(id), view.history.verdict(id).findings
        assert {file.path for file in view.history.manifest(id).files} >= {f"{folder.name}/{name}" for name in STATE}
        assert len(view.history.sealed(id.series)) <= step * len(STATE)
        written[step] = {name: (folder / name).read_bytes() for name in STATE}
        if step > 1:
            shutil.rmtree(root / f"ckpt-{step - 1}")
    name = chance.choice(STATE)
    if chance.random() < 0.5:
        flip(folder / name)
    else:
        (folder / name).unlink()
    view = look(str(root), settings)
    assert verify_checkpoint(view, view.checkpoint(folder.name)).outcome is Outcome.BAD
    shutil.rmtree(folder)
    reconcile(look(str(root), settings), notes)
    assert find_known_good(look(str(root), settings).run).id.step == 3
    roll_back(look(str(root), settings), GoBack(reason="test", check_writing=False))
    assert {name: (folder / name).read_bytes() for name in STATE} == written[3]


def test_a_late_file_is_copied_before_its_verdict(root):
    """A rotation that comes before the verdict on the late file does not lose it."""
    folder, notes = root / "ckpt-1", PassNotes()
    folder.mkdir()
    write(folder, "model.safetensors", 1)
    reconcile(look(str(root)), notes)
    write(folder, "optimizer.pt", 1)
    waiting = reconcile(look(str(root), QUICK.changed(settle=600.0)), notes)
    assert not waiting.checked
    kept = [copy.files for copy in look(str(root)).waiting_copies("ckpt-#")]
    assert kept == [("ckpt-1/model.safetensors", "ckpt-1/optimizer.pt")]


def test_suspicion_stays_with_a_checkpoint_that_grows(root):
    """A late file makes no suspect checkpoint good."""
    folder, notes = root / "ckpt-1", PassNotes()
    folder.mkdir()
    write(folder, "model.safetensors", 1)
    reconcile(look(str(root)), notes)
    view = look(str(root))
    mark_suspect(view, view.current(view.checkpoint("ckpt-1")), "the loss rose")
    write(folder, "optimizer.pt", 1)
    assert [c.outcome for c in reconcile(look(str(root)), notes).checked] == [Outcome.SUSPECT]


@pytest.mark.parametrize("seed", range(10))
def test_saves_faster_than_settle_have_a_known_good(root, seed):
    """A folder of each step, a rotation of one, and never a moment of quiet: the save before the newest is known-good,
    with all of its files, from the copy that was made when the next save had begun."""
    chance, notes, settings = random.Random(seed), PassNotes(), QUICK.changed(settle=600.0)
    names = chance.sample(STATE, k=len(STATE))
    while names[0] not in STATE[:2]:
        names.append(names.pop(0))
    written = {}
    for step in range(1, 6):
        folder = root / f"ckpt-{step}"
        folder.mkdir()
        for name in names:
            write(folder, name, step)
            assert not [c for c in reconcile(look(str(root), settings), notes).checked if c.outcome is not Outcome.GOOD]
        written[step] = {name: (folder / name).read_bytes() for name in names}
        if step > 1:
            shutil.rmtree(root / f"ckpt-{step - 1}")
            reconcile(look(str(root), settings), notes)
            assert find_known_good(look(str(root), settings).run).id.step == step - 1
    shutil.rmtree(folder)
    roll_back(look(str(root), settings), GoBack(reason="test", check_writing=False))
    assert {name: (root / "ckpt-4" / name).read_bytes() for name in names} == written[4]

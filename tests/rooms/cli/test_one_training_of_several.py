"""Each training goes back by itself: names that tell trainings apart, what one began with, and folders at any depth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.several_files import optimizer, save, step_of, weights
from support.views import look

from ckptguard.layouts.step_names import step_from_name
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.exit_codes import ExitCode
from ckptguard.values.ids import series_of, training_named_in
from ckptguard.values.settings import Settings

QUICK = Settings(settle=0.0, scan_interval=1.0)
# How a name says which training it is, and how far.
TRAINING = st.sampled_from(
    ["fold{}", "fold_{}", "kfold-{}", "seed{}", "Seed-{}", "trial{}", "lr0.{}", "lr={}e-4", "bs{}"]
)
PROGRESS = st.sampled_from(["epoch{}", "epoch={}", "step_{}", "checkpoint-{}", "{}", "it{}"])
SEPARATOR = st.sampled_from(["-", "_", "__"])


@given(
    training=TRAINING,
    progress=PROGRESS,
    between=SEPARATOR,
    before=st.sampled_from(["", "model_", "resnet50-"]),
    steps=st.lists(st.integers(0, 99_999), min_size=1, max_size=4, unique=True),
    first=st.booleans(),
)
def test_a_name_says_which_training_it_is_and_how_far(training, progress, between, before, steps, first):
    """Names of two trainings are of two series, and those of one are of one. The number of the training is no step."""
    series = {}
    for n in (1, 2, 10):
        for step in steps:
            words = (training.format(n), progress.format(step))
            name = before + between.join(words if first else words[::-1]) + ".pth"
            assert step_from_name(name) == step, name
            series.setdefault(n, set()).add(series_of(name))
            assert training_named_in(name) == training_named_in(series_of(name)) != ()
    assert [len(own) for own in series.values()] == [1, 1, 1]
    assert len(set.union(*series.values())) == 3


def save_folds(root: Path, rows: list[tuple[int, int, bool]], *, with_optimizer: bool) -> None:
    """Saves of (fold, epoch, sick), each before a look."""
    notes = PassNotes()
    for fold, epoch, sick in rows:
        state = {"model": weights(epoch, "net", sick=sick)}
        save(root / f"fold{fold}_epoch{epoch}.pth", state | ({"optimizer": optimizer(epoch)} if with_optimizer else {}))
        reconcile(look(str(root), QUICK), notes)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("in_turn", [True, False])
def test_a_fold_goes_back_to_its_own(root, invoke, with_optimizer, in_turn):
    """NaN in fold 1 takes nothing from fold 2, and nothing that is bad is left the newest of its fold."""
    rows = [(fold, epoch, fold == 1 and epoch == 5) for fold in (1, 2) for epoch in (3, 4, 5)]
    save_folds(root, sorted(rows, key=lambda row: row[1]) if in_turn else rows, with_optimizer=with_optimizer)
    assert Path(invoke("known-good", root).stdout.strip()).name == "fold2_epoch5.pth"
    assert invoke("rollback", root).exit_code == 0
    left = sorted(path.name for path in root.glob("*.pth"))
    assert left == [f"fold{fold}_epoch{epoch}.pth" for fold, epoch, sick in rows if not sick]


def test_the_fold_that_was_saved_last_is_gone_back_to(root, invoke):
    """Fold 1 is ready, and longer. Fold 2 turned NaN: its own save is known-good."""
    save_folds(root, [(1, 30, False), (2, 1, False), (2, 2, False), (2, 3, True)], with_optimizer=True)
    assert Path(invoke("known-good", root).stdout.strip()).name == "fold2_epoch2.pth"
    assert invoke("rollback", root).exit_code == 0
    assert sorted(path.name for path in root.glob("*.pth")) == [
        f"fold{n}.pth" for n in ("1_epoch30", "2_epoch1", "2_epoch2")
    ]


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_what_a_training_began_with_is_no_save_of_it(root, invoke, with_optimizer):
    """A downloaded model is not known-good where every save is NaN, and is once a save was good before it."""
    save(root / "pretrained.pth", {"model": weights(1, "net")})
    os.utime(root / "pretrained.pth", ns=(10**18, 10**18))
    notes = PassNotes()
    for step in (100, 200):
        state = {"model": weights(step, "net", sick=True)}
        save(root / f"model_{step}.pth", state | ({"optimizer": optimizer(step)} if with_optimizer else {}))
        reconcile(look(str(root), QUICK), notes)
    refused = invoke("known-good", root)
    assert refused.exit_code == ExitCode.NO_KNOWN_GOOD
    assert "pretrained.pth" in refused.stderr
    assert invoke("rollback", root).exit_code == ExitCode.NO_KNOWN_GOOD
    save(
        root / "model_300.pth",
        {"model": weights(300, "net")} | ({"optimizer": optimizer(300)} if with_optimizer else {}),
    )
    reconcile(look(str(root), QUICK), notes)
    assert Path(invoke("known-good", root).stdout.strip()).name == "model_300.pth"
    assert step_of(root / "pretrained.pth") == 1


@pytest.mark.parametrize("depth", range(9))
def test_a_save_is_seen_at_any_depth(root, invoke, depth):
    """Whatever folders a sweep or Hydra makes around it."""
    folder = root.joinpath(*(f"version_{n}" if n % 2 else "my sweep" for n in range(depth)))
    notes = PassNotes()
    for step in (100, 200):
        save(folder / f"model_{step}.pth", {"model": weights(step, "net", sick=step == 200)})
        reconcile(look(str(root), QUICK), notes)
    assert Path(invoke("known-good", root).stdout.strip()) == folder / "model_100.pth"
    assert invoke("rollback", root).exit_code == 0
    assert not (folder / "model_200.pth").exists()
    assert invoke("verify", folder / "model_100.pth").exit_code == 0

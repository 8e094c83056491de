"""A number that counts is the step, wherever it stands in a name; as a series was read once it is read for good."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.several_files import optimizer, save, weights
from support.views import look

from ckptguard.layouts import discovery
from ckptguard.layouts.step_names import step_from_name
from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

QUICK = Settings(settle=0.0, scan_interval=1.0)
NAMES = ("model{:06d}.pt", "rl_model_{}_steps.pth", "{}epoch.pth", "{}_G.pth", "state_e{}_b9000.pth", "run.{}.ema.pt")
STEPS = (5000, 10000, 20000)


def passes(root: Path, name: str, steps: tuple[int, ...]) -> None:
    """Saves, and a look after each."""
    notes = PassNotes()
    for step in steps:
        save(root / name.format(step), {"model": weights(step, "net"), "optimizer": optimizer(step)})
        reconcile(look(str(root), QUICK), notes)


def ids(view: RunView) -> list[tuple[str, str]]:
    """The id of each checkpoint in place."""
    return [(c.path, str(view.current_if_readable(c))) for c in view.checkpoints]


@pytest.mark.parametrize("name", NAMES)
def test_the_step_is_found_wherever_it_stands(root, invoke, name):
    """``list``, ``known-good --before-step`` and ``restore --step`` know it."""
    passes(root, name, STEPS)
    assert {c.path: c.step for c in look(str(root), QUICK).checkpoints} == {
        name.format(step): (step, 9000) if name.startswith("state") else step for step in STEPS
    }
    if not name.startswith("state"):
        before = invoke("known-good", root, "--before-step", "20000")
        assert Path(before.stdout.strip()).name == name.format(10000)
        assert invoke("restore", root, "--step", "5000", "--to", root.with_name("out")).exit_code == 0
        assert root.with_name("out").joinpath(name.format(5000)).exists()


@pytest.mark.parametrize("name", NAMES)
def test_what_an_older_release_recorded_without_a_step_goes_on_so(root, monkeypatch, name):
    """Nothing is verified again, and later saves are ordered after the earlier ones."""
    with monkeypatch.context() as older:
        older.setattr(discovery, "step_from_name", partial(step_from_name, words=False))
        passes(root, name, STEPS[:2])
    before = ids(look(str(root), QUICK))
    assert dict(before) == {name.format(step): f"-.{n}" for n, step in enumerate(STEPS[:2], 1)}
    passes(root, name, STEPS[2:])
    assert dict(ids(look(str(root), QUICK))) == {**dict(before), name.format(20000): "-.3"}


def test_a_name_that_says_less_is_read_as_the_others_of_its_series(root):
    """``5000_net.pth`` is surely a step, ``500_net.pth`` alone is not."""
    passes(root, "{}_net.pth", (5000, 500, 6000))
    assert dict(ids(look(str(root), QUICK))) == {f"{n}_net.pth": f"{n}.1" for n in (500, 5000, 6000)}

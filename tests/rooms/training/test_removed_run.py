"""A trainer that removes its own run, while a guard and the guard's daemon are at it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from support.forked import Forked
from support.runs import QUICK

import ckptguard

PATH = (str(Path(__file__).parents[2]),)


def test_a_guard_makes_no_removed_run_again(tmp_path):
    """Whatever it still had to record: the folder stays away, nothing is raised, and nothing is said."""
    script = (
        "import os, shutil, sys\n"
        "import torch\n"
        "import ckptguard\n"
        "from support.runs import QUICK\n"
        "run = sys.argv[1]\n"
        "guard = ckptguard.TrainingGuard(run, model=torch.nn.Linear(2, 2), daemon=None, settings=QUICK)\n"
        "for _ in guard.steps([1.0], total=3, save_every=1):\n"
        "    guard.observe(loss=1.0)\n"
        "while os.path.exists(run):  # a record that comes just then makes one attempt fail\n"
        "    shutil.rmtree(run, ignore_errors=True)\n"
        "print('removed', file=sys.stderr, flush=True)\n"
        "guard.close()\n"
    )
    process = Forked(script, tmp_path / "run", path=PATH)
    _, said = process.communicate()
    assert (process.returncode, said.partition("removed\n")[1:]) == (0, ("removed\n", ""))
    assert not (tmp_path / "run").exists()


def test_a_run_that_a_trainer_makes_again_is_a_new_one(tmp_path):
    """In the same process, at once, under the same name."""
    run = tmp_path / "run"
    found = []
    for _ in range(2):
        shutil.rmtree(run, ignore_errors=True)
        guard = ckptguard.TrainingGuard(run, model=torch.nn.Linear(2, 2), daemon=None, settings=QUICK)
        for _ in guard.steps([1.0], total=2, save_every=1):
            guard.observe(loss=1.0)
        guard.close()
        found.append([path.name for path in sorted((run / "_ckptguard" / "manifests").glob("*/*.json"))])
    assert found[0] == found[1]
    assert found[0]


def test_runs_are_removed_beside_their_guard_and_its_daemon(tmp_path):
    """Right after a save, by `shutil.rmtree`: it works, and nothing comes back."""
    for number in range(4):
        run = tmp_path / f"run{number}"
        guard = ckptguard.TrainingGuard(run, model=torch.nn.Linear(64, 64), daemon="auto", settings=QUICK)
        for _ in guard.steps([1.0], total=4, save_every=1):
            guard.observe(loss=1.0)
        while run.exists():  # a record that comes just then makes one attempt fail
            shutil.rmtree(run, ignore_errors=True)
        guard.close()
        assert not run.exists()

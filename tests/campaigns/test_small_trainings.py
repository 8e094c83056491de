"""Healthy trainings of many kinds in many layouts: no file is taken for one of another save."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.runs import QUICK
from support.small_trainings import KINDS, LAYOUTS, NEVER, saves

from ckptguard.values.verdict import Severity
from ckptguard.verification.target import Selection, verify_target

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SEEDS = range(3) if FULL else range(1)


def alarms(kind: str, layout: str, seed: int, run: Path) -> tuple[int, list[str]]:
    """How many saves were verified, each after it was written, and what was said of them."""
    count, found = 0, []
    for place in saves(kind, layout, seed, run):
        step = place.name.removeprefix("checkpoint-")
        what = Selection(wait=0, step=int(step) if step.isdigit() else None)
        checked = verify_target(str(run), QUICK, what).checkpoints  # files beside a checkpoint may be some, too
        assert checked
        about = [f for one in checked for f in one.findings if f.check == "same-save"]
        heavy = [f.message for f in about if f.severity in (Severity.ERROR, Severity.SICKNESS)]
        count += 1
        found += [f"{kind} in {layout}, {place.name}: {message}" for message in heavy]
    return count, found


@pytest.mark.campaign
@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_no_healthy_save_has_a_file_of_another(kind, tmp_path):
    """In the short form each kind in one layout, in the full one in each."""
    layouts = LAYOUTS if FULL else [LAYOUTS[(KINDS.index(kind) + 1) % len(LAYOUTS)]]
    verified, found = 0, []
    for layout in (layout for layout in layouts if (kind, layout) not in NEVER):
        for seed in SEEDS:
            count, said = alarms(kind, layout, seed, tmp_path / "run")
            verified += count
            found += said
            shutil.rmtree(tmp_path / "run")
    assert verified >= 7
    assert found == []

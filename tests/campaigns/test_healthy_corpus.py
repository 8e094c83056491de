"""Healthy checkpoints that the libraries themselves made: no alarm, whatever the architecture.

Packages that are not there are looked for in the folders of CKPTGUARD_TRAINERS, which are separated as in PATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import QUICK

from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

TESTS = Path(__file__).resolve().parent.parent
FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
MISSING = 77
FAMILIES = (
    *("transformers", "timm", "torchvision", "diffusers", "ultralytics", "speechbrain", "lightning", "peft"),
    *("quantised", "bitsandbytes", "others"),
)


@pytest.mark.skipif(not FULL, reason="it writes a gigabyte: CKPTGUARD_CAMPAIGN=full")
@pytest.mark.campaign
@pytest.mark.trainers
@pytest.mark.torch
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_libraries_make_is_good(family, tmp_path, capsys):
    """GOOD, and nothing heavier than a notice, but the names of a model that was pickled as a whole."""
    script = TESTS / "support" / "healthy_checkpoints.py"
    elsewhere = os.environ.get("CKPTGUARD_TRAINERS", "").split(os.pathsep)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, elsewhere)]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "YOLO_CONFIG_DIR": str(tmp_path / "settings"),
    }
    made = subprocess.run(
        [sys.executable, "-P", script, family, tmp_path / "made"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if made.returncode == MISSING:
        pytest.skip(made.stdout.strip() or "a package is missing")
    assert made.returncode == 0, made.stderr[-2000:]
    folders = sorted((tmp_path / "made").iterdir())
    alarms = {}
    for folder in folders:
        report = verify_target(str(folder), QUICK, Selection(wait=0, record=False))
        findings = [f for c in report.checkpoints for f in c.findings if f.check != "pickle-safety"]
        heavy = [f for f in findings if f.severity is not Severity.NOTICE]
        if report.outcome is not Outcome.GOOD or heavy:
            alarms[folder.name] = (report.outcome, heavy[:3])
    files = sum(path.is_file() for path in (tmp_path / "made").rglob("*"))
    with capsys.disabled():
        print(f"{family}: {len(folders)} checkpoints, {files} files; {made.stdout.strip()}")
    assert folders
    assert alarms == {}

"""A short soak in the normal suite; `soak.py` is the long one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from soak import Plan, soak

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3 * 3600 if FULL else 900)]


def test_nothing_of_a_user_is_harmed(short_folder: Path) -> None:
    """While runs are removed and moved, disks are full and the daemon is killed, each file of a user keeps its bytes,
    each save gets its right verdict, and the daemon stays as small as it was."""
    plan = Plan(short_folder, 120, 100) if FULL else Plan(short_folder, 0.5, 16, disks=2, pace=4)
    report = soak(plan)
    print(json.dumps(report.summary(), indent=2))
    assert report.actions["files compared"] > 100
    assert report.actions["runs whose verdicts were compared"] > 0
    assert not report.wrong, dict(report.wrong)

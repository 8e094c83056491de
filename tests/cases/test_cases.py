"""The five cases fail for real, go back, and end trained on from a good checkpoint, with a report that says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_runs import QUICK

from ckptguard.operations.find_known_good import find_known_good
from ckptguard.operations.verify_target import verify_target
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.verdict import Outcome

CASES = Path(__file__).resolve().parents[2] / "examples" / "cases"
pytestmark = pytest.mark.torch


def run_case(name, *arguments):
    """Run a case as its reader would, without this machine's settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
    done = subprocess.run(
        [sys.executable, CASES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**environment, "CKPTGUARD_SETTLE": "0", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wenet(tmp_path):
    """Batch norm is poisoned by silence although no update is made; training goes back and ends able to recognise."""
    told = run_case("wenet.py", tmp_path / "run")
    assert "no update made; batch norm's mean: nan" in told
    assert "1.norm.running_mean is not finite" in told
    assert "finished at step 60: 100% of 320 recordings are recognised" in told
    assert_good_to_the_end(tmp_path / "run", 60)


def assert_good_to_the_end(path, step):
    """Nothing bad is left in the run, the last step is known-good, and no incident is open."""
    assert verify_target(str(path), QUICK).outcome is Outcome.GOOD
    run = open_run(str(path))
    assert find_known_good(run).step == step
    assert {i.state for i in list_incidents(run)} == {"closed"}

"""The five cases fail for real, go back, and end trained on from a good checkpoint, with a report that says why."""

import os
from pathlib import Path

import pytest
from support.forked import HUGGING_FACE, TORCH, Forked
from support.runs import QUICK

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

CASES = Path(__file__).resolve().parents[2] / "examples" / "cases"
pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def run_case(name, *arguments):
    """Run a case as its reader would, without this machine's settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
    place = CASES / name
    process = Forked(
        place.read_text(encoding="utf-8"),
        *arguments,
        name=str(place),
        environment={**environment, "CKPTGUARD_SETTLE": "0", "OMP_NUM_THREADS": "1"},
        imported=TORCH if name in ("wenet.py", "nanovlm.py") else HUGGING_FACE,
    )
    out, err = process.communicate(300)
    assert process.returncode == 0, out + err
    return out


def test_wenet(tmp_path):
    """Batch norm is poisoned by silence although no update is made; training goes back and ends able to recognise."""
    told = run_case("wenet.py", tmp_path / "run")
    assert "no update made; batch norm's mean: nan" in told
    assert "1.norm.running_mean is not finite" in told
    assert "finished at step 60: 100% of 320 recordings are recognised" in told
    assert_good_to_the_end(tmp_path / "run", 60)


def test_nanovlm(tmp_path):
    """A batch of masked answers is harmless; an overflow in fp16 takes training back."""
    told = run_case("nanovlm.py", tmp_path / "run")
    assert "step 11: loss nan, gradient norm 0: harmless" in told
    assert "step 26: loss nan, gradient norm nan: sick" in told
    assert "1. fp16 overflow" in told
    assert "finished at step 60: 100% of 160 answers are right" in told
    assert_good_to_the_end(tmp_path / "run", 60)


@pytest.mark.writers
def test_qwen2(tmp_path):
    """The log shows a loss of 0 and every save is poisoned; under guard none is, and the cause is named."""
    told = run_case("qwen2.py", tmp_path)
    assert "0.0, 0.0, 0.0]; weights that hold NaN: 27 of 27" in told
    assert "all that is left: ['checkpoint-15', 'checkpoint-20']" in told
    assert "the budget of 3 rollbacks is spent" in told
    assert "1. An eps that vanishes in fp16 (likely)" in told
    assert "finished at step 20, weights that hold NaN: 0 of 27" in told
    assert verify_target(str(tmp_path / "plain"), QUICK).outcome is Outcome.BAD
    assert_good_to_the_end(tmp_path / "guarded", 20)


@pytest.mark.writers
def test_minicpm(tmp_path):
    """Nothing in the log; sampling from the saved adapter raises. Under guard no such adapter is saved."""
    told = run_case("minicpm.py", tmp_path)
    plainly = told.partition("--- continued plainly")[2].partition("asked: ")[0]
    assert "'loss': '3." in plainly
    assert "nan" not in plainly
    assert "asked: RuntimeError: probability tensor contains either `inf`, `nan` or element < 0" in told
    assert "checkpoint-20 is bad, do not train from it: adapter_model.safetensors: base_model." in told
    assert "the budget of 3 rollbacks is spent" in told
    assert "1. An eps that vanishes in fp16 (likely)" in told
    assert "asked: an answer of " in told
    assert verify_target(str(tmp_path / "plain"), QUICK).outcome is Outcome.BAD
    assert_good_to_the_end(tmp_path / "guarded", 20)


@pytest.mark.writers
def test_hallo(tmp_path):
    """Only sums know of the damaged byte; DeepSpeed's loss scale at its minimum takes training back and ends nothing;
    what two processes saved is refused to one with a sentence."""
    told = run_case("hallo.py", tmp_path)
    assert "without sums: good" in told
    assert "damaged.safetensors: sha256 is not the one that" in told
    plainly, guarded = told.split("--- under guard, number of processes: 2")
    assert "loss inf, loss scale 1\ntraining ends: Current loss scale already at minimum" in plainly
    assert "finished at step 24, all weights finite: True" in guarded
    assert "the loss scale fell to its floor (1)" in guarded
    assert "1. fp16 overflow (likely)" in guarded
    single = guarded.partition("--- under guard, number of processes: 1")[2]
    assert "used a DP world size of 2 but the current world size is 1" in single
    assert "; start as many processes as saved it" in single
    assert_good_to_the_end(tmp_path / "run", 24)


def assert_good_to_the_end(path, step):
    """Nothing bad is left in the run, the last step is known-good, and no incident is open."""
    assert verify_target(str(path), QUICK).outcome is Outcome.GOOD
    run = open_run(str(path))
    assert find_known_good(run).step == step
    assert {i.state for i in list_incidents(run)} == {"closed"}

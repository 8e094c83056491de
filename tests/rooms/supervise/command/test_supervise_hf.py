"""Supervise over the scripts that most people have: Hugging Face's Trainer, and a loop with torch.save, both resuming
from the highest number. CKPTGUARD_CAMPAIGN=full: also where only the Trainer's log tells, and without supervision."""

import json
import os
from pathlib import Path

import pytest
from supervised_training import starts

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run

SCRIPT = Path(__file__).with_name("train_hf.py")
FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
CASES = ["weights", "log", "not supervised", "torch"] if FULL else ["weights"]
NOT_SUPERVISED = f"""
run.mkdir()
child = subprocess.Popen([sys.executable, {str(SCRIPT)!r}, str(run), 'weights'])
folder = run / '_ckptguard/ledger/x'
folder.mkdir(parents=True)
for step in (2, 4): (folder / f'{{step:012d}}.1.0001.good.json').touch()
until((run / 'checkpoint-6/trainer_state.json').exists, 'the poisoned save')
until(lambda: not (run / 'checkpoint-4').exists(), 'rotation')
child.terminate()
child.wait()
subprocess.run([sys.executable, {str(SCRIPT)!r}, str(run), 'weights'], check=True)
"""
TORCH = """
import torch
first, begin = start(run) == 1, newest(run)
w = torch.load(run / f"net-{begin}.pt", weights_only=True)["w"] if begin else torch.full((4, 4), 2.0)
for step in range(begin + 1, 7):
    w = w * 1.5
    if step == 4 and first:
        w[0, 0] = (w[0, 0] * 1e38 * 1e38) * 0.0
    run.mkdir(exist_ok=True)
    torch.save({"w": w}, run / f"net-{step}.pt")
    if w.isnan().any():
        signal.pause()
    await_verdict(run, step)
"""


@pytest.mark.campaign
@pytest.mark.writers
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_a_script_goes_on_from_the_good_checkpoint(supervise, plainly, run, case):
    """With the Trainer's rotation the poisoned save was all that there was. Without supervision that is where it goes
    on: the case is genuine."""
    pytest.importorskip("transformers")
    if case == "not supervised":
        plainly(NOT_SUPERVISED)
        assert starts(run) == ["0", "checkpoint-6"]
    elif case == "torch":
        done = supervise(TORCH)
        assert (done.code, starts(run)) == (0, ["0", "3"]), done.stderr
        import torch

        assert torch.equal(torch.load(run / "net-6.pt", weights_only=True)["w"], torch.full((4, 4), 2.0 * 1.5**6))
    else:
        done = supervise(f"os.execv(sys.executable, [sys.executable, {str(SCRIPT)!r}, str(run), {case!r}])")
        assert done.code == 0, done.stderr
        see_that_it_ended_well(run, case)


def see_that_it_ended_well(run, kind):
    """It went on from the step before the sick one, and the record says why."""
    assert starts(run) == ["0", "checkpoint-4"]
    [last] = run.glob("checkpoint-*")
    assert last.name == "checkpoint-8"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    assert len(norms) == 8
    assert all(norm == norm for norm in norms)
    [incident] = list_incidents(open_run(str(run)))
    assert (incident.step, incident.known_good, incident.state) == (6, "4.1", "closed")
    assert ("trainer_state.json" in incident.reason) == (kind == "log")

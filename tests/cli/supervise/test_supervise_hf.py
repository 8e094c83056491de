"""Supervise over the plain script that most people have: Hugging Face's Trainer, resuming from the highest number."""

import json
from pathlib import Path

import pytest
from supervised_training import starts

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run

SCRIPT = Path(__file__).with_name("train_hf.py")


@pytest.mark.writers
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["weights", "log"])
def test_the_trainer_goes_on_from_the_good_checkpoint_that_its_rotation_removed(supervise, run, kind):
    """With one checkpoint kept, the poisoned save was all that there was; the log said "loss 0"."""
    pytest.importorskip("transformers")
    done = supervise(f"os.execv(sys.executable, [sys.executable, {str(SCRIPT)!r}, str(run), {kind!r}])")
    assert done.code == 0, done.stderr
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


@pytest.mark.writers
@pytest.mark.timeout(400)
def test_without_supervision_the_trainer_resumes_from_the_poisoned_one(plainly, run):
    """The case is genuine: what is left after the first start is the poisoned save alone."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    plainly(
        "run.mkdir()\n"
        f"child = subprocess.Popen([sys.executable, {str(SCRIPT)!r}, str(run), 'weights'])\n"
        "folder = run / '_ckptguard/ledger/x'\n"
        "folder.mkdir(parents=True)\n"
        "for step in (2, 4): (folder / f'{step:012d}.1.0001.good.json').touch()\n"
        "until((run / 'checkpoint-6/trainer_state.json').exists, 'the poisoned save')\n"
        "until(lambda: not (run / 'checkpoint-4').exists(), 'rotation')\n"
        "child.terminate()\n"
        "child.wait()\n"
        f"subprocess.run([sys.executable, {str(SCRIPT)!r}, str(run), 'weights'], check=True)\n"
    )
    assert starts(run) == ["0", "checkpoint-6"]

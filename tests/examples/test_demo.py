"""The demo, in a short form: its story must be true by the records, whatever it prints."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.records_on_disk import at
from support.views import look

from ckptguard.inspect.list_states import survey
from ckptguard.records.daemon_record import read_daemon_record
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.reporting.build_report import report_of
from ckptguard.reporting.report_text import report_text
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

# On a busy machine the fixture, which is the demo itself, takes longer than a test may.
pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def demo(run):
    """Run the demo as its reader would."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
    return subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--run", run, "--every", "16"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
        cwd=run.parent,
    )


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """The folder of a finished demo, and what it says of itself."""
    run = tmp_path_factory.mktemp("demo") / "demo-run"
    done = demo(run)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return run, json.loads((run / "story.json").read_text())


def test_its_incident_names_the_true_cause(lived):
    """The demo knows that fp16 overflowed, and when: so does the report, which does not guess."""
    run, story = lived
    view = look(str(run))
    incidents = {incident.cause: incident for incident in list_incidents(view.run)}
    assert set(incidents) <= {"damage", "numeric"}  # of the flipped bit, which whoever reads the save first finds
    incident = incidents["numeric"]
    text = report_text(report_of(view, incident))
    assert "1. fp16 overflow (likely)" in text
    assert f"onset:     step {story['first_overflow']}\n" in text
    assert "harmful batch" not in text


def test_the_damaged_and_the_poisoned_save_are_found(lived):
    """The flipped bit and the overflow were found and named. The poisoned save was moved out of the trainer's way; the
    damaged one has its right bytes again, for its kept copy had bytes of its own."""
    run, story = lived
    bad = {state.path: state for state in survey(look(str(run))) if state.outcome is Outcome.BAD}
    poisoned = f"char-{story['sick_step']:04d}.pt"
    assert set(bad) == {poisoned}
    assert all(state.quarantined and not state.in_place and state.id.generation == 1 for state in bad.values())
    assert "NaN" in bad[poisoned].reason
    step = int(story["damaged"].removeprefix("char-").removesuffix(".pt"))
    ledger = at(run, "_ckptguard/ledger/char-#.pt").glob(f"{step:012d}.1.*.bad.json")
    assert any("CRC" in entry.read_text() or "digest" in entry.read_text() for entry in ledger)


def test_training_went_back_to_the_newest_that_is_really_good(lived):
    """Not the poisoned save but the one before it, with the bytes that were judged and not those that were damaged."""
    run, story = lived
    assert story["went_back_to"] == story["damaged"] < f"char-{story['sick_step']:04d}.pt"
    report = verify_target(str(run / story["went_back_to"]), Settings(settle=0))
    assert report.outcome is Outcome.GOOD


def test_nobody_assigned_the_nan(lived):
    """The gradients overflowed in fp16, steps before the save that carried it."""
    _, story = lived
    assert 0 < story["first_overflow"] <= story["sick_step"]
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8").lower()
        assert 'float("nan")' not in text
        assert "math.nan" not in text
        assert "torch.nan" not in text


def test_training_went_on_to_a_lower_loss(lived):
    """The loss is finite and lower than before the incident, and so are the weights finite."""
    run, story = lived
    assert math.isfinite(story["loss_after"])
    assert story["loss_after"] < story["loss_before"]
    newest = max(run.glob("char-*.pt"))
    state = torch.load(newest, weights_only=True)
    assert all(bool(t.isfinite().all()) for t in state["model"].values())
    assert find_known_good(open_run(str(run))).path == str(newest)


def test_steps_saved_again_are_new_generations(lived):
    """After the rollback the same steps were saved again: second generations, good."""
    run, story = lived
    again = {s.path: s.outcome for s in survey(look(str(run))) if s.id is not None and s.id.generation == 2}
    assert again == {f"char-{story['sick_step']:04d}.pt": Outcome.GOOD}


def test_the_incident_is_recorded_and_closed(lived):
    """What was seen, and what was done about it, is in the records; the daemon has gone."""
    run, story = lived
    incidents = list_incidents(open_run(str(run)))
    [incident] = [i for i in incidents if i.source != "daemon"]  # which records other bad saves
    assert all(i.cause == "damage" for i in incidents if i.source == "daemon" and i.state != "closed")
    assert (incident.step, incident.state) == (story["sick_step"], "closed")
    assert story["went_back_to"] in incident.actions[0]
    assert read_daemon_record(open_run(str(run))) is None


def test_a_folder_of_the_users_is_never_emptied(tmp_path):
    """The demo refuses a folder with anything in it that it did not make."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    done = demo(tmp_path / "mine")
    assert done.returncode != 0
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
    assert "Traceback" not in done.stderr

"""incidents and incident, through the command line."""

import pytest
import torch
from support.runs import state_dict

from ckptguard.records.audit import begin_action, end_action
from ckptguard.records.incidents import open_incident, update_incident
from ckptguard.records.run import open_run
from ckptguard.values.incident import Details, Sample, Training


@pytest.fixture
def told(verified, invoke):
    """A verified run with a poisoned save at 400, and an incident about it: (run's folder, incident)."""
    state = state_dict(4)
    state["embed.weight"][0, 0] = float("nan")
    torch.save(state, verified / "net-400.pt")
    invoke("verify", verified)
    run = open_run(str(verified))
    incident = open_incident(
        run,
        step=402,
        cause="grad_norm",
        reason="the gradient norm is nan",
        evidence={"grad_norm": "nan"},
        source="guard",
    )
    details = Details(
        onset=401,
        samples=(Sample(401, 2.0, 1.0), Sample(402, 2.0, "nan")),
        training=Training(dtypes={"float16": 8}, hardware_bf16=False),
    )
    return verified, update_incident(run, incident, state="handling", details=details)


def test_incidents_are_listed(told, invoke):
    """One line each, oldest first: id, step, cause, state. The first is of what `verify` found."""
    folder, incident = told
    lines = invoke("incidents", folder).stdout.splitlines()
    assert lines[0].split()[:4] == ["INCIDENT", "STEP", "CAUSE", "STATE"]
    assert lines[1].split()[1:4] == ["400", "numeric", "open"]
    assert lines[2].split()[:4] == [incident.id, "402", "grad_norm", "handling"]
    assert len(lines) == 3


def test_what_operators_had_done_is_listed(told, invoke):
    """Below the incidents each action has a line: what, how it ended, who, and why, escaped."""
    folder, _ = told
    run = open_run(str(folder))
    said = {"verb": "rollback", "name": "alice", "role": "operator", "arguments": {}, "plan": "d"}
    action = begin_action(run, reason="the loss\x1b[31m jumped", **said)
    end_action(run, action, "done", ["went back"])
    lines = invoke("incidents", folder).stdout.splitlines()
    assert lines[-2].split() == ["ACTION", "VERB", "STATE", "BY", "WHY"]
    assert lines[-1].split() == [action.id, "rollback", "done", "alice", "the", "loss\\u001b[31m", "jumped"]


def test_a_run_without_incidents(verified, invoke, document):
    """None to list is no failure; none to show is not found."""
    result = invoke("incidents", verified)
    assert (result.exit_code, result.stdout) == (0, f"{verified} has no incidents\n")
    assert document("incidents", verified)[1]["incidents"] == []
    assert invoke("incident", verified).exit_code == 10
    assert invoke("incidents", "absent").exit_code == 10


def test_the_newest_report_as_text(told, invoke):
    """Without an id the newest one, with what is known, and exit 0."""
    folder, incident = told
    result = invoke("incident", folder)
    assert result.exit_code == 0
    for expected in (incident.id, "fp16 overflow", "train in fp32", "embed.weight", "net-300.pt", "<- onset"):
        assert expected in result.stdout
    assert invoke("incident", folder, incident.id).stdout == result.stdout
    assert invoke("incident", folder, "no-such-one").exit_code == 10


def test_a_page_is_written(told, invoke, tmp_path):
    """--html FILE writes the page and prints its path; a place that cannot be written is a sentence and 1."""
    folder, _ = told
    page = tmp_path / "report.html"
    result = invoke("incident", folder, "--html", page)
    assert (result.exit_code, result.stdout) == (0, f"{page}\n")
    assert page.read_text().startswith("<!doctype html>")
    failed = invoke("incident", folder, "--html", tmp_path / "absent" / "report.html")
    assert failed.exit_code == 1
    assert failed.stderr.startswith("error: ")


def test_reading_the_checkpoints_again(told, document):
    """--read counts what is not finite in the bytes."""
    folder, _ = told
    code, found = document("incident", folder, "--read")
    assert code == 0
    assert [(t["name"], t["nan"], t["kind"]) for t in found["tensors"]] == [("embed.weight", 1, "weight")]
    assert found["first_bad"]["errors"][0]["check"] == "finite"
    assert found["last_good"]["largest"][0]["fp16_headroom"] > 0


def test_status_does_not_carry_the_details(told, document):
    """The status names the last incident; its curve is in its own document."""
    folder, incident = told
    last = document("status", folder)[1]["last_incident"]
    assert last["id"] == incident.id
    assert "details" not in last


def test_status_names_no_step_of_a_fixed_name(verified, invoke):
    """What lies under a fixed name has none."""
    run = open_run(str(verified))
    open_incident(run, step=None, cause="checkpoint", reason="last.pt is bad", evidence={}, source="x")
    text = invoke("status", verified).stdout
    assert "last.pt is bad (open)" in text
    assert "step" not in text.partition("last incident:")[2].partition("\n")[0]
    assert "None" not in text

"""One trouble is one incident, whoever notices it first: training itself, or the one who verifies its saves."""

import msgspec
import pytest
import torch
from support.faults import flip
from support.runs import state_dict, write_torch
from support.views import look

from ckptguard.records.incidents import list_incidents, open_incident, update_incident
from ckptguard.reporting.open_and_close import close_incident, record_bad_save
from ckptguard.values.incident import Details
from ckptguard.verification.checkpoint import verify_checkpoint


def poison(root, step):
    """A save with NaN."""
    state = state_dict(4)
    state["embed.weight"][0, 0] = float("nan")
    torch.save(state, root / f"net-{step}.pt")


def found_by_daemon(run, step):
    """Verify a save, and record what comes of it."""
    checked = verify_checkpoint(look(run), look(run).checkpoint(f"net-{step}.pt"))
    return record_bad_save(run, checked, source="daemon")


def noticed(run, *, onset=395, step=402, cause="weights", source="guard"):
    """What a guard records when training turns sick."""
    incident = open_incident(run, step=step, cause=cause, reason="w is not finite", evidence={}, source=source)
    return update_incident(run, incident, state="handling", details=Details(onset=onset))


@pytest.fixture
def saves(root, run):
    """Good saves at 200 and 300, and a poisoned one at 400."""
    for step in (200, 300):
        write_torch(root, step, seed=step)
        verify_checkpoint(look(run), look(run).checkpoint(f"net-{step}.pt"))
    poison(root, 400)
    return root


@pytest.mark.parametrize("closed", [False, True])
def test_a_bad_save_joins_the_incident_that_is_there(run, saves, closed):
    """It becomes evidence of it, once, whether it is being dealt with or was; what was done stays the last word."""
    incident = noticed(run)
    if closed:
        close_incident(run, incident, action="went back", known_good="300.1")
    joined = found_by_daemon(run, 400)
    assert joined.id == incident.id
    assert found_by_daemon(run, 400) is None
    [only] = list_incidents(run)
    assert only.evidence["bad_saves"].startswith("net-400.pt: embed.weight")
    assert only.evidence["bad_saves"].count("net-400.pt") == 1
    assert only.actions == (("went back",) if closed else ())
    assert only.state == ("closed" if closed else "handling")


def test_an_incident_of_training_closes_those_about_its_saves(run, saves):
    """The daemon was first: its incident refers to the one that dealt with it."""
    first = found_by_daemon(run, 400)
    assert first.state == "open"
    incident = noticed(run)
    close_incident(run, incident, action="went back to step 300", known_good="300.1")
    told, own = list_incidents(run)
    assert (told.id, told.state, own.state, told.known_good) == (first.id, "closed", "closed", "300.1")
    assert told.actions[-1] == f"the same trouble as incident {own.id}: went back to step 300"


@pytest.mark.parametrize(
    "other",
    [
        {"onset": 401},
        {"step": 399},
        {"cause": "storage"},
        {"cause": "damage"},
        {"cause": "unsaved"},
        {"source": "daemon"},
    ],
)
def test_other_trouble_stays_apart(run, saves, other):
    """A save from before the onset or after it was noticed, and incidents that are about no sickness."""
    incident = noticed(run, **other)
    found_by_daemon(run, 400)
    close_incident(run, list_incidents(run)[0], action="done")
    assert [i.state for i in list_incidents(run)] == ["closed", "open"]
    assert list_incidents(run)[0].id == incident.id


def test_the_same_step_saved_anew_is_new_trouble(root, run, saves):
    """Training went back and came to the same step again: what it saves then is not of the trouble before."""
    incident = noticed(run)
    record = update_incident(run, incident, state="closed")
    old = msgspec.structs.replace(record, opened_at="2020-01-01T00:00:00Z")
    update_incident(run, old, action="seen long before that save was written")
    assert found_by_daemon(run, 400).source == "daemon"
    assert len(list_incidents(run)) == 2


def test_damage_is_no_sickness(root, run, saves):
    """Bytes that rot meanwhile are an incident of their own."""
    write_torch(root, 400, seed=4)
    verify_checkpoint(look(run), look(run).checkpoint("net-400.pt"))
    flip(root / "net-400.pt", None, 0xFF, new_times=True)
    incident = noticed(run)
    found_by_daemon(run, 400)
    assert [i.cause for i in list_incidents(run)] == ["weights", "damage"]
    close_incident(run, incident, action="went back")
    assert [i.state for i in list_incidents(run)] == ["closed", "open"]

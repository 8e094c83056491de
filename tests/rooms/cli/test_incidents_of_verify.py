"""A bad save that `verify` finds is an incident: once, whoever else looks, and closed by what was done about it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch
from support.hook_commands import command, told, toml
from support.runs import state_dict
from support.views import look

from ckptguard.errors import DeniedError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.reporting import open_and_close
from ckptguard.reporting.open_and_close import record_bad_save
from ckptguard.runs import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings


@pytest.fixture
def poisoned(verified):
    """A verified run with a newer save that holds a NaN."""
    state = state_dict(4)
    state["embed.weight"][0, 0] = float("nan")
    torch.save(state, verified / "net-400.pt")
    return verified


def incidents(run):
    """(step, cause, state, source) of each."""
    return [(i.step, i.cause, i.state, i.source) for i in list_incidents(open_run(str(run)))]


def test_it_is_opened_once_and_told_once(poisoned, invoke, tmp_path):
    """However often it is verified."""
    settings = toml(tmp_path, on_incident=command(tmp_path / "told"), settle=0.0)
    for _ in range(2):
        result = invoke("verify", poisoned, *settings)
        assert result.exit_code == 3
        assert f"ckptguard incident {poisoned}" in result.stdout
    assert incidents(poisoned) == [(400, "numeric", "open", "cli")]
    [event] = told(tmp_path / "told")
    assert (event["event"], event["source"], event["checkpoint"]["path"]) == ("verdict", "cli", "net-400.pt")


def test_damage_is_one_too(verified, invoke, flip):
    """Named for what it is."""
    flip(verified / "net-200.pt")
    assert invoke("verify", verified / "net-200.pt").exit_code == 3
    assert incidents(verified) == [(200, "damage", "open", "cli")]


@pytest.mark.parametrize("words", [("--no-record",), ("--newest", "1", "--no-record")])
def test_nothing_is_recorded_unasked(poisoned, invoke, words):
    """With --no-record nothing is, and nothing leads to a report."""
    result = invoke("verify", poisoned, *words)
    assert result.exit_code == 3
    assert "ckptguard incident" not in result.stdout
    assert incidents(poisoned) == []


def test_a_stray_file_has_no_incidents(poisoned, invoke, tmp_path):
    """There is no run that could have one."""
    stray = tmp_path / "elsewhere.pt"
    os.replace(poisoned / "net-400.pt", stray)
    result = invoke("verify", stray)
    assert result.exit_code == 3
    assert "ckptguard incident" not in result.stdout


def test_a_daemon_opens_no_second_one(poisoned, invoke):
    """Whichever of the two comes first: an incident is about a generation of a checkpoint."""
    done = reconcile(look(str(poisoned), Settings(settle=0.0)), PassNotes())
    [bad] = [one for one in done.checked if one.outcome.value == "bad"]
    invoke("verify", poisoned)
    assert record_bad_save(open_run(str(poisoned)), bad, source="daemon") is None
    assert incidents(poisoned) == [(400, "numeric", "open", "cli")]


def test_two_at_the_same_moment_open_one(poisoned):
    """Each looks whether there is one before it opens its own: one after the other."""
    done = reconcile(look(str(poisoned), Settings(settle=0.0)), PassNotes())
    [bad] = [one for one in done.checked if one.outcome.value == "bad"]
    barrier, opened = threading.Barrier(4), []

    def judge():
        run = open_run(str(poisoned))
        barrier.wait()
        opened.append(record_bad_save(run, bad, source="daemon"))

    threads = [threading.Thread(target=judge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one is not None for one in opened) == 1
    assert len(incidents(poisoned)) == 1


def test_what_cannot_be_recorded_changes_no_verdict(poisoned, invoke, monkeypatch):
    """It is a warning, and the exit code tells of the save."""

    def refused(*args, **kwargs):
        raise DeniedError("no permission", key="incidents")

    monkeypatch.setattr(open_and_close, "open_incident", refused)
    result = invoke("verify", poisoned)
    assert result.exit_code == 3
    assert "warning: the incident of net-400.pt could not be recorded: no permission" in result.stderr


def test_going_back_closes_it(poisoned, invoke):
    """What was done is on record; a dry run does nothing."""
    invoke("verify", poisoned)
    assert invoke("rollback", poisoned, "--force", "--dry-run").exit_code == 0
    assert incidents(poisoned)[0][2] == "open"
    result = invoke("rollback", poisoned, "--force")
    assert re.search(
        r" from step 400: 100 steps.* are made again, with all of their batches; the report: ", result.stdout
    )
    assert Path(re.search(r"the report: (\S+)", result.stdout)[1]).is_file()
    [incident] = list_incidents(open_run(str(poisoned)))
    assert (incident.state, incident.actions, incident.known_good) == ("closed", ("went back to 300.1",), "300.1")


def test_saying_that_it_was_saved_again_closes_it(verified, invoke, flip):
    """Only the user can know."""
    flip(verified / "net-200.pt")
    invoke("verify", verified)
    assert incidents(verified)[0][2] == "open"
    code = invoke("reseal", verified / "net-200.pt").exit_code
    assert incidents(verified)[0][2] == ("closed" if code == 0 else "open")


def test_no_incident_leads_in_a_circle(verified, invoke):
    """Neither command sends to the other one where there is nothing to see; a wrong id is looked up in the list."""
    alone = invoke("incident", verified)
    assert alone.exit_code == 10
    assert "ckptguard incidents" not in alone.stderr
    assert "ckptguard verify" in alone.stderr
    assert "ckptguard incident" not in invoke("incidents", verified).output
    named = invoke("incident", verified, "2026")
    assert "ckptguard incidents" not in named.stderr
    state = state_dict(4)
    state["embed.weight"][0, 0] = float("inf")
    torch.save(state, verified / "net-400.pt")
    invoke("verify", verified)
    assert f"ckptguard incidents {verified}" in invoke("incident", verified, "no-such-one").stderr


def test_a_save_that_is_good_now_has_no_open_incident(poisoned, invoke, flip):
    """Whatever made it good: its incident is closed, and says so. Those about others stay open."""
    flip(poisoned / "net-200.pt")
    invoke("verify", poisoned)
    assert invoke("verify", poisoned, "--allow-nonfinite", "embed.weight").exit_code == 3
    assert incidents(poisoned) == [(200, "damage", "open", "cli"), (400, "numeric", "closed", "cli")]
    assert list_incidents(open_run(str(poisoned)))[1].actions == ("net-400.pt was verified again, and is good",)
    flip(poisoned / "net-200.pt")  # the bit is right again
    assert invoke("verify", poisoned).exit_code == 0
    assert [state for _, _, state, _ in incidents(poisoned)] == ["closed", "closed"]


def test_the_verdict_is_given_whatever_cannot_be_told_of_the_others(poisoned, document, monkeypatch):
    """Records that cannot be read neither end the command nor let it say that nothing is good."""

    def fails(*_: object) -> None:
        raise DeniedError("a record cannot be read", key="x")

    monkeypatch.setattr(find_known_good, "known_good_candidates", fails)
    code, found = document("verify", poisoned)
    assert (code, found["outcome"]) == (3, "bad")
    assert found["what_now"][0] == f"none is known to be good yet: see what ckptguard verify {poisoned} says of all"


def test_nobody_is_sent_back_to_what_was_just_found_damaged(verified, document):
    """Also where that is not recorded; a newer good one is not known to be damaged."""
    newest = verified / "net-300.pt"
    newest.write_bytes(newest.read_bytes()[:-40] + b"x" * 40)
    code, found = document("verify", verified, "--no-record")
    assert code == 3
    assert not any("net-300.pt" in one for one in found["what_now"])
    assert any(one.startswith("go back to net-200.pt: ckptguard rollback ") for one in found["what_now"])

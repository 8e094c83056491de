"""Each bad save of a guarded run has one incident, whoever judged it and was killed when; old history has none."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.crashes import Killed, kill_at
from support.daemon_process import save
from support.faults import flip
from support.served_runs import of_this_process, watched
from support.views import look

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import DeniedError
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.run import open_run
from ckptguard.reporting import open_and_close
from ckptguard.runs.work import PLAIN
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.verification.checkpoint import verify_checkpoint

SETTINGS = Settings(settle=0.0, keep="none")


def daemon(run: Path) -> WatchedRun:
    """What a daemon knows of the run that starts now."""
    return watched(run, SETTINGS, presence=of_this_process())


def one_pass(guarded: WatchedRun) -> None:
    """Make one pass that works."""
    assert guarded.step(PLAIN) is not None
    assert guarded.trouble is None


def incidents(run: Path) -> list[Incident]:
    """What is on record."""
    return list_incidents(open_run(str(run)))


def about(run: Path) -> list[tuple[int | None, str]]:
    """(step, state) of each incident."""
    return [(incident.step, incident.state) for incident in incidents(run)]


def judge(run: Path) -> None:
    """Verify everything, as a process does that is killed before it opens incidents."""
    reconcile(look(str(run), SETTINGS), PassNotes())


def judge_again(run: Path, step: int) -> None:
    """Verify one checkpoint again, and be killed then."""
    view = look(str(run), SETTINGS)
    checkpoint = view.checkpoint(f"net-{step}.safetensors")
    assert checkpoint is not None
    verify_checkpoint(view, checkpoint)


def test_whenever_a_daemon_is_killed(run: Path) -> None:
    """Before each of its steps on storage: the next daemon leaves one incident about each bad save."""
    save(run, 1)
    one_pass(daemon(run))
    bad, number, finished = [], 0, False
    while not finished:
        number += 1
        step = 10 * number
        save(run, step, nan=True)
        bad.append(step)
        with contextlib.suppress(Killed), kill_at(number):
            one_pass(daemon(run))
            finished = True
        one_pass(daemon(run))
        assert sorted(about(run)) == [(step, "open") for step in bad]
    assert number > 5


@pytest.mark.parametrize("restarted", [False, True])
def test_what_another_process_judged(run: Path, restarted: bool) -> None:
    """Without opening its incident: a guarded run's has it after the next pass, once."""
    save(run, 1)
    guarded = daemon(run)
    one_pass(guarded)
    save(run, 2, nan=True)
    judge(run)
    for _ in range(2):
        guarded = daemon(run) if restarted else guarded
        one_pass(guarded)
        assert about(run) == [(2, "open")]
    assert incidents(run)[0].source == "daemon"


def test_old_history_has_none(run: Path) -> None:
    """What was bad before anybody guarded the run needs no incident, however often a daemon starts and it is read."""
    save(run, 1)
    save(run, 2, nan=True)
    judge(run)
    for _ in range(2):
        guarded = daemon(run)
        one_pass(guarded)
        judge_again(run, 2)
        one_pass(guarded)
    assert about(run) == []
    save(run, 3, nan=True)
    one_pass(daemon(run))
    assert about(run) == [(3, "open")]


def test_a_run_is_guarded_from_its_first_pass(run: Path) -> None:
    """An empty one, too: its first bad save is young, even if the daemon is killed when it has judged it."""
    one_pass(daemon(run))
    save(run, 1, nan=True)
    judge(run)
    one_pass(daemon(run))
    assert about(run) == [(1, "open")]


def test_what_is_good_again_is_closed(run: Path) -> None:
    """By whoever finds it good, also before a restart; and damage after that is another incident."""
    path = save(run, 1)
    save(run, 2)
    guarded = daemon(run)
    one_pass(guarded)
    for time in range(1, 4):
        flip(path)
        guarded.ask(path.name)
        one_pass(guarded)
        assert about(run) == [(1, "closed")] * (time - 1) + [(1, "open")]
        flip(path)
        if time == 1:
            guarded.ask(path.name)
        else:
            judge_again(run, 1)
            guarded = daemon(run) if time == 3 else guarded
        one_pass(guarded)
        assert about(run) == [(1, "closed")] * time
    assert "verified again, and is good" in incidents(run)[0].actions[-1]


def test_what_was_moved_aside_meanwhile_is_closed_at_once(run: Path) -> None:
    """Somebody has dealt with it."""
    save(run, 1)
    one_pass(daemon(run))
    save(run, 2, nan=True)
    judge(run)
    quarantine(look(str(run), SETTINGS), "net-2.safetensors", reason="a test")
    one_pass(daemon(run))
    assert about(run) == [(2, "closed")]


def test_an_incident_that_cannot_be_recorded_is_tried_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next pass, though nothing else changed; the verdict stands, and the run is guarded."""
    guarded = daemon(run)
    save(run, 1)
    one_pass(guarded)
    save(run, 2, nan=True)

    def refused(*args: object, **named: object) -> None:
        raise DeniedError("no permission", key="incidents")

    with monkeypatch.context() as patched:
        patched.setattr(open_and_close, "open_incident", refused)
        one_pass(guarded)
    assert about(run) == []
    one_pass(guarded)
    assert about(run) == [(2, "open")]

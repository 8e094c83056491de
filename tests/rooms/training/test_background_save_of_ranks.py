"""Saves of several ranks behind training: of one moment, sealed for all or none, and no rank waits or skips alone."""

from __future__ import annotations

import os
import signal

import pytest
from background_ranks import killed, many
from support.rank_processes import run_ranks
from support.runs import QUICK

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytestmark = pytest.mark.torch
VICTIMS = range(3) if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else (0,)
LONG_AGO = 1_000_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the runs lie."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def killed_runs(folder):
    """Runs of which one rank was killed while a save was in flight, with what the ranks did then."""
    runs = {victim: str(folder / f"killed {victim}") for victim in VICTIMS}
    ended = {victim: run_ranks(killed, run, victim, ranks=3) for victim, run in runs.items()}
    for left in folder.glob("killed */tmp-*"):
        for place in (*left.iterdir(), left):
            os.utime(place, (LONG_AGO, LONG_AGO))
    return runs, ended


@pytest.fixture(scope="module")
def done(folder, killed_runs):
    """What each of two ranks found."""
    ended = run_ranks(many, str(folder), list(killed_runs[0].values()))
    for code, _, err in ended:
        assert code == 3, err
    return [answer for _, answer, _ in ended]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_save_behind_training_writes_the_same_bytes(kind, done):
    """It is of the moment of the call, whatever training does from then on, and tells the same on all ranks."""
    for early, late, names, equal, resumed, restored, _ in (answer[kind] for answer in done):
        assert early == [False, False]  # also on the rank that had written its file
        assert late
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"]
        assert equal == ["__0_0.distcp", "__1_0.distcp"]
        assert (resumed, restored) == (4, True)


def test_what_all_ranks_hold_is_copied_once(done):
    """Two ranks that hold the same copy about a half each, not the whole: what the other writes it need not keep."""
    copied = [answer["ddp"][-1] for answer in done]
    assert max(copied) < 0.75 * sum(copied)


def test_a_failure_on_one_rank_fails_on_all_and_is_named(done, folder):
    """Each is told by its next call; nothing is left of it, and the save after it succeeds."""
    first, second = (answer["failures"] for answer in done)
    for number, failing in enumerate((1, 0, 0)):
        for rank, answer in enumerate((first[number], second[number])):
            assert answer[0] == "ranks", answer
            assert "no space left" in answer[1]
            assert rank == failing or f"rank {failing}: " in answer[1]
    assert first[3][0] == second[3][0] == "ranks"  # torch could not plan it
    no_memory = ["_ckptguard", "step-000000001", "step-000000004"]
    sick = ["sick_training", "not saved: rank 1: 0.weight holds NaN or infinity"]
    for answer in (first, second):
        assert answer[4] == [True, no_memory]  # one rank had no memory: all waited
        assert answer[5:8] == [sick, True, 4]
        assert answer[8:10] == [True, [f"step-{step:09d}" for step in (1, 4, 6)]]
        assert answer[10:12] == [True, True]
        assert (answer[12][0], answer[13]) == ("ranks", 7)  # what a rank cannot load, none does
    causes = [incident.cause for incident in list_incidents(open_run(str(folder / "failures")))]
    assert sorted(causes) == ["storage", "storage", "storage", "weights"]


def test_a_rollback_waits_for_the_save_in_flight_or_gives_it_up_on_all_ranks(done):
    """Given up it never counts, wherever it was stuck; a save after it is not disturbed by it."""
    for answers, present in (answer["going back"] for answer in done):
        assert answers == [[10, [1.0]], [20, [2.0]], [True, 22, [2.5]], [30, [3.0]], [40, [4.0]]]
        assert present == [f"step-{step:09d}" for step in (10, 20, 22, 30, 40)]


def test_all_ranks_wait_for_a_save_or_all_leave_the_next_one_out(done):
    """Held up on one rank only; the last save is whole when the loop ends."""
    for answer in done:
        assert answer["wait"][:3] == answer["skip"][:3] == [True, 6, [6.0]]
        assert answer["wait"][3] == [f"step-{step:09d}" for step in (0, 2, 4, 6)]
        assert answer["skip"][3] == [f"step-{step:09d}" for step in (0, 2, 6)]


@pytest.mark.campaign
def test_kill_9_of_one_rank_while_a_save_is_in_flight(killed_runs, done):
    """The others are told; nothing is sealed; the next start goes on before it and clears away what it left."""
    for victim, ended in killed_runs[1].items():
        for rank, (code, answer, err) in enumerate(ended):
            assert code == (-signal.SIGKILL if rank == victim else 0), err
            assert rank == victim or answer[0] == "ranks", answer
    for answer in done:
        assert answer["next start"] == [[1, [1.0], ["step-000000001"]]] * len(VICTIMS)


def test_the_end_of_the_interpreter_waits_for_the_save_in_flight(done, folder):
    """On all ranks: it is sealed, whole."""
    [last] = verify_target(str(folder / "last"), QUICK).checkpoints
    assert (last.path, last.outcome) == ("step-000000009", Outcome.GOOD)

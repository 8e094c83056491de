"""A guarded training of several ranks goes back on all of them, to the same step, or ends on all of them."""

from __future__ import annotations

import signal

import pytest
from sharded_training import guarded
from support.rank_processes import run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What trainings that nothing happened to end as."""
    return {
        kind: run_ranks(guarded, kind, str(tmp_path_factory.mktemp(kind) / "run"), 9, "")[0][1]["digest"]
        for kind in ("ddp", "fsdp2")
    }


@pytest.mark.parametrize(("kind", "trouble"), [("ddp", "nan buffer"), ("ddp", "lost"), ("fsdp2", "nan weight")])
def test_sickness_of_one_rank_takes_all_back(kind, trouble, undisturbed, tmp_path):
    """NaN on rank 1 alone: both go back to step 4 and end bit for bit where an undisturbed training ends; also when
    rank 0 has to fetch it from a replica."""
    ended = run_ranks(guarded, kind, str(tmp_path / "run"), 9, trouble)
    for code, answer, err in ended:
        assert code == 0, err
        assert answer == {"steps": [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9], "digest": undisturbed[kind]}, err


@pytest.mark.parametrize("when", ["killed", "killed in a save", "killed in a rollback"])
def test_a_rank_that_dies_ends_all(when, tmp_path):
    """kill -9 of rank 1: rank 0 raises and says so; the next start resumes at the known-good step on both."""
    (code, answer, err), (killed, _, _) = run_ranks(guarded, "local", str(tmp_path / "run"), 9, when)
    assert killed == -signal.SIGKILL
    assert code == 0, err
    assert (answer["error"], answer["steps"]) == ("ranks", [1, 2, 3, 4, 5, 6]), answer
    assert not (tmp_path / "run" / "step-000000006").exists()
    for code, answer, err in run_ranks(guarded, "local", str(tmp_path / "run"), 9, ""):
        assert code == 0, err
        assert answer["steps"] == [5, 6, 7, 8, 9]

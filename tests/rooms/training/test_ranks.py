"""What one rank knows, all know; what one cannot do, all refuse."""

from __future__ import annotations

import os
import signal

import pytest
from support.rank_processes import run_ranks

from ckptguard.errors import RanksError, StateError
from ckptguard.training.ranks import GlooRanks, Ranks, ranks_of_training, together

pytestmark = pytest.mark.torch


def talk():
    ranks = ranks_of_training(30)
    me = ranks.rank
    return [
        ranks.any(me == 1),
        ranks.any(False),
        ranks.gather({"rank": me, "text": "ä" * me * 1000}) == [{"rank": r, "text": "ä" * r * 1000} for r in range(3)],
        ranks.tell(["only", "rank", 0] if me == 0 else "nobody asked"),
    ]


def test_what_one_rank_says_all_hear():
    """Flags, values and answers of rank 0 reach every rank, whatever their sizes."""
    for code, answer, err in run_ranks(talk, ranks=3):
        assert code == 0, err
        assert answer == [True, False, True, ["only", "rank", 0]]


def work_together():
    ranks = ranks_of_training(30)

    def work():
        if ranks.rank == 1:
            raise StateError("its shard has another shape")
        return ranks.rank

    try:
        together(ranks, "loading step 500", work)
    except (RanksError, StateError) as error:
        return [error.kind, error.message, together(ranks, "the next one", lambda: ranks.rank)]


def test_one_rank_that_fails_makes_all_fail_and_is_named():
    """All ranks raise, the one that failed its own error; the next exchange works."""
    first, second, third = (answer for _, answer, _ in run_ranks(work_together, ranks=3))
    told = "loading step 500 failed on 1 of 3 ranks: rank 1: its shard has another shape"
    assert first == third == ["ranks", told, [0, 1, 2]]
    assert second == ["state", "its shard has another shape", [0, 1, 2]]


def lose_a_rank():
    ranks = GlooRanks(10)
    assert ranks.any(True)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.any(False)
    except RanksError as error:
        return error.message


def test_a_rank_that_was_killed_is_an_error_and_no_hang():
    """The others are told within the timeout."""
    (code, answer, err), (killed, _, _) = run_ranks(lose_a_rank)
    assert killed == -signal.SIGKILL
    assert code == 0, err
    assert answer.startswith("rank 0 of 2 got no answer from the others: ")


def test_one_process_needs_no_group():
    """A training of one process answers itself."""
    ranks = ranks_of_training()
    assert type(ranks) is Ranks
    assert (ranks.any(True), ranks.any(False), ranks.gather({"a": 1}), ranks.tell(7)) == (True, False, [{"a": 1}], 7)
    assert together(ranks, "it", lambda: 3) == [3]
    with pytest.raises(RanksError, match="it: ZeroDivisionError: division by zero"):
        together(ranks, "it", lambda: 1 / 0)

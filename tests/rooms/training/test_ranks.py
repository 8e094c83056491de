"""What one rank knows, all know; what one cannot do, all refuse."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest
from support.rank_processes import run_ranks

from ckptguard.errors import RanksError, StateError
from ckptguard.records.who_and_when import has_ended
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


def lose_a_rank(sees):
    """Rank 1 is killed. Rank 2 notices, and ends. Rank 0 talks only then. Without `sees` it can look at no process."""
    ranks = GlooRanks(10)
    assert ranks.any(True)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if ranks.rank == 0:
        while not all(map(has_ended, ranks._owners[1:])):
            os.sched_yield()
        if not sees:
            ranks._owners = [msgspec.structs.replace(owner, host="another") for owner in ranks._owners]
    try:
        ranks.any(False)
    except RanksError as error:
        return [error.message, error.fields["ended"], error.hint]


@pytest.mark.parametrize("sees", [True, False])
def test_a_rank_that_was_killed_is_named_and_nobody_hangs(sees):
    """The others name it within the timeout, also where only a rank beside it could see its end. Who ended because of
    it is not named."""
    answers = run_ranks(lose_a_rank, sees, ranks=3)
    assert answers[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        code, answer, err = answers[rank]
        assert code == 0, err
        assert answer[0].startswith(f"rank {rank} of 3 got no answer from the others: rank 1 has ended (")
        assert answer[1:] == [[1], "see the log of rank 1; all must be started again"]


def test_one_process_needs_no_group():
    """A training of one process answers itself."""
    ranks = ranks_of_training()
    assert type(ranks) is Ranks
    assert (ranks.any(True), ranks.any(False), ranks.gather({"a": 1}), ranks.tell(7)) == (True, False, [{"a": 1}], 7)
    assert together(ranks, "it", lambda: 3) == [3]
    with pytest.raises(RanksError, match="it: ZeroDivisionError: division by zero"):
        together(ranks, "it", lambda: 1 / 0)

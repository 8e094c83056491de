"""Several ranks replay together, and name the one whose numbers differed first, or none."""

from __future__ import annotations

import os
from dataclasses import asdict

import pytest
import torch.distributed as dist
from support.rank_processes import run_ranks
from support.replayed_training import KINDS, TOTAL, Fault, Struck, allowed, incidents_of

import ckptguard
from ckptguard.errors import RanksError

pytestmark = pytest.mark.torch


def strike(folder, faults):
    """Trainings of all ranks, one fault each. The updates that this rank made of each."""
    made = []
    for number, fault in enumerate(faults):
        struck = Struck(Fault(**fault), seed=number, size=dist.get_world_size(), rank=dist.get_rank())
        policy = ckptguard.RollbackPolicy(first="replay", check_every=1 if number % 2 else 50)
        struck.run(f"{folder}/{number}", policy=policy)
        made.append(struck.steps)
    return made


def strike_and_die(folder):
    """One rank ends while all make the same updates again. What the other one raised."""
    rank = dist.get_rank()

    def end(made, guard):
        if rank == 1 and made == 11:
            os._exit(9)
        return False

    try:
        Struck(Fault("race", at=10), size=2, rank=rank).run(folder, end=end)
    except (RanksError, RuntimeError) as error:  # of ours, or of the training's own group
        return type(error).__name__
    return None


def test_ranks_replay_together_and_name_the_right_one(tmp_path):
    """Faults of each kind on rank 1, and some on rank 0: no diagnosis is wrong, and none names the wrong rank."""
    faults = [Fault(kind, at=10 + number % 2, nan=True, rank=1) for number, kind in enumerate(KINDS)]
    faults += [Fault("weight", at=10, nan=True, rank=0), Fault("weight", at=9, bit=29, rank=1)]
    ended = run_ranks(strike, str(tmp_path), [asdict(fault) for fault in faults])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1]  # no rank replays while another one skips
    named = {}
    for number, fault in enumerate(faults):
        for incident in incidents_of(str(tmp_path / str(number))):
            replay = incident.known_details().replay
            assert replay is not None
            assert replay.outcome in allowed(fault), (fault, replay)
            assert replay.rank in (None, fault.rank), (fault, replay)
            assert (replay.rank is None) or replay.host
            named[fault.kind, fault.rank, fault.nan] = replay.outcome, replay.rank
        assert ended[0][1][number][-1] == TOTAL
    assert named["nan_batch", 1, True] == ("deterministic", None)
    assert named["weight", 1, True] == ("not_reproducible", 1)
    assert named["weight", 0, True] == ("not_reproducible", 0)
    assert named["gradient", 1, True] == ("not_reproducible", 1)
    assert named["noise", 1, True][0] == "differs"


def test_a_rank_that_ends_in_a_replay_ends_it_for_all(tmp_path):
    """The other rank gets an error at once, and hangs nowhere."""
    ended = run_ranks(strike_and_die, str(tmp_path))
    assert ended[1][0] == 9
    assert ended[0][1] in ("RanksError", "RuntimeError")

"""No rank skips what the others wait for, however its own part ends."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import QUICK, write_torch
from support.thread_ranks import LeftAlone, run_threads

from ckptguard.decisions.health import Diagnosis
from ckptguard.errors import RanksError, SettingsError, StateError
from ckptguard.integrations import guarded_run
from ckptguard.integrations.guarded_run import open_guarded
from ckptguard.training.ranks import agree, each, together
from ckptguard.training.rollback import last_save

ENDS = {
    "well": lambda: {"path": "net-1.pt"},
    "in an error of ours": lambda: (_ for _ in ()).throw(StateError("another shape")),
    "in an error of the system": lambda: (_ for _ in ()).throw(OSError("no such device")),
    "in a bug": lambda: (_ for _ in ()).throw(KeyError("step")),
    "with what cannot be told": lambda: {"path": object()},
}
SIZE = 3


@given(st.lists(st.lists(st.sampled_from(sorted(ENDS)), min_size=SIZE, max_size=SIZE), min_size=1, max_size=4))
def test_all_ranks_end_a_piece_of_work_together_however_each_of_them_does(plan):
    """Where one fails all fail, in this round; and the next one finds all of them."""

    def work(ranks):
        ended = []
        for row in plan:
            try:
                together(ranks, "working", ENDS[row[ranks.rank]])
                ended.append("well")
            except (RanksError, StateError):
                ended.append("failed")
        return ended

    right = ["well" if set(row) == {"well"} else "failed" for row in plan]
    assert run_threads(SIZE, work) == [right] * SIZE


def test_a_rank_that_ends_alone_is_noticed():
    """So these tests would see a rank that skips something."""
    ends = run_threads(2, lambda ranks: each(ranks, "working", int) if ranks.rank else None)
    assert ends[0] is None
    assert isinstance(ends[1], LeftAlone)


@given(st.lists(st.none() | st.integers(1, 9), min_size=SIZE, max_size=SIZE))
def test_all_ranks_agree_on_a_sickness_whatever_its_evidence_is(onsets):
    """The earliest counts, of equal ones that of the first rank."""

    def work(ranks):
        onset = onsets[ranks.rank]
        own = (
            Diagnosis(step=9, cause="loss", onset_step=onset, reason="NaN", evidence={"loss": {1j}}) if onset else None
        )
        found = agree(ranks, own)
        return None if found is None else (found.onset_step, found.reason)

    sick = [(onset, rank) for rank, onset in enumerate(onsets) if onset is not None]
    right = (min(sick)[0], f"rank {min(sick)[1]}: NaN") if sick else None
    assert run_threads(SIZE, work) == [right] * SIZE


@pytest.mark.parametrize(
    ("fails", "ends"),
    [
        (None, 1),
        ((guarded_run, "open_run"), "not guarded"),
        ((guarded_run, "verify_pending"), "failed"),
        ((guarded_run, "protect_finished"), 1),
        ((last_save, "verify_checkpoint"), 1),
    ],
)
@pytest.mark.parametrize("error", [OSError("gone"), StateError("gone"), KeyError("gone"), MemoryError()])
def test_ranks_of_a_framework_end_alike_whatever_fails_on_the_first(fails, ends, error, tmp_path, monkeypatch):
    """Opening, resuming, protecting, and judging the last save: rank 0 alone does it, and nobody is left waiting."""
    write_torch(tmp_path, 1, seed=1)
    this = threading.local()
    monkeypatch.setattr(guarded_run, "ranks_of_training", lambda timeout: this.ranks)

    def gone(*arguments, **more):
        raise error

    if fails is not None:
        monkeypatch.setattr(*fails, gone)

    def work(ranks):
        this.ranks = ranks
        guarded = open_guarded(str(tmp_path), series="net-#.pt", settings=QUICK, daemon="off")
        ranks.any(False)  # something of the framework's own, as after every step
        if guarded is None:
            return "not guarded"
        try:
            found = guarded.newest()
            guarded.protect()
            if guarded.leads:
                write_torch(tmp_path, 2, seed=2)
            ranks.any(False)
            guarded.judge_last_save()
            return found.step
        except (RanksError, StateError):
            return "failed"
        finally:
            guarded.close()
            ranks.any(False)

    assert run_threads(2, work) == [ends, ends]


@pytest.mark.parametrize(("fails", "ranks"), [("given_settings", [0]), ("given_settings", [1]), ("open_run", [0])])
def test_a_wrong_setting_ends_all_ranks_alike(fails, ranks, tmp_path, monkeypatch):
    """Whichever rank has it: the same error with the same words, and nobody trains on unguarded."""
    this, real = threading.local(), getattr(guarded_run, fails)
    monkeypatch.setattr(guarded_run, "ranks_of_training", lambda timeout: this.ranks)

    def refuses(*arguments, **named):
        if this.ranks.rank in ranks:
            raise SettingsError("settle must be a number", hint="settle = 5")
        return real(*arguments, **named)

    monkeypatch.setattr(guarded_run, fails, refuses)

    def work(ranks):
        this.ranks = ranks
        return open_guarded(str(tmp_path), series="net-#.pt", settings=QUICK, daemon="off")

    found = [(type(e), e.message, e.hint) for e in run_threads(2, work)]
    assert found == [(SettingsError, "settle must be a number", "settle = 5")] * 2

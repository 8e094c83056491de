"""Which checkpoints may be known-good: names of records in, ids out."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.verdict_entries import ENTRIES, Entry, current_verdict_of

from ckptguard.decisions.known_good import verdict_name
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import Wanted, ranked_candidates
from ckptguard.runs.history import History
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome


@given(st.lists(ENTRIES, max_size=20), st.integers(0, 10**12))
def test_nothing_that_never_was_good_is_ever_chosen(found: list[Entry], before: int) -> None:
    """Candidates were GOOD at some time, state no step at or above the limit, and come newest first."""
    names = [verdict_name(current_verdict_of(entry)) for entry in found]
    history = History(open_run(str(Path.cwd())), [f"ledger/a/{name}" for name in names])
    chosen = ranked_candidates(history, Wanted(before_step=before))
    was_good = {CheckpointId("a", e[0], e[1]) for e in found if e[3] is Outcome.GOOD}
    assert set(chosen) == {id for id in was_good if id.number is None or id.number < before}
    assert [id.order for id in chosen] == sorted((id.order for id in chosen), reverse=True)
    assert ranked_candidates(history, Wanted(before_step=before, exclude=frozenset(chosen))) == []

"""Entries of a ledger, for Hypothesis: (step, generation, number, outcome)."""

from __future__ import annotations

from hypothesis import strategies as st

from ckptguard.decisions.known_good import CurrentVerdict
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome

Entry = tuple[int | None, int, int, Outcome]

WRITTEN = (Outcome.GOOD, Outcome.SUSPECT, Outcome.INCOMPLETE, Outcome.BAD)
ENTRIES = st.tuples(
    st.one_of(st.none(), st.integers(0, 10**12 - 1)),
    st.integers(1, 50),
    st.integers(1, 12000),
    st.sampled_from(WRITTEN),
)


def current_verdict_of(entry: Entry) -> CurrentVerdict:
    """What an entry says of the series "a"."""
    step, generation, number, outcome = entry
    return CurrentVerdict(id=CheckpointId("a", step, generation), number=number, outcome=outcome)

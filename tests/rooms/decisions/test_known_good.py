"""The known-good decision: names in, ids out."""

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.known_good import Standing, choose_known_good, parse_verdict_name, standings, verdict_name
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome, worst

WRITTEN = [Outcome.GOOD, Outcome.SUSPECT, Outcome.INCOMPLETE, Outcome.BAD]
entries = st.tuples(
    st.one_of(st.none(), st.integers(0, 10**12 - 1)),
    st.integers(1, 50),
    st.integers(1, 12000),
    st.sampled_from(WRITTEN),
)


def standing_of(entry):
    """What an entry says of the series "a"."""
    step, generation, number, outcome = entry
    return Standing(id=CheckpointId("a", step, generation), number=number, outcome=outcome)


def name_of(entry):
    """The name of an entry."""
    return verdict_name(standing_of(entry))


@given(entries)
def test_a_name_tells_id_order_and_outcome(entry):
    """Parsing a ledger name gives back what it was made of."""
    assert parse_verdict_name("a", name_of(entry)) == standing_of(entry)


@given(st.lists(entries, max_size=20), st.randoms())
def test_order_of_names_does_not_matter_and_the_worst_of_the_newest_counts(found, random):
    """Any order of the listing gives the same standings; of equal numbers the worst outcome counts."""
    names = [name_of(entry) for entry in found]
    shuffled = list(names)
    random.shuffle(shuffled)
    assert standings("a", names) == standings("a", shuffled)
    for id, standing in standings("a", names).items():
        own = [e for e in found if (e[0], e[1]) == (id.step, id.generation)]
        newest = max(e[2] for e in own)
        assert standing.number == newest
        assert standing.outcome is worst(e[3] for e in own if e[2] == newest)


@given(st.lists(entries, max_size=20), st.integers(0, 10**12))
def test_nothing_that_never_was_good_is_ever_chosen(found, before):
    """Candidates were GOOD at some time, state no step at or above the limit, and come newest first."""
    names = {"a": [name_of(entry) for entry in found]}
    chosen = choose_known_good(names, before_step=before)
    was_good = {(e[0], e[1]) for e in found if e[3] is Outcome.GOOD}
    assert all((s.id.step, s.id.generation) in was_good and (s.id.step is None or s.id.step < before) for s in chosen)
    order = [s.id.order for s in chosen]
    assert order == sorted(order, reverse=True)
    assert choose_known_good(names, before_step=before, exclude=[s.id for s in chosen]) == []


def test_foreign_names_are_no_entries():
    """What is not exactly a ledger name is passed over."""
    for name in (
        "",
        "x.json",
        "000000000500.1.0001.good.json.tmp",
        "500.1.0001.good.json",
        "000000000500.0.0001.good.json",
    ):
        assert parse_verdict_name("a", name) is None

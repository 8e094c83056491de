"""The known-good decision: names in, ids out."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.verdict_entries import ENTRIES, current_verdict_of

from ckptguard.decisions.known_good import (
    COUNTERS,
    NUMBER_IN_NAME,
    SeriesHead,
    choose_series,
    current_verdicts,
    is_ahead,
    parse_verdict_name,
    verdict_name,
)
from ckptguard.values.verdict import worst


def name_of(entry):
    """The name of an entry."""
    return verdict_name(current_verdict_of(entry))


@given(ENTRIES)
def test_a_name_tells_id_order_and_outcome(entry):
    """Parsing a ledger name gives back what it was made of."""
    assert parse_verdict_name("a", name_of(entry)) == current_verdict_of(entry)


@given(st.lists(ENTRIES, max_size=20), st.randoms())
def test_order_of_names_does_not_matter_and_the_worst_of_the_newest_counts(found, random):
    """Any order of the listing gives the same standings; of equal numbers the worst outcome counts."""
    names = [name_of(entry) for entry in found]
    shuffled = list(names)
    random.shuffle(shuffled)
    assert current_verdicts("a", names) == current_verdicts("a", shuffled)
    for id, current_verdict in current_verdicts("a", names).items():
        own = [e for e in found if (e[0], e[1]) == (id.step, id.generation)]
        newest = max(e[2] for e in own)
        assert current_verdict.number == newest
        assert current_verdict.outcome is worst(e[3] for e in own if e[2] == newest)


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


TIMES = st.sampled_from(["2026-01-01", "2026-01-02", "2026-01-03"])
SERIES = st.one_of(
    st.text("abc", min_size=1, max_size=3),
    st.sampled_from(
        ["last.pt", "w/latest.pt", "best.pt", "epoch#.pt", "best/last-v#.ckpt", "last/best#.pt", "ckpt.pt"]
    ),
)
STANDPOINTS = st.lists(
    st.builds(
        SeriesHead,
        series=SERIES,
        counters=st.dictionaries(st.sampled_from([*COUNTERS, NUMBER_IN_NAME]), st.integers(-1, 3), max_size=3),
        has_optimizer=st.booleans(),
        sealed_at=TIMES,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda series_head: series_head.series,
)


def chosen_of(heads):
    """The one that is chosen."""
    return heads[choose_series(heads)[0]]


def sealed_again(heads, data):
    """The same, in another order and sealed at other times."""
    mixed = [msgspec.structs.replace(head, sealed_at=data.draw(TIMES)) for head in heads]
    return data.draw(st.permutations(mixed))


@given(heads=STANDPOINTS, places=st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_asking(heads, places):
    """Of the same series always the same one is chosen, and one with optimizer state if there is any."""
    chosen = chosen_of(heads)
    assert chosen.has_optimizer == any(head.has_optimizer for head in heads)
    mixed = list(heads)
    places.shuffle(mixed)
    assert chosen_of(mixed) == chosen


@given(heads=STANDPOINTS, shared=st.sampled_from(COUNTERS), data=st.data())
def test_with_a_common_counter_no_time_and_no_order_counts(heads, shared, data):
    """Whenever passes came, the same series is chosen, and it is behind none by the finest counter that all have."""
    heads = [msgspec.structs.replace(h, counters={shared: data.draw(st.integers(0, 2))} | h.counters) for h in heads]
    chosen = chosen_of(heads)
    assert chosen_of(sealed_again(heads, data)).series == chosen.series
    left = [head for head in heads if head.has_optimizer == chosen.has_optimizer]
    kind = next(kind for kind in COUNTERS if all(kind in head.counters for head in left))
    assert chosen.counters[kind] == max(head.counters[kind] for head in left)


@given(
    heads=STANDPOINTS,
    counters=st.dictionaries(st.sampled_from(COUNTERS), st.integers(0, 9), min_size=1),
    data=st.data(),
)
def test_of_equal_ones_the_name_decides_also_beside_others(heads, counters, data):
    """Without a common counter the time of sealing chooses, but never between two that are equally far."""
    equal = [SeriesHead(series=f"x/{n}", counters=counters, has_optimizer=True, sealed_at="") for n in NAMES]
    everyone = [*heads, *equal]
    for _ in range(3):
        chosen = chosen_of(sealed_again(everyone, data))
        assert chosen.series not in [head.series for head in equal[1:]]


# The first that is there comes first.
NAMES = ["last.pt", "epoch_latest.pt", "my_lasting.pt", "checkpoint.pth", "step_#.pt", "x_best.pt", "step_#_final.pt"]


@given(names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), data=st.data())
def test_names_that_a_resume_reads_come_before_numbers_and_best(names, data):
    """``last`` and ``latest``, other fixed names, numbers, then ``best``, ``final``, ``init``; the shortest first."""
    heads = [SeriesHead(series=n, counters={"epoch": 3}, has_optimizer=True, sealed_at=data.draw(TIMES)) for n in names]
    assert chosen_of(heads).series == min(names, key=NAMES.index)


@pytest.mark.parametrize(
    ("one", "other"),
    [("last.pt", "last_backup.pt"), ("best/last.pt", "last/best.pt"), ("last/ckpt.pt", "best/ckpt.pt")],
)
def test_the_last_word_of_a_path_decides(one, other):
    """Folders name saves too, and the plainest name is the save itself."""
    heads = [SeriesHead(series=s, counters={"step": 1}, has_optimizer=True, sealed_at="") for s in (other, one)]
    assert chosen_of(heads).series == one


@given(heads=STANDPOINTS)
def test_ahead_is_never_both_ways(heads):
    """Of two series at most one is ahead; of equal ones, none."""
    for one in heads:
        assert not is_ahead(one, one)
        assert not any(is_ahead(one, other) and is_ahead(other, one) for other in heads)

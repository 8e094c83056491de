"""Which series are saved together, and the moments that they had: the traps of real trainings, and generated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.known_good import SeriesHead
from ckptguard.decisions.moments import Moment, SeriesSeen, groups_of, is_input, moments_of, twins_of
from ckptguard.values.ids import CheckpointId, series_of
from ckptguard.values.patterns import Saves


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A content as its records say it."""

    id: CheckpointId
    number: tuple[int, ...] = ()
    was_good: bool = True
    saved_at: int | None = None
    sealed_at: int | None = None
    counters: Mapping[str, int] = {}


def series(
    form: str,
    numbers: Sequence[int],
    *,
    bad: Sequence[int] = (),
    optimizer: bool = False,
    weights: bool = True,
    tensors: bytes | None = None,
    times: bool = True,
    again: Mapping[int, int] | None = None,
) -> SeriesSeen:
    """A series whose contents have these numbers, each saved at its number. `again` says when numbers were saved for
    the second time."""
    name, is_fixed = series_of(form.format(1)), "{}" not in form
    contents = []
    for n, number in enumerate(numbers, 1):
        id = CheckpointId(name, None, n) if is_fixed else CheckpointId(name, number, 1)
        time = number * 1000 if times else None
        own = () if is_fixed else (number,)
        contents.append(Saved(id=id, number=own, was_good=number not in bad, saved_at=time))
    for number, at in (again or {}).items():
        contents.append(Saved(id=CheckpointId(name, number, 2), number=(number,), saved_at=at * 1000))
    contents.sort(key=lambda content: (content.number, content.id.generation), reverse=True)
    head = SeriesHead(
        series=name,
        counters={},
        has_optimizer=optimizer,
        has_weights=weights,
        sealed_at="",
        path=form.format(numbers[-1]),
        tensors=name.encode() if tensors is None else tensors,
    )
    return SeriesSeen(head=head, contents=contents, ever_good=any(content.was_good for content in contents))


def moments(*every: SeriesSeen, asked: Sequence[Saves] = ()) -> list[Moment]:
    """The moments of series that are all saved together."""
    [group] = groups_of(every, asked)
    return list(moments_of(group))


def steps(moment: Moment) -> dict[str, Any]:
    """{the series: the number of its member}."""
    return {member.content.id.series: member.content.id.step for member in moment.members}


def names(every: Sequence[SeriesSeen], asked: Sequence[Saves] = ()) -> list[set[str]]:
    """The groups, by name."""
    return [set(group.names) for group in groups_of(every, asked)]


HUNDREDS = range(100, 1001, 100)


def test_equal_numbers_are_one_save():
    """Also where nobody knows when they were written."""
    for times in (True, False):
        newest, *_ = moments(series("G_{}.pth", HUNDREDS, times=times), series("D_{}.pth", HUNDREDS, times=times))
        assert steps(newest) == {"G_#.pth": 1000, "D_#.pth": 1000}
        assert not newest.lacks


def test_what_is_saved_now_and_then_goes_back_to_what_was_its_newest_then():
    """G of 900 with D of 500; D of 1000 only with G of 1000."""
    found = {m.number[0]: m for m in moments(series("G_{}.pth", HUNDREDS), series("D_{}.pth", (500, 1000), bad=[1000]))}
    assert steps(found[900]) == {"G_#.pth": 900, "D_#.pth": 500}
    assert [member.behind for member in found[900].members] == [0, 4]
    assert found[900].was_good
    assert not found[1000].was_good
    assert steps(found[400]) == {"G_#.pth": 400}
    assert not any(moment.lacks for moment in found.values())


def test_what_is_no_longer_saved_is_waited_for_a_while_and_then_no_part():
    """An average that was switched off, even after it held NaN, does not freeze known-good."""
    found = moments(series("G_{}.pth", HUNDREDS), series("ema_{}.pth", range(100, 501, 100), bad=[500]))
    whole = [moment.number[0] for moment in found if moment.was_good and not moment.lacks]
    assert whole == [1000, 900, 400, 300, 200, 100]


def test_a_part_that_is_not_there_yet_lacks():
    """An asynchronous writer is late: the newest save is not whole."""
    newest, before, *_ = moments(series("G_{}.pth", HUNDREDS), series("D_{}.pth", range(100, 901, 100)))
    assert newest.lacks == ("D_#.pth",)
    assert not before.lacks


def test_a_later_era_has_no_part_of_an_earlier_one():
    """Numbering began again: G of 100 was saved again at 1100, and D was not."""
    found = {
        m.number[0]: m for m in moments(series("G_{}.pth", HUNDREDS, again={100: 1100}), series("D_{}.pth", HUNDREDS))
    }
    assert steps(found[1000]) == {"G_#.pth": 1000, "D_#.pth": 1000}
    newest = next(
        m
        for m in moments(series("G_{}.pth", HUNDREDS, again={100: 1100}), series("D_{}.pth", HUNDREDS))
        if m.number == (100,)
    )
    assert steps(newest) == {"G_#.pth": 100}
    assert newest.lacks == ("D_#.pth",)


def test_alternatives_are_no_parts():
    """``best`` and ``last`` beside numbers, and two series that can both be resumed from."""
    numbered = series("step_{}.pt", HUNDREDS, optimizer=True, tensors=b"all")
    for other in (
        series("best_{}.pt", HUNDREDS),
        series("last.pt", HUNDREDS, optimizer=True, tensors=b"all"),
        series("recovery_{}.pt", HUNDREDS, optimizer=True, tensors=b"all"),
    ):
        assert len(groups_of([numbered, other])) == 2


def test_numbers_that_count_something_else_join_nothing():
    """Epochs beside steps, by their words or by how far they are."""
    assert len(names([series("epoch_{}.pt", HUNDREDS), series("opt_step_{}.pt", HUNDREDS, optimizer=True)])) == 2
    epochs, updates = series("net-{}.pt", range(1, 101)), series("opt-{}.pt", range(10, 1001, 10), optimizer=True)
    slow = [Saved(id=c.id, number=c.number, saved_at=c.number[0] * 10_000) for c in epochs.contents]
    assert len(names([msgspec.structs.replace(epochs, contents=slow), updates])) == 2


def test_an_optimizer_is_no_save_by_itself():
    """Where its weights are not saved, there is no moment."""
    found = moments(
        series("model{}.pt", HUNDREDS), series("opt{}.pt", range(50, 1001, 50), optimizer=True, weights=False)
    )
    assert {moment.number[0] for moment in found} == set(HUNDREDS)


def test_a_fixed_name_is_placed_by_its_times():
    """The optimizer that is saved over belongs to the epoch after which it was written."""
    fixed = series("recipe_state", HUNDREDS, optimizer=True, weights=False)
    found = moments(series("epoch_{}", HUNDREDS), fixed)
    placed = {
        m.number[0]: [c.content.saved_at for c in m.members if c.content.id.series == "recipe_state"] for m in found
    }
    assert placed == {number: [number * 1000] for number in HUNDREDS}


@pytest.mark.parametrize(
    ("times", "joins"), [((10, 60, 60), True), ((10, 10, 60), True), ((60, 60, 60), False), ((60, 30, 60), False)]
)
def test_times_that_a_copy_made_place_nothing(times, joins):
    """Two saves within a second may have one time, where that is all that the store tells. All of them have not."""
    at, epochs = dict(zip((100, 200, 300), times, strict=True)), series("epoch_{}", (100, 200, 300))
    contents = [msgspec.structs.replace(c, saved_at=at[c.number[0]]) for c in epochs.contents]
    fixed = series("recipe_state", (300,), optimizer=True, weights=False)
    [state] = fixed.contents
    fixed = msgspec.structs.replace(fixed, contents=[msgspec.structs.replace(state, saved_at=times[-1])])
    found = moments(msgspec.structs.replace(epochs, contents=contents), fixed)
    assert any(not moment.lacks for moment in found) is joins


@given(missed=st.sets(st.sampled_from((4, 7, 10))), every=st.integers(1, 4))
def test_what_a_fixed_name_held_unseen_is_lacking(missed, every):
    """An optimizer that is saved over with each save: where nobody saw it, weights are not joined with an older one.
    One that is saved now and then lacks nothing."""
    written = [n for n in range(every, 11, every) if every > 1 or n not in missed]
    fixed = series("opt.pt", [n * 100 for n in written], optimizer=True, weights=False)
    found = moments(series("G_{}.pth", HUNDREDS), fixed)
    lacking = {m.number[0] // 100 for m in found if m.lacks}
    assert lacking == (missed if every == 1 else set())


@pytest.mark.parametrize("missing", [(), (500,), (400, 500), (300,)])
def test_optimizer_state_under_a_fixed_name_goes_with_the_weights_of_its_save(missing):
    """Where a save died before its optimizer state was whole, the weights of that save are no whole moment."""
    weights = series("epoch_{}/model.bin", range(100, 501, 100))
    saved = [n for n in range(100, 501, 100) if n not in missing]
    state = series("recipe_state", saved, optimizer=True, weights=False)
    whole = [moment for moment in moments(weights, state) if not moment.lacks]
    found = [(moment.number[0], moment.members[1].content.saved_at) for moment in whole]
    assert found == [(n, n * 1000) for n in reversed(saved)]


def test_the_user_comes_first():
    """`apart` and `together` count before everything."""
    pair = [series("G_{}.pth", HUNDREDS), series("D_{}.pth", HUNDREDS)]
    assert len(names(pair)) == 1
    assert len(names(pair, [Saves(apart=("D_*.pth",))])) == 2
    others = [
        series("a_{}.pt", HUNDREDS, optimizer=True, tensors=b"x"),
        series("b_{}.pt", HUNDREDS, optimizer=True, tensors=b"x"),
    ]
    assert len(names(others)) == 2
    assert twins_of(others) == [("a_#.pt", "b_#.pt")]
    assert len(names(others, [Saves(together=("[ab]_*.pt",))])) == 1
    assert twins_of(others, [Saves(together=("[ab]_*.pt",))]) == []
    assert twins_of(others, [Saves(apart=("a_*.pt",))]) == []


@pytest.mark.parametrize("other", ["preds_{}.npz", "dump_{}.pt"])
def test_what_was_never_good_and_has_no_role_spoils_nothing(other):
    """A dump of numbers beside checkpoints."""
    assert len(names([series("net_{}.pt", HUNDREDS), series(other, HUNDREDS, bad=HUNDREDS)])) == 2


SAVES = st.lists(st.sets(st.sampled_from("GDE"), min_size=1), min_size=3, max_size=12)


@given(saves=SAVES, sick=st.sets(st.tuples(st.sampled_from("GDE"), st.integers(1, 12))))
def test_a_moment_is_what_the_disk_held_when_a_save_ended(saves, sick):
    """Of each series the last content by then, and nothing newer, whatever is saved when."""
    written: dict[str, list[int]] = {}
    for number, parts in enumerate(saves, 1):
        for part in sorted(parts | {"G"}):
            written.setdefault(part, []).append(number)
    every = [
        series(f"net_{part}_{{}}.pth", numbers, bad=[n for name, n in sick if name == part])
        for part, numbers in sorted(written.items())
    ]
    for group in groups_of(every):
        for moment in moments_of(group):
            [number] = moment.number
            for part, numbers in written.items():
                there = steps(moment).get(f"net_{part}_#.pth")
                assert there in (None, max((n for n in numbers if n <= number), default=None))
            assert any(member.content.id.step == number for member in moment.own)


def read_at(one: SeriesSeen, times: Mapping[int, int], lag: int) -> SeriesSeen:
    """The series with these save times of its numbers, each read so long after it was saved."""
    contents = [
        msgspec.structs.replace(c, saved_at=times[c.number[0]], sealed_at=times[c.number[0]] + lag)
        for c in one.contents
    ]
    return msgspec.structs.replace(one, contents=contents)


@given(
    numbers=st.lists(st.integers(1, 50), min_size=2, max_size=8, unique=True).map(sorted),
    pause=st.integers(100, 10_000),
    lag=st.integers(0, 90),
    late=st.integers(0, 90),
    clock=st.sampled_from([0, 10**9, -(10**9)]),
)
def test_equal_numbers_of_two_trainings_one_after_the_other_join_nothing(numbers, pause, lag, late, clock):
    """Where all of one had been read before the other began. What is written late, copied within one look, or by a
    storage with another clock is joined by its numbers as before."""
    g, d = series("unet_{}.pth", numbers), series("dit_{}.pth", numbers)
    own = {number: n * pause for n, number in enumerate(numbers)}
    after = {number: time + (len(numbers) + 1) * pause for number, time in own.items()}
    assert len(groups_of([read_at(g, own, lag), read_at(d, after, lag)])) == 2
    beside = {number: time + late for number, time in own.items()}
    assert len(groups_of([read_at(g, own, lag), read_at(d, beside, lag)])) == 1
    looked_once = (len(numbers) * 2 + 2) * pause
    copied = [
        msgspec.structs.replace(
            one, contents=[msgspec.structs.replace(c, sealed_at=looked_once) for c in read_at(one, times, 0).contents]
        )
        for one, times in ((g, own), (d, after))
    ]
    assert len(groups_of(copied)) == 1
    if clock:
        assert len(groups_of([read_at(g, own, lag + clock), read_at(d, beside, lag + clock)])) == 1


@given(data=st.data(), saves=st.integers(1, 6))
def test_what_a_training_began_with_is_told_from_what_it_saved(data, saves):
    """One content under a fixed name, weights alone, older than every save of the others: no one else."""
    pretrained = series("pretrained.pth", [0])
    every = series("model_{}.pth", range(1, saves + 1), optimizer=data.draw(st.booleans()))
    assert is_input(pretrained, [pretrained, every])
    assert not is_input(every, [pretrained, every])
    assert not is_input(pretrained, [pretrained])
    for changed in (
        series("pretrained.pth", [0, 1]),
        series("pretrained.pth", [2]),
        series("pretrained.pth", [0], optimizer=True),
        series("pretrained.pth", [0], times=False),
        series("best.pth", [0]),
        series("model_{}.pt", [0]),
    ):
        assert not is_input(changed, [changed, every])
    counted = msgspec.structs.replace(pretrained.head, counters={"epoch": 1})
    assert not is_input(msgspec.structs.replace(pretrained, head=counted), [pretrained, every])


def test_fixed_names_are_joined_as_their_like_with_numbers():
    """``latest_net_G`` and ``latest_net_D`` where ``3_net_G`` and ``3_net_D`` are, however often each was saved."""
    g, d = series("{}_net_G.pth", HUNDREDS), series("{}_net_D.pth", HUNDREDS)
    latest = [series("latest_net_G.pth", HUNDREDS), series("latest_net_D.pth", range(100, 801, 100))]
    assert names([g, d, *latest]) == [{"#_net_G.pth", "#_net_D.pth"}, {"latest_net_G.pth", "latest_net_D.pth"}]
    apart = [Saves(apart=("latest_net_D.pth",))]
    assert {"latest_net_D.pth"} in names([g, d, *latest], apart)
    assert len(names([g, *latest])) == 3


@given(every=st.integers(1, 4))
def test_the_age_of_a_fixed_name_is_said(every):
    """An optimizer that is saved with each n-th save of the weights: how many saves before the others its content is
    of."""
    numbers = range(100, 1301, 100)
    opt = series("optimizer.pt", [n for n in numbers if n // 100 % every == 1 % every], weights=False, optimizer=True)
    for moment in list(moments(series("model_{}.pt", numbers), opt))[:-every]:
        placed = {member.content.id.series: member for member in moment.members}
        assert placed["model_#.pt"].behind == 0
        assert placed["optimizer.pt"].behind == (moment.number[0] // 100 - 1) % every

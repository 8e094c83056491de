"""Which checkpoint is tried next: every one and every place once, best first, and the truth about what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.known_good import IN_PLACE, KEPT
from ckptguard.errors import CouldNotTellError, NoKnownGoodError
from ckptguard.runs.candidates import Choice, Refused, Skipped, first_of
from ckptguard.values.ids import CheckpointId

GOOD, BAD, UNSURE = "good", "bad", "unsure"
PLACES = (IN_PLACE, KEPT, "replica")


def id_of(step: int) -> CheckpointId:
    """The checkpoint of a step."""
    return CheckpointId("net-#.pt", step, 1)


@dataclass
class World:
    """Checkpoints by step, each with the state of its places. What is found bad may take other places with it, and
    what is refused may bring older ones to light that nobody had looked at."""

    state: dict[int, dict[str, str]]
    takes: dict[tuple[int, str], str] = field(default_factory=dict)
    hidden: dict[int, int] = field(default_factory=dict)  # step -> the step after whose refusal it is there
    tried: list[Choice] = field(default_factory=list)
    refused: Refused = frozenset()

    def best(self, refused: Refused) -> CheckpointId | None:
        """The highest step that may be taken."""
        there = (s for s in self.state if self.hidden.get(s) is None or id_of(self.hidden[s]) in refused)
        step = max((s for s in there if id_of(s) not in refused), default=None)
        return None if step is None else id_of(step)

    def places(self, id: CheckpointId) -> Iterator[tuple[Choice, Choice]]:
        """Its places as they are now."""
        choices = (Choice(id=id, place=place) for place in PLACES if place in self.state[id.step or 0])
        yield from ((choice, choice) for choice in choices)

    def attempt(self, choice: Choice) -> Choice | str:
        """Try one."""
        self.tried.append(choice)
        found = self.state[choice.id.step or 0]
        said = found[choice.place]
        if said == UNSURE:
            raise CouldNotTellError(str(len(self.tried)))
        if said == BAD:
            del found[choice.place]
            found.pop(self.takes.get((choice.id.step or 0, choice.place), ""), None)
        return choice if said == GOOD else said

    def none_left(self, refused: Refused, skipped: Sequence[Skipped]) -> NoKnownGoodError:
        """The error of a search in which everything could be read."""
        assert not any(one.unsure for one in skipped)
        return NoKnownGoodError("none")

    def search(self) -> tuple[Choice | None, tuple[Skipped, ...]]:
        """What is taken, and what was skipped before; None if nothing is good."""

        def refuse(refused: Refused) -> None:
            self.refused = refused

        try:
            taken = first_of(self, self.attempt, when_refused=refuse, otherwise=self.none_left)
        except (NoKnownGoodError, CouldNotTellError):
            return None, ()
        assert taken.result == taken.offered
        return taken.result, taken.skipped


states = st.dictionaries(st.sampled_from(PLACES), st.sampled_from((GOOD, BAD, UNSURE)), max_size=3)
worlds = st.builds(
    World,
    state=st.dictionaries(st.integers(1, 6), states, max_size=6),
    takes=st.dictionaries(st.tuples(st.integers(1, 6), st.sampled_from(PLACES)), st.sampled_from(PLACES), max_size=4),
    hidden=st.dictionaries(st.integers(1, 6), st.integers(1, 6), max_size=3),
)


def expected(world: World) -> Choice | None:
    """The first good place that is left when the search comes to it: a plain walk over a copy."""
    places = {step: dict(found) for step, found in world.state.items()}
    done: set[int] = set()
    while True:
        left = [s for s in places if s not in done and world.hidden.get(s) in (None, *done)]
        if not left:
            return None
        step = max(left)
        for place in PLACES:
            said = places[step].get(place)
            if said == GOOD:
                return Choice(id=id_of(step), place=place)
            if said == BAD:
                places[step].pop(world.takes.get((step, place), ""), None)
        done.add(step)


@given(worlds)
def test_it_takes_the_first_good_place_and_tries_none_twice(world: World) -> None:
    """Best first, place before copy; what is found on the way changes what comes next, and what failed is said."""
    wanted = expected(world)
    taken, skipped = world.search()
    assert taken == wanted
    assert len(set(world.tried)) == len(world.tried)
    if taken is not None:
        assert [one.choice for one in skipped] == world.tried[:-1]


@given(worlds)
def test_the_end_tells_whether_a_good_one_may_be_left(world: World) -> None:
    """Nobody says that nothing is good while something could not be read; the last such is blamed."""
    if expected(world) is not None:
        return
    unread: list[str] = []

    def attempt(choice: Choice) -> Choice | str:
        try:
            return world.attempt(choice)
        except CouldNotTellError as error:
            unread.append(error.message)
            raise

    with pytest.raises((NoKnownGoodError, CouldNotTellError)) as caught:
        first_of(world, attempt, otherwise=world.none_left)
    assert caught.value.message == (unread[-1] if unread else "none")


def test_a_checkpoint_that_nothing_is_left_of_is_refused() -> None:
    """Without any place it is passed over, and the search goes on to the next."""
    world = World(state={2: {}, 1: {KEPT: GOOD}})
    assert (world.search()[0], world.refused) == (Choice(id=id_of(1), place=KEPT), {id_of(2)})


def test_choices_after_the_next_one_are_not_asked_for() -> None:
    """Opening a replica costs seconds: only when what is nearer has failed."""

    class Nearest(World):
        def places(self, id: CheckpointId) -> Iterator[tuple[Choice, Choice]]:
            yield from super().places(id)
            raise AssertionError("asked")

    world = Nearest(state={1: {IN_PLACE: GOOD}})
    assert world.search()[0] == Choice(id=id_of(1), place=IN_PLACE)

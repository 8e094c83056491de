"""Which checkpoint is tried next: every one and every place once, best first, and the truth about what is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.candidates import Choice, Search, places_of
from ckptguard.decisions.known_good import IN_PLACE, KEPT
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

    places: dict[int, dict[str, str]]
    takes: dict[tuple[int, str], str] = field(default_factory=dict)
    hidden: dict[int, int] = field(default_factory=dict)  # step -> the step after whose refusal it is there
    tried: list[Choice] = field(default_factory=list)

    def best(self, refused: frozenset[CheckpointId]) -> CheckpointId | None:
        """The highest step that may be taken."""
        there = (s for s in self.places if self.hidden.get(s) is None or id_of(self.hidden[s]) in refused)
        step = max((s for s in there if id_of(s) not in refused), default=None)
        return None if step is None else id_of(step)

    def choices(self, id: CheckpointId) -> list[Choice]:
        """Its places as they are now."""
        return [Choice(id=id, place=place) for place in PLACES if place in self.places[id.step or 0]]

    def attempt(self, choice: Choice) -> str:
        """Try one."""
        self.tried.append(choice)
        found = self.places[choice.id.step or 0]
        told = found[choice.place]
        if told == BAD:
            del found[choice.place]
            found.pop(self.takes.get((choice.id.step or 0, choice.place), ""), None)
        return told


def search_in(world: World) -> tuple[Choice | None, Search]:
    """What `first_of` does, with a world in place of storage."""
    search = Search()
    while (id := world.best(search.refused)) is not None:
        while (choice := search.next_of(world.choices(id))) is not None:
            told = world.attempt(choice)
            if told == GOOD:
                return choice, search
            search = search.skip(choice, told, unsure=told == UNSURE)
        search = search.refuse(id)
    return None, search


states = st.dictionaries(st.sampled_from(PLACES), st.sampled_from((GOOD, BAD, UNSURE)), max_size=3)
worlds = st.builds(
    World,
    places=st.dictionaries(st.integers(1, 6), states, max_size=6),
    takes=st.dictionaries(st.tuples(st.integers(1, 6), st.sampled_from(PLACES)), st.sampled_from(PLACES), max_size=4),
    hidden=st.dictionaries(st.integers(1, 6), st.integers(1, 6), max_size=3),
)


def expected(world: World) -> Choice | None:
    """The first good place that is left when the search comes to it: a plain walk over a copy."""
    places = {step: dict(found) for step, found in world.places.items()}
    done: set[int] = set()
    while True:
        left = [s for s in places if s not in done and world.hidden.get(s) in (None, *done)]
        if not left:
            return None
        step = max(left)
        for place in PLACES:
            told = places[step].get(place)
            if told == GOOD:
                return Choice(id=id_of(step), place=place)
            if told == BAD:
                places[step].pop(world.takes.get((step, place), ""), None)
        done.add(step)


@given(worlds)
def test_it_takes_the_first_good_place(world: World) -> None:
    """Best first, place before copy; and what is found on the way changes what comes next."""
    wanted = expected(world)
    assert search_in(world)[0] == wanted


@given(worlds)
def test_nothing_is_tried_twice_and_all_is_told(world: World) -> None:
    """Each choice once; each that failed is said, in order, with its reason."""
    taken, search = search_in(world)
    assert len(set(world.tried)) == len(world.tried)
    assert [one.choice for one in search.skipped] == [choice for choice in world.tried if choice != taken]
    assert all(one.why == (UNSURE if one.unsure else BAD) for one in search.skipped)


@given(worlds)
def test_the_end_tells_whether_a_good_one_may_be_left(world: World) -> None:
    """Nobody says that nothing is good while something could not be read; the last such is blamed."""
    taken, search = search_in(world)
    unread = [one for one in search.skipped if one.unsure]
    assert search.unsure == (unread[-1] if unread else None)
    if taken is None:
        assert not any(GOOD in world.places[id.step or 0].values() for id in search.refused)
        assert world.best(search.refused) is None


def test_a_checkpoint_that_nothing_is_left_of_is_refused() -> None:
    """Without any place it is passed over, and the search goes on to the next."""
    world = World(places={2: {}, 1: {KEPT: GOOD}})
    taken, search = search_in(world)
    assert (taken, search.refused) == (Choice(id=id_of(1), place=KEPT), {id_of(2)})


def test_choices_after_the_next_one_are_not_asked_for() -> None:
    """Opening a replica costs seconds: only when what is nearer has failed."""

    def choices():
        yield first
        raise AssertionError("asked")

    first = Choice(id=id_of(1), place=IN_PLACE)
    assert Search().next_of(choices()) == first


def test_the_place_is_tried_before_the_copy() -> None:
    """Under its own name it costs nothing to use."""
    found = places_of(id_of(1), in_place=True, has_copy=True)
    assert [(choice.place, choice.in_place) for choice in found] == [(IN_PLACE, True), (KEPT, False)]
    assert places_of(id_of(1), in_place=False, has_copy=False) == []

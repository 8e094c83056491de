"""From which checkpoint does a training start? Against a plain model of a training that dies again and again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.restarts import StartPoint, choose_start
from ckptguard.values.ids import CheckpointId


def point(step, newer, *, series="net-#.pt", generation=1, content=""):
    """A checkpoint to start from."""
    id = CheckpointId(series, step, generation)
    return StartPoint(id=id, newer=newer, training_step=step, content=content)


@dataclass
class Restarts:
    """A training that is started, dies, and sometimes saves something good: what must be chosen, told plainly."""

    most: int
    good: list[CheckpointId] = field(default_factory=lambda: [CheckpointId("net-#.pt", 1, 1)])
    ever: list[CheckpointId] = field(default_factory=lambda: [CheckpointId("net-#.pt", 1, 1)])
    deaths: Counter[CheckpointId] = field(default_factory=Counter)
    starts: list[StartPoint] = field(default_factory=list)

    def newer(self, id):
        """How many good saves there ever were after this one."""
        return sum(other.order > id.order for other in self.ever)

    def save(self):
        """Save the next step after that from which training went on; what it forgives is everything before it."""
        step = self.good[-1].step + 1
        new = CheckpointId("net-#.pt", step, 1 + sum(id.step == step for id in self.ever))
        self.good.append(new)
        self.ever.append(new)
        self.deaths = Counter({id: count for id, count in self.deaths.items() if id.order > new.order})

    def expected(self):
        """The newest that has starts left; those above it are moved aside."""
        left = [id for id in self.good if self.deaths[id] < self.most]
        return left[-1] if left else None

    def choose(self):
        """What the decision says."""
        points = [point(id.step, self.newer(id), generation=id.generation) for id in reversed(self.good)]
        return choose_start(points, self.starts, {s.id: self.newer(s.id) for s in self.starts}, most=self.most)


@given(st.integers(1, 3), st.lists(st.booleans(), max_size=40))
def test_it_goes_one_further_back_after_so_many_deaths_without_a_good_save(most, saves):
    """Against the model: at each start the newest good one that has starts left; a good save forgives those before."""
    world = Restarts(most)
    for saved in saves:
        choice, expected = world.choose(), world.expected()
        assert (choice.point.id if choice.point else None) == expected
        if expected is None:
            return
        assert choice.before == world.deaths[expected]
        assert [p.id for p in choice.spent] == [id for id in reversed(world.good) if id.order > expected.order]
        del world.good[world.good.index(expected) + 1 :]
        world.starts.append(point(expected.step, world.newer(expected), generation=expected.generation))
        world.deaths[expected] += 1
        if saved:
            world.save()


points_of = st.lists(
    st.builds(
        point,
        st.integers(1, 4),
        st.just(0),
        series=st.sampled_from(("net-#.pt", "last.pt")),
        generation=st.integers(1, 3),
        content=st.sampled_from(("", "a", "b")),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda p: p.id,
)


@given(points_of, st.integers(1, 3))
def test_without_a_good_save_it_comes_to_an_end(points, most):
    """Whatever names one place of the training has: it has so many starts in all, and then the next has."""
    starts = []
    while (choice := choose_start(points, starts, {}, most=most)).point is not None:
        starts.append(choice.point)
        assert len(starts) <= most * len(points)
        assert sum(choice.point.is_same(start) for start in starts) <= most
    assert all(sum(p.is_same(start) for start in starts) >= most for p in points)


def test_a_content_under_another_name_is_the_same_place():
    """Put back, it is a new generation of its name; a fixed name may hold the content of a numbered one."""
    first = StartPoint(id=CheckpointId("last.pt", None, 2), newer=0, content="a")
    again = StartPoint(id=CheckpointId("last.pt", None, 4), newer=0, content="a")
    other = StartPoint(id=CheckpointId("last.pt", None, 3), newer=0)
    assert first.is_same(again)
    assert not other.is_same(first)
    assert not msgspec.structs.replace(first, content="").is_same(other)

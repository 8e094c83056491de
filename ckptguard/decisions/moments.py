"""Say which series of a training are saved together, and which moments the training had. Pure.

A moment is the training as its disk looked when one save had ended: of each series that is saved together the last
content written by then. Going back means going back to one moment. These rules join series, the first that says
something counts:

1. The user's ``[[saves]]``: what is saved together, and what never is.
2. Names of one training (not ``fold1`` and ``fold2``), and of one kind: ``last``, ``best``, ``final`` and ``init`` are
   alternatives to numbered saves, and no part of them. So are series whose tensors have equal names and that all hold
   optimizer state.
3. Numbers in names that are equal, if they count the same.
4. Equal counters inside.
5. Fixed names (``latest_net_G``, ``latest_net_D``) if those with numbers instead are joined.
6. A name whose numbers say nothing is joined by its save times if the others lack what it holds (optimizer state, or
   weights), or if two fixed names were written together each time. Times that do not rise with the numbers are those
   of a copy, and place nothing.

What nothing joins has verdicts, and is gone back to, by itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from ckptguard.decisions.known_good import (
    COUNTERS,
    NAMED,
    NUMBER_IN_NAME,
    OPTIMIZER_STEP,
    SeriesHead,
    kind_of_name,
    numbered_form,
)
from ckptguard.decisions.names import COARSE_WORDS, read_names, role_of
from ckptguard.values.ids import CheckpointId, training_named_in
from ckptguard.values.patterns import Saves

Numbers = tuple[int, ...]

SETTING, EQUAL_NUMBERS, EQUAL_COUNTERS, NEAR_IN_TIME, ALONE = (
    "--with or [[saves]]",
    "equal numbers",
    "equal counters",
    "save times",
    "",
)
_NEAREST = 4  # contents with higher numbers that are asked when a number was saved again
ENDED_AFTER = 3  # saves that a series may miss before it is no longer waited for
_EPOCHS = ("epoch", "epoch in its name")  # several saves may share one
_INSIDE = tuple(kind for kind in COUNTERS if kind != OPTIMIZER_STEP)
_COUNTING = re.compile(
    r"(?:global)?steps?|iter(?:ation)?s?|epochs?|ep|updates?|checkpoint|ckpt|save|recovery|model|state|last|latest|best"
    r"|final|init|pth?|tar|bin|safetensors|[^a-z]+"
)


class SavedContent(Protocol):
    """One content of a series. `number` is () for a fixed name. Times (in ns) and counters are asked for when needed:
    `saved_at` by the storage's clock, `sealed_at` by the clock of the process that read it first.

    `was_good`: it may be good and exist; the caller looks.
    """

    @property
    def id(self) -> CheckpointId: ...
    @property
    def number(self) -> Numbers: ...
    @property
    def was_good(self) -> bool: ...
    @property
    def saved_at(self) -> int | None: ...
    @property
    def sealed_at(self) -> int | None: ...
    @property
    def counters(self) -> Mapping[str, int]: ...


class SeriesSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A series with its newest checkpoint that was ever good, else its newest, and its contents, the newest first.
    `left_behind` are those that a rollback went back from, without what it quarantined as bad."""

    head: SeriesHead
    contents: Sequence[SavedContent]
    ever_good: bool = True
    left_behind: Sequence[SavedContent] = ()

    @property
    def name(self) -> str:
        """The name of the series."""
        return self.head.series

    @property
    def is_state(self) -> bool:
        """True if a training may resume from it. What was never good and has no such role may be a dump of numbers."""
        return self.ever_good or self.head.has_optimizer or role_of(self.head.path) != "unknown"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Series that are saved together, and the rule that joined each of them. `clock` are those whose numbers count the
    same; the others are placed by their counters and times."""

    series: tuple[SeriesSeen, ...]
    rules: Mapping[str, str]
    clock: frozenset[str]

    def with_left_behind(self) -> Group | None:
        """Return the same with what rollbacks went back from, all by the times of their saves; None if there is
        nothing."""
        if not any(one.left_behind for one in self.series):
            return None
        return msgspec.structs.replace(self, series=tuple(map(_by_time, self.series)))

    @property
    def names(self) -> frozenset[str]:
        """The names of its series."""
        return frozenset(one.name for one in self.series)


class MomentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a moment. `behind` is how many saves before the moment's own it was saved; `rule` joined its series.
    `own`: it counts as of the moment's own save. So does all that no number places: times alone exclude nothing."""

    content: SavedContent
    rule: str
    behind: int = 0
    own: bool = True


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What a training consisted of when one save had ended. `lacks` are the series that should have saved, and did
    not."""

    number: Numbers
    members: tuple[MomentPart, ...]
    lacks: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[MomentPart, ...]:
        """The members of its own save."""
        return tuple(member for member in self.members if member.own)

    @property
    def was_good(self) -> bool:
        """True if all of its members may be good and exist."""
        return all(member.content.was_good for member in self.members)


def _by_time(one: SeriesSeen) -> SeriesSeen:
    every = sorted((*one.contents, *one.left_behind), key=lambda content: content.saved_at or 0, reverse=True)
    return msgspec.structs.replace(one, contents=every if one.left_behind else one.contents, left_behind=())


def groups_of(series: Sequence[SeriesSeen], asked: Sequence[Saves] = ()) -> list[Group]:
    """Return the series of one training in groups that are saved together, in the order of their first series."""
    state = [one for one in series if one.is_state]
    rules: dict[frozenset[str], str] = {}
    for one, other in itertools.combinations(state, 2):
        rule = _joined_by(one, other, asked)
        if rule:
            rules[frozenset((one.name, other.name))] = rule
    rules |= _like_numbered(state, rules, asked)
    groups = _connected(state, rules)
    groups = _completed(groups, rules, asked)
    groups += [[one] for one in series if not one.is_state]
    order = {one.name: n for n, one in enumerate(series)}
    return sorted((_group(own, rules) for own in groups), key=lambda group: min(order[name] for name in group.names))


def twins_of(series: Sequence[SeriesSeen], asked: Sequence[Saves] = ()) -> list[tuple[str, str]]:
    """Return the pairs of series that look like two trainings in one folder: equal tensors, each with optimizer state,
    and equal numbers under other names."""
    found = []
    for one, other in itertools.combinations(series, 2):
        stems = _stem(one.name), _stem(other.name)
        if _asked(one.name, other.name, asked) is not None or "" in stems or stems[0] == stems[1]:
            continue
        same_kind = kind_of_name(one.name) == kind_of_name(other.name)
        if same_kind and _are_alternatives(one.head, other.head) and _count_the_same(one, other):
            found.append((one.name, other.name))
    return found


def is_input(one: SeriesSeen, every: Iterable[SeriesSeen]) -> bool:
    """True for weights that a training began with, and did not save: one content under a fixed name, without a counter
    or optimizer state, that is older than everything in the other series of the training."""
    only, head = one.contents[0], one.head
    is_lone = len(one.contents) == 1 and not only.number and head.has_weights and not head.has_optimizer
    if not is_lone or head.whole or kind_of_name(one.name) not in ("", "init") or _counters_inside(head):
        return False
    others = [other for other in every if other is not one]
    if not any(_numbered(other) or len(other.contents) > 1 or other.head.has_optimizer for other in others):
        return False
    here, firsts = only.saved_at, [other.contents[-1].saved_at for other in others]
    return here is not None and all(first is not None and here < first for first in firsts)


def moments_of(group: Group) -> Iterator[Moment]:
    """Yield the moments of a group, the newest first. Only what is needed for them is read.

    The own save of a moment holds weights, and optimizer state if any series of the group does.
    """
    on_clock = [one for one in group.series if one.name in group.clock]
    others = [one for one in group.series if one.name not in group.clock]
    wants_optimizer = any(one.head.has_optimizer for one in group.series)
    heads = {one.name: one.head for one in group.series}
    saves = _saves(on_clock)
    places = {one.name: 0 for one in others}
    of_saves = not others or _times_are_of_saves(saves)
    for n, (key, own) in enumerate(saves):
        anchor = max(own.values(), key=lambda content: content.id.generation)
        members, lacks = [], []
        for one in on_clock:
            behind = _saves_behind(saves, one.name, n)
            usual = _usual_gap(saves, one.name, n + (behind or 0))
            if behind is None:
                if not any(one.name in newer for _, newer in saves[:n]):  # else it began later
                    lacks.append(one.name)
                continue
            if behind > usual * ENDED_AFTER:
                continue  # it has ended
            content = saves[n + behind][1][one.name]
            is_of_this_era = content is anchor or _of_one_era(content, anchor, on_clock)
            if is_of_this_era:
                rule = group.rules[one.name]
                members.append(MomentPart(content=content, rule=rule, behind=behind, own=not behind))
            if behind >= usual or not is_of_this_era:
                lacks.append(one.name)
        ends = _ends_before(saves, n) if others else None
        for one in others:
            while (place := places[one.name]) < len(one.contents) and _is_newer(one.contents[place], own, ends):
                places[one.name] += 1
            if place == len(one.contents) or not (of_saves or _counter_of_both(one.contents[place], anchor)):
                lacks.append(one.name)
                continue
            last = _save_of(one.contents[place], saves, n)
            members.append(MomentPart(content=one.contents[place], rule=group.rules[one.name], behind=last - n))
            if _missed_a_save(one.contents[place:], saves, n, last):
                lacks.append(one.name)
        saved = [heads[member.content.id.series] for member in members if member.own]
        if any(h.has_weights for h in saved) and any(h.has_optimizer for h in saved) >= wants_optimizer:
            yield Moment(number=key[0], members=tuple(members), lacks=tuple(lacks))


_Key = tuple[Numbers, int]
_Saves = Sequence[tuple[_Key, Mapping[str, SavedContent]]]


def _saves(on_clock: Sequence[SeriesSeen]) -> _Saves:
    """Return the contents of each number, the newest first. Of a number that was saved again the newer contents are
    together, and the older ones."""
    found: dict[_Key, dict[str, SavedContent]] = {}
    for one in on_clock:
        again: dict[Numbers, int] = {}
        for content in one.contents:  # the newest first
            number = content.number or (-len(again) - 1,)  # of a fixed name each content
            again[number] = depth = again.get(number, -1) + 1
            found.setdefault((number, -depth), {})[one.name] = content
    return sorted(found.items(), key=lambda save: save[0], reverse=True)


def _saves_behind(saves: _Saves, name: str, n: int) -> int | None:
    """Return how many saves before the n-th a series was saved last; None if never."""
    return next((m - n for m in range(n, len(saves)) if name in saves[m][1]), None)


def _usual_gap(saves: _Saves, name: str, last: int) -> int:
    """Return in how many saves a series is saved once, by its last saves up to the one at `last`."""
    places = [m for m in range(last, len(saves)) if name in saves[m][1]][:4]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    return max(gaps, default=len(saves) - last)


def _of_one_era(one: SavedContent, other: SavedContent, on_clock: Sequence[SeriesSeen]) -> bool:
    """False if numbering began again between two contents: a higher number was saved before the later of them."""
    if max(one.id.generation, other.id.generation) == 1 or not one.number:
        return True
    here, there = one.saved_at, other.saved_at
    if here is None or there is None:
        return True
    second = other if here < there else one
    for series in on_clock:
        higher = [content for content in series.contents if content.number > second.number][-_NEAREST:]
        times = (content.saved_at for content in higher)
        if any(time is not None and min(here, there) < time < max(here, there) for time in times):
            return False
    return True


def _ends_before(saves: _Saves, n: int) -> int | None:
    """Return the time before which the n-th save ended: half-way to the one after it. Of the newest, the distance to
    the one before it counts."""
    at = _written(saves[n][1])
    if at is None:
        return None
    if n:
        after = min((c.saved_at for c in saves[n - 1][1].values() if c.saved_at is not None), default=None)
        return None if after is None else (at + after) // 2
    before = _written(saves[1][1]) if len(saves) > 1 else None
    return None if before is None else at + abs(at - before) // 2


def _missed_a_save(contents: Sequence[SavedContent], saves: _Saves, n: int, last: int) -> bool:
    """True if nobody saw what a name held after the n-th save: its content is of an earlier one, the `last`, and it was
    saved more often than that. It may have ended, too."""
    if last == n:
        return False
    places = [last]
    for content in contents[1:_NEAREST]:
        places.append(_save_of(content, saves, places[-1]))
    usual = min((after - before for before, after in itertools.pairwise(places) if after > before), default=len(saves))
    return usual <= last - n <= usual * ENDED_AFTER


def _save_of(content: SavedContent, saves: _Saves, n: int) -> int:
    """Return the earliest save that a content was there at the end of, as far as times are known. It was at the
    n-th's."""
    while n + 1 < len(saves):
        ends = _ends_before(saves, n + 1)
        if ends is None or content.saved_at is None or _is_newer(content, saves[n + 1][1], ends):
            break
        n += 1
    return n


def _written(save: Mapping[str, SavedContent]) -> int | None:
    return max((c.saved_at for c in save.values() if c.saved_at is not None), default=None)


def _times_are_of_saves(saves: _Saves) -> bool:
    """False if the newest numbers were each saved once, and a later one is older, or none is newer: a copy made these
    times. A store that tells seconds gives two quick saves the same."""
    newest = saves[: _NEAREST + 1]
    if any(content.id.generation > 1 for _, own in newest for content in own.values()):
        return True
    times = [time for _, own in newest if (time := _written(own)) is not None]
    rise = all(later >= earlier for later, earlier in itertools.pairwise(times))
    return rise and (len(times) < 2 or times[0] > times[-1])


def _counter_of_both(one: SavedContent, other: SavedContent) -> str | None:
    """Return the finest counter inside that two contents have and that can order them, or None."""
    here, there = one.counters, other.counters
    kind = next((k for k in (*COUNTERS, *NAMED) if k in here and k in there and k != NUMBER_IN_NAME), None)
    return kind if kind is not None and (here[kind] != there[kind] or kind not in _EPOCHS) else None


def _is_newer(content: SavedContent, save: Mapping[str, SavedContent], ends: int | None) -> bool:
    """True if a content that no number places was saved after a save: by a counter that both have, else by time."""
    for anchor in save.values():
        kind = _counter_of_both(content, anchor)
        if kind is not None:
            return content.counters[kind] > anchor.counters[kind]
    return ends is not None and content.saved_at is not None and content.saved_at > ends


def _joined_by(one: SeriesSeen, other: SeriesSeen, asked: Sequence[Saves]) -> str | None:
    """Return the rule that joins two series, or None."""
    wanted = _asked(one.name, other.name, asked)
    if wanted is not None:
        return SETTING if wanted else None
    if one.head.whole or other.head.whole:
        return None
    if training_named_in(one.name) != training_named_in(other.name):
        return None
    if kind_of_name(one.name) != kind_of_name(other.name) or _are_alternatives(one.head, other.head):
        return None
    if _count_the_same(one, other):
        return EQUAL_NUMBERS
    if not _counters_inside(one.head).isdisjoint(_counters_inside(other.head)):
        return EQUAL_COUNTERS
    return NEAR_IN_TIME if _written_together(one, other) else None


def _asked(one: str, other: str, asked: Sequence[Saves]) -> bool | None:
    """Return whether the user says that two series are saved together, or None."""
    if any(saves.has(saves.together, one) and saves.has(saves.together, other) for saves in asked):
        return True
    return False if any(saves.has(saves.apart, name) for saves in asked for name in (one, other)) else None


def _counters_inside(head: SeriesHead) -> frozenset[str]:
    return frozenset(_INSIDE) & head.counters.keys()


def _are_alternatives(one: SeriesHead, other: SeriesHead) -> bool:
    """True if either of two series could be resumed from without the other. Names that call them different parts of a
    model say that they are no alternatives."""
    roles, stems = {role_of(one.path), role_of(other.path)}, {_stem(one.series), _stem(other.series)}
    are_parts = "unknown" not in roles and (len(roles) > 1 or (len(stems) > 1 and "" not in stems))
    return one.tensors == other.tensors and one.has_optimizer and other.has_optimizer and not are_parts


def _stem(series: str) -> str:
    return _COUNTING.sub("", series.lower())


def _is_coarse(head: SeriesHead) -> bool | None:
    """True if a name counts epochs, rounds or episodes, False for steps, None if it does not say."""
    word = read_names([head.path])[head.path].word
    return None if word is None else word in COARSE_WORDS


def _count_the_same(one: SeriesSeen, other: SeriesSeen) -> bool:
    """True if equal numbers in the names of two series are of one save.

    Most numbers of the one that is saved less often are numbers of the other, as far as both go. Where one is far
    behind, it must have been written before the other went on.
    """
    coarse = {_is_coarse(one.head), _is_coarse(other.head)} - {None}
    mine, theirs = ({c.number for c in series.contents if c.number} for series in (one, other))
    shared = mine & theirs
    if not shared or len(coarse) > 1:
        return False
    low, high = max(min(mine), min(theirs)), min(max(mine), max(theirs))
    inside = [{n for n in numbers if low <= n <= high} for numbers in (mine, theirs)]
    if 2 * len(shared) < min(map(len, inside)):
        return False
    if all(2 * len(i) < len(every) for i, every in zip(inside, (mine, theirs), strict=True)):
        return False
    if _one_after_the_other(one, other, shared) or _one_after_the_other(other, one, shared):
        return False
    slow, fast = (one, other) if max(mine) < max(theirs) else (other, one)
    later = [content for content in fast.contents if content.number > high]
    if len(later) <= 2 * ENDED_AFTER or not slow.contents:
        return True
    then, since = slow.contents[0].saved_at, later[-ENDED_AFTER].saved_at
    return then is None or since is None or then <= since


def _one_after_the_other(one: SeriesSeen, other: SeriesSeen, shared: Collection[Numbers]) -> bool:
    """True if all of one series had been read before the first of the other was saved: they are two trainings, whose
    numbers are equal by chance."""
    if len(shared) < 2:
        return False
    last = next(content for content in one.contents if content.number in shared)
    first = next(content for content in reversed(other.contents) if content.number in shared)
    saved, read, began = last.saved_at, last.sealed_at, first.saved_at
    if saved is None or read is None or began is None:
        return False
    return saved <= read < began  # a file that is newer than its record was written by another clock


def _written_together(one: SeriesSeen, other: SeriesSeen) -> bool:
    """True if two fixed names were written together in each of their last two saves."""
    pairs = list(zip(one.contents[:2], other.contents[:2], strict=False))
    if len(pairs) < 2 or any(a.number or b.number for a, b in pairs):
        return False
    times = [(a.saved_at, b.saved_at) for a, b in pairs]
    known = [(a, b) for a, b in times if a is not None and b is not None]
    if len(known) < 2:
        return False
    (a2, b2), (a1, b1) = known
    return 4 * max(abs(a2 - b2), abs(a1 - b1)) < min(a2 - a1, b2 - b1)


def _like_numbered(
    series: Sequence[SeriesSeen], rules: Mapping[frozenset[str], str], asked: Sequence[Saves]
) -> dict[frozenset[str], str]:
    """Return the pairs of fixed names (``latest_net_G``, ``latest_net_D``) whose like with numbers are joined
    (``3_net_G``, ``3_net_D``), with the rule that joined those."""
    like = {one.name: form for one in series if (form := numbered_form(one.name)) is not None}
    found = {}
    for one, other in itertools.combinations(like, 2):
        rule = rules.get(frozenset((like[one], like[other])))
        if rule and kind_of_name(one) == kind_of_name(other) and _asked(one, other, asked) is None:
            found[frozenset((one, other))] = rule
    return found


def _connected(series: Sequence[SeriesSeen], rules: Collection[frozenset[str]]) -> list[list[SeriesSeen]]:
    """Return series in groups that rules connect."""
    groups: list[list[SeriesSeen]] = []
    for one in series:
        near = [group for group in groups if any(frozenset((one.name, other.name)) in rules for other in group)]
        groups = [group for group in groups if group not in near] + [[*itertools.chain(*near), one]]
    return groups


def _completed(
    groups: list[list[SeriesSeen]], rules: dict[frozenset[str], str], asked: Sequence[Saves]
) -> list[list[SeriesSeen]]:
    """Join optimizer state that nothing joins with the weights that it is of: those that have none, if there are some.
    Its save times place it."""
    lone = [group[0] for group in groups if len(group) == 1]
    for one in [one for one in lone if one.head.has_optimizer and not one.head.has_weights]:
        apart = [g for g in groups if one not in g and not any(_asked(one.name, o.name, asked) is False for o in g)]
        of_weights = [g for g in apart if any(o.head.has_weights for o in g)]
        lacking = [g for g in of_weights if not any(o.head.has_optimizer for o in g)] or of_weights
        lacking = [g for g in lacking if not kind_of_name(g[0].name)] or lacking
        if len(lacking) == 1:
            rules |= {frozenset((one.name, other.name)): NEAR_IN_TIME for other in lacking[0]}
            groups = [group for group in groups if group not in (lacking[0], [one])] + [[*lacking[0], one]]
    return groups


def _group(series: Sequence[SeriesSeen], rules: Mapping[frozenset[str], str]) -> Group:
    """Return a group with its clock: the series that count like the one with weights that was saved most often."""
    first = max(series, key=lambda one: (one.head.has_weights, bool(_numbered(one)), len(one.contents)))
    clock = {first.name}
    if _numbered(first):
        clock |= {one.name for one in series if one is not first and _numbered(one) and _count_the_same(first, one)}
    own = {
        one.name: next((rules[pair] for other in series if (pair := frozenset((one.name, other.name))) in rules), ALONE)
        for one in series
    }
    return Group(series=tuple(series), rules=own, clock=frozenset(clock))


def _numbered(series: SeriesSeen) -> bool:
    return any(content.number for content in series.contents)

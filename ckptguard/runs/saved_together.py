"""Find the moments of a run in its records, and compare them: what `find_known_good` answers for several series."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol, TypeVar

import msgspec

from ckptguard.decisions.known_good import SeriesHead, choose_series, series_head_of
from ckptguard.decisions.moments import (
    Group,
    Moment,
    MomentPart,
    Numbers,
    SeriesSeen,
    groups_of,
    is_input,
    moments_of,
)
from ckptguard.decisions.names import read_names, role_of
from ckptguard.decisions.rollback_plan import folders_of_training
from ckptguard.records.who_and_when import seconds_of
from ckptguard.runs.good_checkpoint import (
    ANY,
    SURE,
    Candidate,
    Presence,
    SavePart,
    Wanted,
    candidate_of,
    presence_of,
)
from ckptguard.runs.history import History
from ckptguard.runs.run_reader import RunReader
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.values.ids import CheckpointId, folder_of, numbers_of, training_named_in
from ckptguard.values.manifest import bytes_digest
from ckptguard.values.verdict import Outcome

P = TypeVar("P", bound=Presence)
P_co = TypeVar("P_co", bound=Presence, covariant=True)
_PUT_BACK = 8  # earlier contents of a name, one of which a rollback may have put back
# Parts that nobody samples from.
_SECOND_PART = frozenset(("d", "disc", "discriminator", "critic", "netd", "mpd", "msd", "do"))


class CandidateSource(Protocol[P_co]):
    """What `best_moments` reads: records through a history, or through a reader that remembers them."""

    @property
    def history(self) -> History: ...
    @property
    def wanted(self) -> Wanted: ...
    def series_head(self, id: CheckpointId) -> SeriesHead | None:
        """Return what was sealed under an id, or None if it cannot be read."""

    def content(self, id: CheckpointId) -> str | None:
        """Return a digest of the bytes that were sealed under an id, or None if it cannot be read."""

    def is_wanted(self, id: CheckpointId) -> bool:
        """True if a checkpoint is of a wanted step."""

    def offer(self, id: CheckpointId) -> P_co | None:
        """Return where a checkpoint is, if it is good, else None."""


class RecordedSaves:
    """A run's records as a source of candidates."""

    def __init__(self, history: History, wanted: Wanted, *, every_copy: bool) -> None:
        self.history, self.wanted, self._every_copy = history, wanted, every_copy

    def series_head(self, id: CheckpointId) -> SeriesHead | None:
        manifest = self.history.manifest(id)
        return None if manifest is None else series_head_of(manifest)

    def content(self, id: CheckpointId) -> str | None:
        manifest = self.history.manifest(id)
        return None if manifest is None else bytes_digest(manifest.files)

    def is_wanted(self, id: CheckpointId) -> bool:
        return self.wanted.includes(id) and self.wanted.includes(id, self.history.manifest(id))

    def offer(self, id: CheckpointId) -> Candidate | None:
        return candidate_of(self.history, id, SURE if self.wanted.sure else ANY, every_copy=self._every_copy)


class RememberedSaves:
    """The same by what a reader remembers of the records. It answers for the files as they are described now."""

    wanted = msgspec.structs.replace(SURE, thinned=True)

    def __init__(self, reader: RunReader) -> None:
        self.history, self._reader = reader.history, reader

    def series_head(self, id: CheckpointId) -> SeriesHead | None:
        sealed = self._reader.sealed(id)
        return None if sealed is None else sealed.series_head

    def content(self, id: CheckpointId) -> str | None:
        sealed = self._reader.sealed(id)
        return None if sealed is None else sealed.content

    def is_wanted(self, id: CheckpointId) -> bool:
        return True

    def offer(self, id: CheckpointId) -> Presence | None:
        verdict = self._reader.judged(id, files=True) if self.history.was_good(id) else None
        sealed = self._reader.sealed(id, files=True) if verdict and sealed_outcome(verdict) is Outcome.GOOD else None
        if verdict is None or sealed is None:
            return None
        path_of = self._reader.sealed_path
        return presence_of(self.history, id, verdict, sealed, every_copy=False, sure=True, path_of=path_of)


class RecordedContent:
    """One content on record. Its manifest is read when its time or counters are asked for.

    What a rollback put back under its name, with a new time, was saved when its bytes were: `before` are earlier
    contents of the name.
    """

    def __init__(
        self, source: CandidateSource[Presence], id: CheckpointId, number: Numbers, before: Sequence[CheckpointId] = ()
    ) -> None:
        self._source, self.id, self.number, self._before = source, id, number, before
        self.was_good = source.history.was_good(id) and id not in source.wanted.exclude

    @cached_property
    def series_head(self) -> SeriesHead | None:
        """What was sealed, or None if that cannot be read."""
        return self._source.series_head(self.id)

    @cached_property
    def saved_at(self) -> int | None:
        if self.series_head is None:
            return None
        own = self._source.content(self.id) if self._before else None
        same = (id for id in self._before if own is not None and self._source.content(id) == own)
        earlier = next((stands.saved_at for id in same if (stands := self._source.series_head(id)) is not None), None)
        return self.series_head.saved_at if earlier is None else earlier

    @property
    def sealed_at(self) -> int | None:
        seconds = None if self.series_head is None else seconds_of(self.series_head.sealed_at)
        return None if seconds is None else int(seconds + 1) * 10**9  # not before: the record says whole seconds

    @property
    def counters(self) -> dict[str, int]:
        return {} if self.series_head is None else dict(self.series_head.counters)


def best_moments(source: CandidateSource[P], series: Sequence[str]) -> Iterator[P]:
    """Yield what may be gone back to, the best first. What was saved together is good only if all of it is.

    Of trainings that names distinguish (``fold1``, ``fold2``) the one that was saved last comes first. Of several
    groups of series the newest moments are compared by `choose_series`. Each answer stands for its save: its weights,
    never an optimizer alone. What a training began with and did not save is none (`is_input`).
    """
    every = []
    for seen in _trainings_in(source, series):
        groups = groups_of(seen, source.history.run.saves)
        every += [group for group in groups if len(group.series) > 1 or not is_input(group.series[0], seen)]
    heads = [(*head, own) for group in every if (head := next(own := answers(source, group), None)) is not None]
    while heads:
        chosen, why = _choose([series_head for _, series_head, _ in heads])
        best, _, own = heads.pop(chosen)
        if why:
            answer = msgspec.structs.replace(best.answer, reason=f"{best.answer.reason}; {why}")
            best = msgspec.structs.replace(best, answer=answer)
        yield best
        if (head := next(own, None)) is not None:
            heads.insert(chosen, (*head, own))


def inputs_of(source: CandidateSource[Presence]) -> list[str]:
    """Return the paths of the good weights that trainings began with, and did not save."""
    seen = [(one, own) for own in _trainings_in(source, source.history.series) for one in own]
    return [one.head.path for one, own in seen if one.ever_good and is_input(one, own)]


def _choose(heads: Sequence[SeriesHead]) -> tuple[int, str]:
    """Return the index of the best of several, and why."""
    last = training_named_in(max(heads, key=lambda head: (head.sealed_at, head.saved_at or 0)).series)
    own = [n for n, head in enumerate(heads) if training_named_in(head.series) == last]
    chosen, why = choose_series([heads[n] for n in own])
    if len(own) < len(heads):
        why = f"of several trainings {' '.join(last) or 'this one'} was saved last" + (f"; {why}" if why else "")
    return own[chosen], why


def needed_by_saves(source: CandidateSource[Presence], most: int) -> set[CheckpointId]:
    """Return every checkpoint of the newest `most` good saves of each group of series that are saved together."""
    found = (itertools.islice(answers(source, group), most) for group in joined_in(source))
    return {part.id for saves in found for answer, _ in saves for part, _ in answer.parts}


def save_of(source: CandidateSource[Presence], id: CheckpointId) -> tuple[SavePart, ...] | None:
    """Return every checkpoint of the newest save that one was saved in, its weights first, whatever their verdicts.
    Paths are those in the run.

    () if nothing is saved with it; None if others are, and no save has it, such as an optimizer without its weights.
    """
    groups = groups_in(source, source.history.series, aside=True) if len(source.history.series) > 1 else []
    group = next((one for one in groups if id.series in one.names), None)
    if group is None or len(group.series) == 1:
        return ()
    heads = {one.name: one.head for one in group.series}
    for moment in moments_of(group):
        if any(member.content.id == id for member in moment.own):
            stands = {m.content.id: source.series_head(m.content.id) for m in moment.members}
            paths = {other: one.path for other, one in stands.items() if one is not None}
            return tuple(
                _described(m, heads, paths.get(m.content.id, ""), "") for m in _weights_then_others(moment, heads)
            )
    return None


def joined_in(source: CandidateSource[Presence]) -> list[Group]:
    """Return the groups of several series that are saved together, of all trainings of a run."""
    if len(source.history.series) < 2:
        return []
    return [group for group in groups_in(source, source.history.series) if len(group.series) > 1]


def newest_on_record(source: CandidateSource[Presence], group: Group) -> tuple[CheckpointId, ...]:
    """Return the members of the newest wanted save of a group that is good on record, its weights first; () if there is
    none. They may be gone."""
    heads = {one.name: one.head for one in group.series}
    lacking: tuple[CheckpointId, ...] = ()
    for moment in moments_of(group):
        ids = tuple(member.content.id for member in _weights_then_others(moment, heads))
        if not moment.was_good or not all(map(source.history.is_good, ids)) or not source.is_wanted(ids[0]):
            continue
        if not moment.lacks:
            return ids
        lacking = lacking or ids
    return lacking


def whole_saves(source: CandidateSource[Presence]) -> list[frozenset[CheckpointId]]:
    """Return the checkpoints of each save of several, whatever their verdicts are."""
    groups = groups_in(source, source.history.series) if len(source.history.series) > 1 else []
    found = (moment.own for group in groups if len(group.series) > 1 for moment in moments_of(group))
    return [frozenset(member.content.id for member in own) for own in found if len(own) > 1]


def groups_in(source: CandidateSource[Presence], series: Iterable[str], *, aside: bool = False) -> list[Group]:
    """Return the groups of series that are saved together, of all trainings of a run; see `series_seen`."""
    saves = source.history.run.saves
    return [group for seen in _trainings_in(source, series, aside) for group in groups_of(seen, saves)]


def _trainings_in(
    source: CandidateSource[Presence], series: Iterable[str], aside: bool = False
) -> Iterator[list[SeriesSeen]]:
    """Yield the series of each training of a run."""
    known, wanted = source.history.series, dict.fromkeys(series)
    while wanted:
        folders = folders_of_training(folder_of(next(iter(wanted))), known)
        own = [name for name in wanted if folder_of(name) in folders]
        yield [seen for name in own if (seen := series_seen(source, name, aside=aside)) is not None]
        wanted = {name: None for name in wanted if name not in own}


def series_seen(source: CandidateSource[Presence], name: str, *, aside: bool = False) -> SeriesSeen | None:
    """Return a series with its contents on record, or None if nothing of it can be read. With `aside` these are all,
    else those that were not quarantined."""
    history = source.history
    ids = [
        id for step in history.steps(name) for id in sorted(step.current_verdicts, key=lambda id: id.generation)[::-1]
    ]
    left = _left_behind(source, ids)
    ids = [id for id in ids if aside or not history.is_quarantined(id) or _stands_good(history, id)]
    numbers = _numbers_in(source, name, ids)
    every = [
        RecordedContent(source, id, numbers.get(id, ()), () if numbers else ids[n + 1 : n + 1 + _PUT_BACK])
        for n, id in enumerate(ids)
    ]
    contents = every if numbers else [content for content in every if content.id not in left]
    contents.sort(key=lambda content: content.number, reverse=True)  # stable: the later of equal ones first
    was_good = [content for content in contents if history.was_good(content.id)]
    head = next((c.series_head for c in (was_good or contents) if c.series_head is not None), None)
    if head is None:
        return None
    behind = [content for content in every if content.id in left] if not numbers else []
    return SeriesSeen(head=head, contents=contents, ever_good=bool(was_good), left_behind=behind)


def _left_behind(source: CandidateSource[Presence], ids: Sequence[CheckpointId]) -> set[CheckpointId]:
    """Return the contents of a fixed name that rollbacks went back from: what was quarantined, and was followed by the
    bytes of an earlier content; that one counts as put back only. `ids` are the newest first."""
    left: set[CheckpointId] = set()
    for n, (id, before) in enumerate(itertools.pairwise(ids)):
        if id in left or id.step is not None or not source.history.is_quarantined(before):
            continue
        own, earlier = source.content(id), ids[n + 1 : n + 2 + _PUT_BACK]
        same = next((k for k, old in enumerate(earlier) if own is not None and source.content(old) == own), None)
        left.update(earlier[: same + 1] if same is not None else ())
    return left


def _stands_good(history: History, id: CheckpointId) -> bool:
    current_verdict = history.current_verdict(id)
    return current_verdict is not None and current_verdict.outcome is Outcome.GOOD


def _numbers_in(
    source: CandidateSource[Presence], name: str, ids: Sequence[CheckpointId]
) -> dict[CheckpointId, Numbers]:
    """Return the numbers that count in the names of contents: as their ids say, else as their paths are read today."""
    found = {id: numbers_of(id.step) for id in ids if id.step is not None}
    if len(found) < len(ids) and "#" in name.rpartition("/")[2]:
        paths = {id: stands.path for id in ids if id.step is None and (stands := source.series_head(id)) is not None}
        if len(set(paths.values())) > 1:
            readings = read_names(paths.values())
            found |= {id: readings[path].order for id, path in paths.items()}
    return found


def answers(source: CandidateSource[P], group: Group) -> Iterator[tuple[P, SeriesHead]]:
    """Yield what may be gone back to of one group, the newest first. Moments that lack something come last."""
    if len(group.series) == 1:
        for content in group.series[0].contents:
            if content.was_good and source.is_wanted(content.id):
                found, stands = source.offer(content.id), source.series_head(content.id)
                if found is not None and stands is not None:
                    yield found, stands
        return
    lacking = []
    for moment in moments_of(group):
        found_save = _offered(source, group, moment) if moment.was_good else None
        if found_save is not None and (moment.lacks or found_save[0].answer.thinned):
            lacking.append(found_save)
        elif found_save is not None:
            yield found_save
    yield from lacking
    earlier = group.with_left_behind()
    if earlier is not None:
        yield from answers(source, earlier)


def _offered(source: CandidateSource[P], group: Group, moment: Moment) -> tuple[P, SeriesHead] | None:
    """Return a moment's weights with all of its parts, or None if not all of it is good and there."""
    heads = {one.name: one.head for one in group.series}
    members = _weights_then_others(moment, heads)
    first = members[0].content.id
    if not source.is_wanted(first):
        return None
    parts: list[tuple[P, str]] = []
    for member in members:
        found = source.offer(member.content.id)
        if found is None:
            return None
        parts.append((found, member.rule))
    stands = [s for member in moment.own if (s := source.series_head(member.content.id)) is not None]
    counters: dict[str, int] = {}
    for one in stands:
        for kind, value in one.counters.items():
            counters[kind] = max(value, counters.get(kind, value))
    answer = parts[0][0]
    places = {part.id: part.answer for part, _ in parts}
    save = tuple(
        _described(member, heads, places[member.content.id].path, places[member.content.id].place) for member in members
    )
    thinned = tuple(sorted({role for part, _ in parts for role in part.answer.thinned}))
    answer = msgspec.structs.replace(answer, answer=msgspec.structs.replace(answer.answer, save=save, thinned=thinned))
    whole = msgspec.structs.replace(
        next(s for s in stands if s.series == first.series),
        counters=counters,
        has_optimizer=any(heads[member.content.id.series].has_optimizer for member in moment.members),
        sealed_at=max(s.sealed_at for s in stands),
    )
    return msgspec.structs.replace(answer, parts=tuple(parts)), whole


def _described(member: MomentPart, heads: Mapping[str, SeriesHead], path: str, place: str) -> SavePart:
    id = member.content.id
    head = heads[id.series]
    role = "ema" if role_of(head.path) == "ema" else "model" if head.has_weights else "optimizer"
    return SavePart(
        path=path,
        series=id.series,
        step=id.step,
        id=id,
        role=role if head.has_weights or head.has_optimizer else "trainer state",
        place=place,
        rule=member.rule,
        behind=member.behind,
    )


def _weights_then_others(moment: Moment, heads: Mapping[str, SeriesHead]) -> list[MomentPart]:
    """Return the members of a moment. The first are the weights of its own save that it is named by."""
    own = [member for member in moment.own if heads[member.content.id.series].has_weights]
    first = min(own, key=lambda member: _weights_first(heads[member.content.id.series]))
    return [first, *(member for member in moment.members if member is not first)]


def _weights_first(head: SeriesHead) -> tuple[bool, bool, bool, bool, int, str]:
    """Order the parts of a save: the weights that one samples from, before averages and discriminators. What holds
    optimizer state too comes before weights alone, so a folder of all comes before what was exported of it."""
    words = set(head.series.lower().rpartition("/")[2].replace("#", " ").replace("_", " ").replace("-", " ").split())
    second = not _SECOND_PART.isdisjoint(word.partition(".")[0] for word in words)
    role = role_of(head.path)
    return role == "ema", role == "optimizer", second, not head.has_optimizer, len(head.series), head.series

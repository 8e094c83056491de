"""Which checkpoint may training go back to? Answered from the records and the presence of files, without reading
tensor bytes: whoever loads it verifies it.

`first_whole` is the one loop that takes the best one which is whole now: for restore, rollback, resume and replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from ckptguard.decisions.candidates import IN_PLACE, KEPT, Choice, Search, Skipped, places_of
from ckptguard.decisions.known_good import choose_known_good
from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, StoppedError
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.records.names_by_step import ListedSteps
from ckptguard.records.run import Run
from ckptguard.records.trash import list_trashed
from ckptguard.runs.history import History, histories_by_step, load_history
from ckptguard.runs.sealed_content import Judged, Sealed, is_good, kept_matches
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView  # it lists, and an answer from the records needs none of that

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
T = TypeVar("T")

REPLICA = "replica"


class KnownGood(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to go back to. `path` is usable as it is; `place`: "in place", "kept" or "replica"."""

    path: str
    id: CheckpointId
    kept: bool
    verified_at: str
    reason: str
    place: str = IN_PLACE

    @property
    def series(self) -> str:
        """The series that it belongs to."""
        return self.id.series

    @property
    def step(self) -> int | None:
        """The step that it was saved at."""
        return self.id.step


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a known-good checkpoint lies, and what to say of it."""

    answer: KnownGood
    in_place: bool
    copy: KeptCopy | None

    @property
    def id(self) -> CheckpointId:
        """Which checkpoint it is."""
        return self.answer.id


class Candidate(Presence, frozen=True, kw_only=True):
    """A known-good checkpoint with what is needed to use it."""

    manifest: Manifest


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which known-good ones may be taken. `before_step` is exclusive; `only`: one checkpoint and no other."""

    before_step: int | None = None
    series: str | None = None
    exclude: frozenset[CheckpointId] = frozenset()
    step: int | None = None
    only: CheckpointId | None = None


ANY = Wanted()


def find_known_good(
    run: Run, *, before_step: int | None = None, series: str | None = None, listed: ListedSteps | None = None
) -> KnownGood:
    """The newest GOOD checkpoint, not SUSPECT, that is present; `before_step` is exclusive. Without `series` the
    highest step of all series wins. NoKnownGoodError if there is none. `listed`: the names in the records, if they are
    known."""
    wanted = Wanted(before_step=before_step, series=series)
    for history in histories_by_step(run, before_step=before_step, listed=listed):
        for found in candidates_in(history, wanted, every_copy=False):
            return found.answer
    raise none_found(run, before_step)


def none_found(run: Run, before_step: int | None) -> NoKnownGoodError:
    """What to raise where there is none. What retention removed and is still in the trash is named in the hint."""
    before = f" before step {before_step}" if before_step is not None else ""
    step = _good_in_trash(run, before_step)
    hint = f"ckptguard verify {run.url} says what there is"
    if step is not None:
        hint = f"a good one is in the trash: ckptguard restore {run.url} --step {step} --to DEST"
    return NoKnownGoodError(f"{run.url} has no known-good checkpoint{before}", hint=hint)


def _good_in_trash(run: Run, before_step: int | None) -> int | None:
    """The newest good step in the trash, if that can be told."""
    with contextlib.suppress(CouldNotTellError):
        history = load_history(run)
        good = [id.step for id in list_trashed(run) if id.step is not None and is_good(history, id)]
        return max((step for step in good if before_step is None or step < before_step), default=None)
    return None


def known_good_candidates(view: RunView, wanted: Wanted = ANY) -> Iterator[Candidate]:
    """Known-good checkpoints, best first: highest step, then newest generation, each looked for when asked for.
    CouldNotTellError if that of one cannot be told."""
    return candidates_in(view.history, wanted)


def newest_candidate(view: RunView, wanted: Wanted = ANY) -> Candidate | None:
    """The best known-good checkpoint, or None."""
    return next(known_good_candidates(view, wanted), None)


def candidates_in(history: History, wanted: Wanted = ANY, *, every_copy: bool = True) -> Iterator[Candidate]:
    """The same from a history. Without `every_copy` none is looked for of what is in place."""
    found = (candidate_of(history, id, every_copy=every_copy) for id in ranked_candidates(history, wanted))
    return (candidate for candidate in found if candidate is not None)


def ranked_candidates(history: History, wanted: Wanted = ANY) -> list[CheckpointId]:
    """The ids that may be known-good by the names of the records, best first. Nothing is read."""
    series = wanted.series if wanted.only is None else wanted.only.series
    names = history.names if series is None else {series: history.names.get(series, {})}
    found = (s.id for s in choose_known_good(names, before_step=wanted.before_step, exclude=wanted.exclude))
    return [id for id in found if wanted.step in (None, id.step) and wanted.only in (None, id)]


def candidate_of(history: History, id: CheckpointId, *, every_copy: bool = True) -> Candidate | None:
    """The checkpoint, if it is good and present. CouldNotTellError if that cannot be told."""
    if not is_good(history, id):
        return None
    verdict, manifest = history.verdict(id), history.manifest(id)
    if verdict is None or manifest is None:
        return None
    found = presence_of(history, id, verdict, manifest, every_copy=every_copy)
    if found is None:
        return None
    return Candidate(answer=found.answer, manifest=manifest, in_place=found.in_place, copy=found.copy)


def presence_of(
    history: History,
    id: CheckpointId,
    verdict: Judged,
    sealed: Sealed,
    *,
    every_copy: bool = True,
    path_of: Callable[[CheckpointId], str | None] | None = None,
) -> Presence | None:
    """Where a checkpoint lies whose sealed bytes are good; None if it is gone. `path_of` as for `History.current`."""
    run = history.run
    damaged = verdict.outcome is not Outcome.GOOD
    in_place = (
        not damaged
        and history.current_if_readable(id.series, id.step, sealed.path, path_of=path_of) == id
        and all(_has_size(run, f.path, f.size) for f in sealed.files)
    )
    asked = history.may_be_kept(id) and (every_copy or not in_place)
    copy = read_kept(run, id) if asked else None
    if copy is not None and not kept_matches(run, copy, sealed):
        copy = None
    if in_place:
        path, reason = run.usable(sealed.path), f"verified {verdict.checked_at}, in place"
    elif copy is not None:
        why = "its place is damaged" if damaged else "it is no longer in place"
        path, reason = run.usable_record(copy.checkpoint_key), f"verified; {why}, this is the kept copy"
    else:
        return None
    place, at = (IN_PLACE if in_place else KEPT), verdict.checked_at
    answer = KnownGood(path=path, id=id, kept=not in_place, verified_at=at, reason=reason, place=place)
    return Presence(answer=answer, in_place=in_place, copy=copy)


def _has_size(run: Run, key: str, size: int) -> bool:
    entry = find_entry(run.storage, key)
    return entry is not None and entry.kind == "file" and entry.size == size


class Taken(msgspec.Struct, Generic[C, T], frozen=True, kw_only=True):
    """What was offered and taken, what the attempt gave, and what was tried in vain before it."""

    offered: C
    result: T
    skipped: tuple[Skipped, ...]


class Offers(Protocol[C_co]):
    """Where the checkpoints come from that `first_of` tries."""

    def best(self, refused: frozenset[CheckpointId]) -> CheckpointId | None:
        """The best checkpoint that is not refused; None if there is none left."""

    def places(self, id: CheckpointId) -> Iterable[tuple[Choice, C_co]]:
        """Where it lies now, in the order in which its places are tried. It is asked again after each that failed."""


def first_of(
    offers: Offers[C],
    attempt: Callable[[C], T | str],
    *,
    refused: frozenset[CheckpointId] = frozenset(),
    when_refused: Callable[[frozenset[CheckpointId]], None] | None = None,
    otherwise: Callable[[Search], CkptguardError],
) -> Taken[C, T]:
    """Call `attempt` with one place after the other of the best checkpoint, then of the next, until one succeeds.

    `attempt` returns its result, or a sentence that says what is wrong, or raises CouldNotTellError, after which the
    search goes on. After the last place of a checkpoint `when_refused` is called with all ids that count no more.

    Raises:
        CouldNotTellError: none succeeded, and the last that could not be read may be good.
        StoppedError: the attempt was called off.
        CkptguardError: what `otherwise` says, where none succeeded and all could be read.
    """
    search = Search(refused=refused)
    errors: dict[Choice, CouldNotTellError] = {}
    while (id := offers.best(search.refused)) is not None:
        while True:
            seen: dict[Choice, C] = {}
            choice = search.next_of(_noted(offers.places(id), seen))
            if choice is None:
                break
            try:
                result = attempt(seen[choice])
            except StoppedError:
                raise
            except CouldNotTellError as error:
                errors[choice] = error
                search = search.skip(choice, error.message, unsure=True)
            else:
                if not isinstance(result, str):
                    return Taken(offered=seen[choice], result=result, skipped=search.skipped)
                search = search.skip(choice, result)
        search = search.refuse(id)
        if when_refused is not None:
            when_refused(search.refused)
    raise errors[search.unsure.choice] if search.unsure is not None else otherwise(search)


def first_whole(
    view: RunView,
    attempt: Callable[[Candidate], T | str],
    wanted: Wanted = ANY,
    *,
    when_refused: Callable[[frozenset[CheckpointId]], None] | None = None,
) -> Taken[Candidate, T]:
    """Call `attempt` with the known-good checkpoints, best first, until one succeeds; see `first_of`.
    `candidate.in_place` tells which place to take: one with a kept copy is offered again with it false, then an older
    one. NoKnownGoodError if none succeeded."""
    return first_of(
        _OfView(view, wanted),
        attempt,
        refused=wanted.exclude,
        when_refused=when_refused,
        otherwise=lambda search: none_found(view.run, wanted.before_step),
    )


class _OfView:
    """The known-good checkpoints of a run, in place and as kept copies."""

    def __init__(self, view: RunView, wanted: Wanted) -> None:
        self._view, self._wanted = view, wanted
        self._found: Candidate | None = None  # just now, by `best`

    def best(self, refused: frozenset[CheckpointId]) -> CheckpointId | None:
        wanted = msgspec.structs.replace(self._wanted, exclude=refused)
        self._found = next(known_good_candidates(self._view, wanted), None)
        return None if self._found is None else self._found.id

    def places(self, id: CheckpointId) -> list[tuple[Choice, Candidate]]:
        found, self._found = self._found, None
        if found is None:  # it was tried, and what came of that is in the records
            self._view.refresh(id.series)
            found = candidate_of(self._view.history, id)
        if found is None:
            return []
        choices = places_of(id, in_place=found.in_place, has_copy=found.copy is not None)
        return [(choice, msgspec.structs.replace(found, in_place=choice.in_place)) for choice in choices]


def _noted(places: Iterable[tuple[Choice, C]], seen: dict[Choice, C]) -> Iterable[Choice]:
    for choice, offered in places:
        seen[choice] = offered
        yield choice

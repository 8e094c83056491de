"""Find the best checkpoint that is whole now. Restore, rollback, resume and replicas share this loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

from ckptguard.decisions.candidates import Choice, Search, Skipped, places_of
from ckptguard.decisions.known_good import KEPT
from ckptguard.errors import CkptguardError, CouldNotTellError, StoppedError
from ckptguard.records.run import Run
from ckptguard.runs.find_known_good import (
    ANY,
    Candidate,
    Presence,
    Wanted,
    candidate_of,
    known_good_candidates,
    none_found,
)
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
T = TypeVar("T")


class Taken(msgspec.Struct, Generic[C, T], frozen=True, kw_only=True):
    """The checkpoint that succeeded, the attempt's result, and the choices that failed before it."""

    offered: C
    result: T
    skipped: tuple[Skipped, ...]


class Offers(Protocol[C_co]):
    """The source of the checkpoints that `first_of` tries."""

    def best(self, refused: frozenset[CheckpointId]) -> CheckpointId | None:
        """Return the best checkpoint that is not refused, or None if none is left."""

    def places(self, id: CheckpointId) -> Iterable[tuple[Choice, C_co]]:
        """Return the current places of a checkpoint, in the order to try them. Called again after each failure."""


def first_of(
    offers: Offers[C],
    attempt: Callable[[C], T | str],
    *,
    refused: frozenset[CheckpointId] = frozenset(),
    when_refused: Callable[[frozenset[CheckpointId]], None] | None = None,
    otherwise: Callable[[Search], CkptguardError],
) -> Taken[C, T]:
    """Call `attempt` with each place of the best checkpoint, then of the next, until one succeeds.

    `attempt` returns its result, or a sentence that says what is wrong. The search also continues after it raises
    CouldNotTellError. After the last place of a checkpoint failed, `when_refused` gets the ids of all refused ones.

    Raises:
        CouldNotTellError: none succeeded, and the last one that could not be read may be good.
        StoppedError: the attempt was stopped.
        CkptguardError: the error of `otherwise`, if none succeeded and all could be read.
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

    `candidate.in_place` says which place to use. If a checkpoint in place fails, its kept copy is offered next.
    Raises NoKnownGoodError if none succeeded.
    """
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
        self._found: Candidate | None = None  # the latest result of `best`
        self._parts: tuple[tuple[Presence, str], ...] = ()

    def best(self, refused: frozenset[CheckpointId]) -> CheckpointId | None:
        wanted = msgspec.structs.replace(self._wanted, exclude=refused)
        self._found = next(known_good_candidates(self._view, wanted), None)
        self._parts = () if self._found is None else self._found.parts
        return None if self._found is None else self._found.id

    def places(self, id: CheckpointId) -> list[tuple[Choice, Candidate]]:
        found, self._found = self._found, None
        if found is None:  # an attempt failed and recorded why, so read the records again
            self._view.refresh(id.series)
            found = candidate_of(self._view.history, id)
            found = None if found is None else msgspec.structs.replace(found, parts=self._parts)
        if found is None:
            return []
        choices = places_of(id, in_place=found.in_place, has_copy=found.copy is not None)
        return [(choice, self._at(found, choice)) for choice in choices]

    def _at(self, found: Candidate, choice: Choice) -> Candidate:
        """Return the candidate at one of its places, with the answer for that place."""
        return found if choice.in_place == found.in_place or found.copy is None else at_copy(self._view.run, found)


def at_copy(run: Run, found: Candidate) -> Candidate:
    """Return a candidate that has a kept copy at that place, with the answer for it."""
    assert found.copy is not None
    path, reason = run.usable_record(found.copy.checkpoint_key), "verified; this is the kept copy"
    answer = msgspec.structs.replace(found.answer, path=path, kept=True, place=KEPT, reason=reason)
    return msgspec.structs.replace(found, answer=answer, in_place=False, changed=False)


def whole_save(run: Run, candidate: Candidate, wrong_with: Callable[[Candidate], str | None]) -> Candidate | str:
    """Return a candidate with every part of its save at a place where nothing is wrong with it, or what is wrong.

    The kept copy of another part is used if its files in place are not right.
    """
    parts: list[tuple[Presence, str]] = []
    rules = {part.id: rule for part, rule in candidate.parts}
    for part in candidate.save:
        place = candidate if part.id == candidate.id else part
        wrong = wrong_with(place)
        if wrong is not None and place is not candidate and place.in_place and place.copy is not None:
            place = at_copy(run, place)
            wrong = wrong_with(place)
        if wrong is not None:
            return wrong
        parts.append((place, rules.get(part.id, "")))
    return msgspec.structs.replace(candidate, parts=tuple(parts)) if candidate.parts else candidate


def _noted(places: Iterable[tuple[Choice, C]], seen: dict[Choice, C]) -> Iterable[Choice]:
    for choice, offered in places:
        seen[choice] = offered
        yield choice

"""Find the best checkpoint that is whole now. Restore, rollback, resume and replicas share this loop.

A checkpoint may have several places: its own path, a kept copy, a replica. All places of one checkpoint are tried
before a worse checkpoint is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from ckptguard.decisions.known_good import IN_PLACE, KEPT
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
Refused = frozenset[CheckpointId]  # every place of these failed


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one checkpoint. `source` names the replica that holds it; "" is the run itself."""

    id: CheckpointId
    place: str
    source: str = ""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that failed, and why. `unsure`: it could not be read, which says nothing about its bytes."""

    choice: Choice
    why: str
    unsure: bool = False


class Taken(msgspec.Struct, Generic[C, T], frozen=True, kw_only=True):
    """The checkpoint that succeeded, the attempt's result, and the choices that failed before it."""

    offered: C
    result: T
    skipped: tuple[Skipped, ...]


class Offers(Protocol[C_co]):
    """The source of the checkpoints that `first_of` tries."""

    def best(self, refused: Refused) -> CheckpointId | None:
        """Return the best checkpoint that is not refused, or None if none is left."""

    def places(self, id: CheckpointId) -> Iterable[tuple[Choice, C_co]]:
        """Return the current places of a checkpoint, in the order to try them. Called again after each failure, and
        read no further than to the first that was not tried."""


def first_of(
    offers: Offers[C],
    attempt: Callable[[C], T | str],
    *,
    refused: Refused = frozenset(),
    when_refused: Callable[[Refused], None] = lambda _: None,
    otherwise: Callable[[Refused, Sequence[Skipped]], CkptguardError],
) -> Taken[C, T]:
    """Call `attempt` with each place of the best checkpoint, then of the next, until one succeeds.

    `attempt` returns its result, or a sentence that says what is wrong. The search also continues after it raises
    CouldNotTellError. After the last place of a checkpoint failed, `when_refused` gets the ids of all refused ones.

    Raises:
        CouldNotTellError: none succeeded, and the last one that could not be read may be good.
        StoppedError: the attempt was stopped.
        CkptguardError: the error of `otherwise`, if none succeeded and all could be read.
    """
    skipped: dict[Choice, Skipped] = {}
    unread: CouldNotTellError | None = None
    while (id := offers.best(refused)) is not None:
        while (found := next((one for one in offers.places(id) if one[0] not in skipped), None)) is not None:
            choice, offered = found
            try:
                result = attempt(offered)
            except StoppedError:
                raise
            except CouldNotTellError as error:
                unread = error
                skipped[choice] = Skipped(choice=choice, why=error.message, unsure=True)
                continue
            if not isinstance(result, str):
                return Taken(offered=offered, result=result, skipped=tuple(skipped.values()))
            skipped[choice] = Skipped(choice=choice, why=result)
        refused |= {id}
        when_refused(refused)
    raise unread or otherwise(refused, tuple(skipped.values()))


def first_whole(
    view: RunView,
    attempt: Callable[[Candidate], T | str],
    wanted: Wanted = ANY,
    *,
    when_refused: Callable[[Refused], None] = lambda _: None,
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
        otherwise=lambda refused, skipped: none_found(view.run, wanted.before_step),
    )


class _OfView:
    """The known-good checkpoints of a run, in place and as kept copies."""

    def __init__(self, view: RunView, wanted: Wanted) -> None:
        self._view, self._wanted = view, wanted
        self._found: Candidate | None = None  # the latest result of `best`
        self._parts: tuple[tuple[Presence, str], ...] = ()

    def best(self, refused: Refused) -> CheckpointId | None:
        wanted = msgspec.structs.replace(self._wanted, exclude=refused)
        self._found = next(known_good_candidates(self._view, wanted), None)
        self._parts = () if self._found is None else self._found.parts
        return None if self._found is None else self._found.id

    def places(self, id: CheckpointId) -> list[tuple[Choice, Candidate]]:
        found, self._found = self._found, None
        if found is None:  # an attempt failed and recorded why, so read the records again
            self._view.refresh(id.series)
            found = candidate_of(self._view.history, id)
            if found is None:
                return []
            found = msgspec.structs.replace(found, parts=self._parts)
        places = [(Choice(id=id, place=IN_PLACE), found)] if found.in_place else []
        if found.copy is not None:
            own = at_copy(self._view.run, found) if found.in_place else found
            places.append((Choice(id=id, place=KEPT), own))
        return places


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

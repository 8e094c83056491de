"""The one loop that takes the best checkpoint which is whole now: for restore, rollback, resume and replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ckptguard.decisions.candidates import Skipped, next_choice, places_of, used_up
from ckptguard.errors import CouldNotTellError
from ckptguard.runs.find_known_good import ANY, Candidate, Wanted, known_good_candidates, none_found
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId

T = TypeVar("T")


class Chosen(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The candidate that was taken, what the attempt gave, and what was tried in vain before it."""

    candidate: Candidate
    result: T
    skipped: tuple[Skipped, ...]


def first_whole(
    view: RunView,
    attempt: Callable[[Candidate], T | str],
    wanted: Wanted = ANY,
    *,
    when_refused: Callable[[frozenset[CheckpointId]], None] | None = None,
) -> Chosen[T]:
    """Call `attempt` with the known-good checkpoints, best first, until one succeeds.

    `attempt` verifies, loads or sends one candidate. It returns its result, or a sentence that says what is wrong with
    the bytes, or raises CouldNotTellError, which says nothing about them: then an older one is taken and nothing is
    recorded. `candidate.in_place` tells it which place to take; a candidate that has a kept copy too is offered again
    with `in_place` false. When both were refused, `when_refused` is called with all ids that count no more.

    Raises:
        CouldNotTellError: none succeeded, and the last that could not be read may be good.
        NoKnownGoodError: none succeeded.
    """
    skipped: list[Skipped] = []
    refused = wanted.exclude
    unsure: CouldNotTellError | None = None
    while True:
        left = msgspec.structs.replace(wanted, exclude=refused)
        candidate = next(known_good_candidates(view, left), None)
        if candidate is None:
            raise unsure if unsure is not None else none_found(view.run, wanted.before_step)
        places = places_of(candidate.id, in_place=candidate.in_place, has_copy=candidate.copy is not None)
        choice = next_choice(places, skipped)
        if choice is not None:
            offered = msgspec.structs.replace(candidate, in_place=choice.in_place)
            try:
                result = attempt(offered)
            except CouldNotTellError as error:
                unsure = error
                skipped.append(Skipped(choice=choice, why=error.message, unsure=True))
            else:
                if not isinstance(result, str):
                    return Chosen(candidate=offered, result=result, skipped=tuple(skipped))
                skipped.append(Skipped(choice=choice, why=result))
            view.refresh(candidate.id.series)
        if used_up(candidate.id, places, skipped):
            refused |= {candidate.id}
            if when_refused is not None:
                when_refused(refused)

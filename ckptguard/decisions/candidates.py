"""Which of several known-good checkpoints is tried next, and what is said when none is left. Pure.

A checkpoint may lie in two places: under its own name, and as a kept copy. Its place is tried first, then its copy,
then the next older checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ckptguard.values.ids import CheckpointId


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one checkpoint: under its own name, or its kept copy."""

    id: CheckpointId
    in_place: bool


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that was tried in vain, and why. `unsure`: it says nothing about the bytes."""

    choice: Choice
    why: str
    unsure: bool = False


def places_of(id: CheckpointId, *, in_place: bool, has_copy: bool) -> list[Choice]:
    """The places of a checkpoint in the order in which they are tried."""
    return [Choice(id=id, in_place=True)] * in_place + [Choice(id=id, in_place=False)] * has_copy


def next_choice(choices: Iterable[Choice], skipped: Sequence[Skipped]) -> Choice | None:
    """The first choice that was not tried yet, of choices in the order in which they are to be tried."""
    tried = {one.choice for one in skipped}
    return next((choice for choice in choices if choice not in tried), None)


def used_up(id: CheckpointId, choices: Iterable[Choice], skipped: Sequence[Skipped]) -> bool:
    """Whether every place of a checkpoint was tried in vain."""
    tried = {one.choice for one in skipped}
    return all(choice in tried for choice in choices if choice.id == id)


def told_by_all(skipped: Sequence[Skipped]) -> bool:
    """Whether each of those that were tried is known to be bad. Else one of them may be good, and could not be read."""
    return not any(one.unsure for one in skipped)

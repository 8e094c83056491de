"""Choose which checkpoint to try next, and report when none is left. Pure.

A checkpoint may have several places: its own path, a kept copy, a replica. All places of one checkpoint are tried
before a worse checkpoint is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptguard.decisions.known_good import IN_PLACE, KEPT
from ckptguard.values.ids import CheckpointId


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one checkpoint. `source` names the replica that holds it; "" is the run itself."""

    id: CheckpointId
    place: str
    source: str = ""

    @property
    def in_place(self) -> bool:
        """True if the checkpoint is at its own path."""
        return self.place == IN_PLACE


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that failed, and why. `unsure`: it could not be read, which says nothing about its bytes."""

    choice: Choice
    why: str
    unsure: bool = False


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a search. `refused` holds the checkpoints of which every place failed."""

    refused: frozenset[CheckpointId] = frozenset()
    skipped: tuple[Skipped, ...] = ()

    def next_of(self, choices: Iterable[Choice]) -> Choice | None:
        """Return the first choice that was not tried yet. Later choices are not generated."""
        tried = {one.choice for one in self.skipped}
        return next((choice for choice in choices if choice not in tried), None)

    def skip(self, choice: Choice, why: str, *, unsure: bool = False) -> Search:
        """Return the search after this choice failed."""
        one = Skipped(choice=choice, why=why, unsure=unsure)
        return msgspec.structs.replace(self, skipped=(*self.skipped, one))

    def refuse(self, id: CheckpointId) -> Search:
        """Return the search after every place of a checkpoint failed."""
        return msgspec.structs.replace(self, refused=self.refused | {id})

    @property
    def unsure(self) -> Skipped | None:
        """The last choice that could not be read. While there is one, do not report that nothing good is left."""
        return next((one for one in reversed(self.skipped) if one.unsure), None)


def places_of(id: CheckpointId, *, in_place: bool, has_copy: bool) -> list[Choice]:
    """Return the places of a checkpoint in its run, in the order to try them."""
    return [Choice(id=id, place=IN_PLACE)] * in_place + [Choice(id=id, place=KEPT)] * has_copy

"""Which of several checkpoints is tried next, and what is said when none is left. Pure.

A checkpoint may lie in several places: under its own name, as a kept copy, in a replica. Each of its places is tried,
in their order, before a checkpoint that is not as good.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptguard.values.ids import CheckpointId

IN_PLACE, KEPT = "in place", "kept"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one checkpoint. `source` names the replica that it lies in; "" is the run itself."""

    id: CheckpointId
    place: str
    source: str = ""

    @property
    def in_place(self) -> bool:
        """True if it lies under its own name."""
        return self.place == IN_PLACE


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that was tried in vain, and why. `unsure`: it could not be read, which says nothing about its bytes."""

    choice: Choice
    why: str
    unsure: bool = False


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried so far. `refused` are the checkpoints that count no more: no place of theirs is left to try."""

    refused: frozenset[CheckpointId] = frozenset()
    skipped: tuple[Skipped, ...] = ()

    def next_of(self, choices: Iterable[Choice]) -> Choice | None:
        """The first choice that was not tried yet. Choices after it are not asked for."""
        tried = {one.choice for one in self.skipped}
        return next((choice for choice in choices if choice not in tried), None)

    def skip(self, choice: Choice, why: str, *, unsure: bool = False) -> Search:
        """The search after this choice was tried in vain."""
        one = Skipped(choice=choice, why=why, unsure=unsure)
        return msgspec.structs.replace(self, skipped=(*self.skipped, one))

    def refuse(self, id: CheckpointId) -> Search:
        """The search after every place of a checkpoint was tried in vain."""
        return msgspec.structs.replace(self, refused=self.refused | {id})

    @property
    def unsure(self) -> Skipped | None:
        """The last choice that could not be read. If there is one, nobody may say that nothing good is left."""
        return next((one for one in reversed(self.skipped) if one.unsure), None)


def places_of(id: CheckpointId, *, in_place: bool, has_copy: bool) -> list[Choice]:
    """The places of a checkpoint in its run, in the order in which they are tried."""
    return [Choice(id=id, place=IN_PLACE)] * in_place + [Choice(id=id, place=KEPT)] * has_copy

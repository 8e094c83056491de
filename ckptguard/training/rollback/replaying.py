"""A replay after an incident: training makes the same updates again, and then tells what that shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.replay import (
    CANNOT_TELL,
    DETERMINISTIC,
    Comparison,
    compare,
    diagnose,
    is_one_of_two,
    two_curves,
)
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.records.who_and_when import this_host
from ckptguard.training.ranks import Ranks
from ckptguard.training.signals.incident_evidence import tried
from ckptguard.training.state.data_position import Draw
from ckptguard.values.curve import Row
from ckptguard.values.incident import Batch, Replay, ReplayedUpdate

_MOST_BATCHES = 16


class Replaying:
    """The updates from `began` up to the one at which `first` was noticed are made again. `then` are their numbers of
    the first time, `draws` their batches."""

    def __init__(self, first: Diagnosis, then: Sequence[Row], draws: Mapping[int, Draw], *, began: int) -> None:
        self.first, self.began = first, began
        self._then, self._draws = then, draws

    def looks(self, step: int) -> bool:
        """True if the tensors must be read after this update: at the end, and where that shows which of two updates
        did the harm."""
        return step >= self.first.step or (is_one_of_two(self.first) and step == self.first.onset_step)

    def ended(
        self, now: Sequence[Row], again: Diagnosis | None, *, ranks: Ranks, gaps: tuple[str, ...], model: Any
    ) -> Replay:
        """Return what it shows, the same on all ranks, which all call this. `now` are the numbers of this time."""
        own = compare(self._then, now, self.first, began=self.began)
        device = tried(lambda: _device(model), "")
        own = msgspec.structs.replace(own, gaps=gaps, host=this_host()[0], device=device)
        sides = [msgspec.convert(side, Comparison) for side in ranks.gather(msgspec.to_builtins(own))]
        shown = diagnose(self.first, again, sides, began=self.began)
        shows = ranks.rank == (shown.rank or 0)
        curves = two_curves(self._then, now, shown, self.first) if shows else ()
        updates = ranks.gather(msgspec.to_builtins(curves))[shown.rank or 0]
        return msgspec.structs.replace(
            shown,
            batches=self._batches(again) if shown.outcome == DETERMINISTIC and again is not None else (),
            updates=msgspec.convert(updates, tuple[ReplayedUpdate, ...]),
        )

    def _batches(self, again: Diagnosis) -> tuple[Batch, ...]:
        """Return the batches that may have done the harm."""
        first = again.onset_step if again.onset_step is not None else again.step
        last = again.suspect_through if again.suspect_through is not None else again.step
        harmful = {update: draw for update, draw in self._draws.items() if first <= update <= last}
        found = (Batch(update=update, epoch=epoch, index=index) for update, (epoch, index) in harmful.items())
        return tuple(found)[:_MOST_BATCHES]

    def left(self, step: int, why: str) -> Replay:
        """Return that it shows nothing, because it was left at a step."""
        return Replay(outcome=CANNOT_TELL, reason=why, began=self.began, through=max(step, self.began))


def may_replay(policy: RollbackPolicy, missing: Sequence[str], ranks: Ranks) -> bool | None:
    """Whether a replay comes before batches are skipped, the same on all ranks. None: only if an earlier one was equal
    bit for bit."""
    own: bool | None = False
    if policy.skip and policy.first == "replay":
        own = True
    elif policy.skip and policy.first is None and not missing:
        own = True if _is_deterministic() else None
    answers = ranks.gather(own)
    return False if False in answers else None if None in answers else True


def _is_deterministic() -> bool:
    import torch

    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _device(model: Any) -> str:
    import torch

    device = next(iter(model.parameters())).device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)

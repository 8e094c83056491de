"""The parts of an incident's report: values only. The incident itself is in `records/incidents.py`.

A number that is not finite is a word ("nan", "inf", "-inf"). Everything is optional, because an incident that was seen
from outside training has fewer facts than a guard's.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

Number = float | str | None
WORDS = ("nan", "inf", "-inf")
MOST_REPLAYED = 64  # updates of a replay in a record


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The signals of one update. `scale` is the loss scale after it."""

    step: int
    loss: Number = None
    grad_norm: Number = None
    scale: Number = None
    lr: Number = None


class Training(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How training computes. `dtypes`: elements of trained parameters by dtype. `autocast`: a dtype or "off".

    `loss_scaler` is its class, or "none". `scaler_not_given` is the class of one that the guard was not given, but that
    works in the process. `framework`: "plain", "trainer", "lightning", "deepspeed" or "accelerate".
    """

    dtypes: dict[str, int] = {}
    autocast: str | None = None
    loss_scaler: str | None = None
    scaler_not_given: str | None = None
    device: str | None = None
    hardware_bf16: bool | None = None
    optimizer: str | None = None
    eps: float | None = None
    lr: float | None = None
    weight_decay: float | None = None
    scheduler: str | None = None
    world_size: int | None = None
    framework: str | None = None
    versions: dict[str, str] = {}


class Resumed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What training began from. `anew`: parts that were not loaded (optimizer, scheduler, scaler, rng, data)."""

    step: int
    id: str | None = None
    path: str | None = None
    world_size: int | None = None
    anew: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class SickTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor with numbers that are not finite, or a file that is wrong in another way. `what` describes it.

    `kind`: weight, buffer, gradient, optimizer, tensor (its role is unknown) or file.
    """

    name: str
    kind: str
    dtype: str | None = None
    nan: int | None = None
    inf: int | None = None
    elements: int | None = None
    what: str | None = None


class Magnitude(msgspec.Struct, frozen=True, array_like=True):
    """The largest finite magnitude in a tensor."""

    tensor: str
    largest: float
    dtype: str | None = None


class ChangedTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor of the first bad checkpoint that differs from the last good one. `change` is a word of `diff`.

    `relative_l2` is the norm of the change divided by that of the tensor. `largest` is the largest magnitude before it.
    """

    name: str
    role: str
    change: str
    dtype: str | None = None
    elements: int | None = None
    became_nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
    relative_l2: Number = None
    largest_change: Number = None
    largest: float | None = None
    note: str | None = None


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts about a checkpoint that matter here. `largest`: tensors of the model, largest magnitude first.

    `errors`: checks that found it wrong, with their messages.
    """

    path: str
    step: int | None
    id: str | None
    outcome: str
    largest: tuple[Magnitude, ...] = ()
    holds: tuple[str, ...] = ()  # roles: model, optimizer, scheduler, scaler, rng, data
    world_size: int | None = None
    errors: tuple[tuple[str, str], ...] = ()


class LikelyCause(msgspec.Struct, frozen=True, kw_only=True):
    """What may have caused it, on what evidence, and what to do about it. `weight` (0 to 1) is only for the order."""

    name: str
    title: str
    confidence: str  # "likely" | "possible"
    weight: float
    because: tuple[str, ...]
    advice: tuple[str, ...]


class ReplayedUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The numbers of an update that was made twice."""

    step: int
    loss: Number = None
    grad_norm: Number = None
    loss_again: Number = None
    grad_norm_again: Number = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Which batch an update was made with: the `index`-th of an epoch of the loader, both counted from 0."""

    update: int
    epoch: int
    index: int


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What it showed to make the same updates again, from the checkpoint of update `began` through update `through`.

    `outcome`: deterministic, not_reproducible, differs or cannot_tell. `equal` updates before the onset were compared,
    the first one being `equal_since`. The first difference is in `signal` of update `differs`: `then` and `now`. `rank`
    is the one whose numbers differed first, where that is certain. `batches` and `tensor`: the batches that made
    training sick twice, and the first tensor that was not finite.
    """

    outcome: str
    reason: str
    began: int
    through: int
    equal: int = 0
    equal_since: int | None = None
    differs: int | None = None
    signal: str | None = None
    then: Number = None
    now: Number = None
    rank: int | None = None
    host: str | None = None
    device: str | None = None
    batches: tuple[Batch, ...] = ()
    tensor: str | None = None
    updates: tuple[ReplayedUpdate, ...] = ()

    @property
    def in_words(self) -> str:
        """What it showed, in one sentence."""
        where = ", ".join(filter(None, (self.host, self.device)))
        who = f" (rank {self.rank}: {where})" if self.rank is not None and where else ""
        name = self.outcome.replace("_", " ")
        return f"updates {self.began + 1} to {self.through} were made again: {name}{who}: {self.reason}"


class Details(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The evidence of an incident, and what was concluded from it. `onset`: the first update under suspicion; with
    `onset_through` the harm was done by any update from `onset` to that one: nothing shows by which. `tensors`: what
    was not finite. `changes`: what sets the first bad checkpoint apart from the last good one, at the top what became
    non-finite, then what changed most."""

    onset: int | None = None
    onset_through: int | None = None
    samples: tuple[Sample, ...] = ()
    training: Training | None = None
    resumed: Resumed | None = None
    tensors: tuple[SickTensor, ...] = ()
    tensors_omitted: int = 0
    tensors_from: str | None = None  # "memory" or the checkpoint's path
    last_good: CheckpointFacts | None = None
    first_bad: CheckpointFacts | None = None
    changes: tuple[ChangedTensor, ...] = ()
    changes_omitted: int = 0
    changes_note: str | None = None  # why the two could not be compared, or only in part
    causes: tuple[LikelyCause, ...] = ()
    replay: Replay | None = None


class IncidentReport(msgspec.Struct, frozen=True, kw_only=True):
    """An incident with everything known about it: the fields of its record, then `details`."""

    run: str
    id: str
    opened_at: str
    step: int | None
    cause: str
    reason: str
    state: str
    source: str
    actions: tuple[str, ...]
    known_good: str | None
    evidence: dict[str, Any]
    details: Details

    @property
    def onset(self) -> int | None:
        """The first suspect update, or the incident's step if no other is known."""
        return self.details.onset if self.details.onset is not None else self.step

    @property
    def onset_last(self) -> int | None:
        """The update at which it had begun at the latest."""
        through = self.details.onset_through
        return through if through is not None else self.onset


def worded(value: float | None) -> Number:
    """Return a number in the form for records."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def number(value: Number) -> float | None:
    """Return the number that a record holds, or None if it is not a number."""
    if isinstance(value, str):
        return float(value) if value in WORDS else None
    return None if value is None else float(value)

"""The progress of training: updates, data position and learning rate, saved and restored.

After a resume it also compares what was saved with what exists now.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from ckptguard.decisions.rollback_policy import RateCut, RollbackPolicy
from ckptguard.errors import StateError
from ckptguard.training.content.training_parts import TrainingParts, rates_to_start_from, scale_learning_rate
from ckptguard.training.signals.device_signals import raise_loss_scale
from ckptguard.training.signals.incident_evidence import learning_rate, tried
from ckptguard.training.state.data_position import DataPosition, Draw
from ckptguard.training.state.rng import capture_rng, generator_tensor, restore_rng
from ckptguard.values.ids import MAX_STEP
from ckptguard.values.incident import Resumed
from ckptguard.values.own_log import log as _log

_REMEMBERED_DRAWS = 10_000
_NAMED = 3  # of the names that do not fit
_MOST_NAMES = 100  # of the same, in a record


class Progress:
    """`step`: completed updates. `now`: the update in progress. `observed`: the last one reported by the caller.

    `resumed` and `gaps` say what the last load lacks for an exact resume. `gaps` is empty if training continues as if
    it had never stopped.
    """

    def __init__(self, parts: TrainingParts, world_size: int = 1) -> None:
        self._parts, self._world_size = parts, world_size
        self.step = 0
        self.now: int | None = None
        self.observed: int | None = None
        self.cut = RateCut()
        self.position: DataPosition | None = None
        self._waiting: dict[str, Any] | None = None  # loaded before the loader was known
        self._draws: dict[int, Draw] = {}
        self.resumed = Resumed(step=0)
        self.gaps: tuple[str, ...] = ()

    @property
    def current(self) -> int:
        """The update in progress, else the last completed one."""
        return self.now if self.now is not None else self.step

    @property
    def missing(self) -> tuple[str, ...]:
        """Why training continues differently than without the interruption."""
        inexact = self.position.inexact if self.position is not None else None
        return self.gaps + ((inexact,) if inexact is not None else ())

    def use_loader(self, loader: Any) -> None:
        """Draw from this loader from now on."""
        if self.position is None or self.position.loader is not loader:
            self.position = DataPosition(loader)

    def begin(self) -> None:
        """Restore the data position, if it was loaded before the loader was known."""
        if self._waiting is not None and self.position is not None:
            self._put_back(self.position, self._waiting)

    def next_batch(self) -> Any:
        """Draw the next update's batch."""
        assert self.position is not None
        batch, draw = self.position.draw()
        self.now = self.step + 1
        self._draws[self.now] = draw
        if len(self._draws) > _REMEMBERED_DRAWS:
            del self._draws[min(self._draws)]
        return batch

    def made(self) -> int:
        """Complete the update. Returns its number."""
        assert self.now is not None
        self.step, self.now = self.now, None
        return self.step

    def leave(self) -> None:
        """End the loop. An update in progress counts if it was observed."""
        if self.now is not None and self.observed == self.now:
            self.step = self.now
        self.now = None

    def draws(self, first: int, last: int) -> dict[int, Draw]:
        """Return the draws of some updates, as far as they are known."""
        return {step: draw for step, draw in self._draws.items() if first <= step <= last}

    def skip(self, draws: Iterable[Draw]) -> None:
        """Skip these draws from now on."""
        if self.position is not None:
            self.position.skipped |= set(draws)

    def extra(self) -> dict[str, Any]:
        """Return what is saved beside model and optimizer."""
        return {
            "rng": capture_rng(),
            "data": self.position.state() if self.position is not None else None,
            "guard": as_saved(self.cut),
            "saved": {"parts": _names(self._parts), "world_size": self._world_size},
        }

    def arrive(
        self, step: int, extra: dict[str, Any], *, cut: RateCut | None = None, lowest_scale: float | None = None
    ) -> None:
        """Take over what was loaded: rates, data, and the random numbers last. `cut` replaces the saved one.

        A collapsed loss scale is raised to `lowest_scale`. Raises StateError for anything that no guard saved.
        """
        why = wrong_with(extra)
        if why is not None:
            raise StateError(f"what was saved beside step {step} cannot be restored: {why}")
        self.step = step
        self._parts.drop_gradients()
        self.resumed, self.gaps = _gaps(self._parts, extra, self._world_size, step)
        saved = cut_of(extra.get("guard", {}), step)
        self.cut = adjust(self._parts, saved if cut is None else cut, saved=saved, lowest_scale=lowest_scale)
        self._draws = {n: draw for n, draw in self._draws.items() if n <= step}
        if self.position is None:
            self._waiting = extra
        else:
            self._put_back(self.position, extra)

    def change_cut(self, cut: RateCut, *, lowest_scale: float | None) -> None:
        """Change the learning rates from the cut that they have to another one."""
        self.cut = adjust(self._parts, cut, saved=self.cut, lowest_scale=lowest_scale)

    def end_cut(self, policy: RollbackPolicy, step: int) -> None:
        """Give the learning rate back if enough healthy updates were made through this one."""
        self.cut = cut_after(self._parts, self.cut, policy, step)

    def _put_back(self, position: DataPosition, extra: dict[str, Any]) -> None:
        self._waiting = None
        if extra.get("data") is not None:
            position.restore(extra["data"])
        else:
            position.restart_epoch()
        if "rng" in extra:
            restore_rng(extra["rng"])


def cut_of(saved: Mapping[str, Any], step: int) -> RateCut:
    """Return how the learning rate was cut when `as_saved` was written. Release 0.1 did not write since when: then it
    counts from the `step` that is loaded."""
    since = saved.get("lr_cut_at")
    return RateCut(factor=float(saved.get("lr_factor", 1.0)), since=step if since is None else int(since))


def as_saved(cut: RateCut) -> dict[str, float]:
    """Return what a checkpoint holds of it."""
    return {"lr_factor": cut.factor} if cut.factor == 1.0 else {"lr_factor": cut.factor, "lr_cut_at": cut.since}


def cut_after(parts: TrainingParts, cut: RateCut, policy: RollbackPolicy, step: int) -> RateCut:
    """Return the cut after an update. If it is over, the learning rate is back. Rates that something else set since
    are never raised."""
    if cut.factor == 1.0 or policy.lr_back is None:
        return cut
    now = tried(lambda: rates_to_start_from(parts.optimizer, parts.scheduler), cut.left)
    if cut.left is not None and now is not None and _differ(now, cut.left):
        _log.warning("the learning rate is as something else set it: the cut by x %g ends, without a raise", cut.factor)
        return RateCut()
    if not cut.is_over(policy, step):
        return cut
    return adjust(parts, RateCut(), saved=cut, lowest_scale=None)


def _differ(now: tuple[object, ...], left: tuple[object, ...]) -> bool:
    """True if a rate is another one; a tensor counts by being another one, because reading it would wait."""
    pairs = zip(now, left, strict=False)
    return len(now) != len(left) or any(a is not b and not (_is_plain(a) and _is_plain(b) and a == b) for a, b in pairs)


def _is_plain(rate: object) -> bool:
    return isinstance(rate, int | float)


def adjust(parts: TrainingParts, cut: RateCut, *, saved: RateCut, lowest_scale: float | None) -> RateCut:
    """Cut the learning rates, which are cut as was saved, and say so. Raise a collapsed loss scale to `lowest_scale`,
    if it is given. Return the cut, with the rates that it left."""
    before = learning_rate(parts.optimizer)
    scale_learning_rate(parts.optimizer, parts.scheduler, cut.factor / saved.factor)
    now = learning_rate(parts.optimizer)
    change = f" from {before:g} to {now:g}" if before is not None and now is not None and before != now else ""
    if cut.factor < saved.factor:
        why = "it is x %g after incidents that came close together"
        _log.warning(f"the learning rate is cut%s: {why}", change, cut.factor)
    elif cut.factor > saved.factor:
        _log.warning("the learning rate is back%s: no incident came since step %d", change, saved.since)
    if lowest_scale is not None:
        raise_loss_scale(parts.scaler, lowest_scale)
    return replace(cut, left=tried(lambda: rates_to_start_from(parts.optimizer, parts.scheduler), None))


def _gaps(parts: TrainingParts, extra: dict[str, Any], world_size: int, step: int) -> tuple[Resumed, tuple[str, ...]]:
    """Return what a resume from a save with this `extra` lacks: for a report, and in sentences. Facts that an older
    save does not have are ignored."""
    about = extra.get("saved")
    about = about if isinstance(about, dict) else {}
    given, saved, size = _names(parts), about.get("parts"), about.get("world_size")
    anew, sentences = [], []
    for names, own, other in ((parts.missing, "model", "checkpoint"), (parts.unexpected, "checkpoint", "model")):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            are = "is" if len(names) == 1 else "are"
            sentences.append(f"{', '.join(names[:_NAMED])}{more} of the {own} {are} not in the {other}")
    anew += [n for n in given if n in parts.restarted or (isinstance(saved, list) and n not in saved)]
    sentences += [f"the checkpoint holds no state of the {name}" for name in anew]
    if isinstance(saved, list):
        sentences += [f"the checkpoint holds a {n}, but the guard was given none" for n in saved if n not in given]
    if "rng" not in extra:
        anew.append("rng")
        sentences.append("the checkpoint does not hold the states of the random number generators")
    if extra.get("data") is None:
        anew.append("data")
        sentences.append("the checkpoint does not hold the position in the data")
    size = size if isinstance(size, int) else None
    if size not in (None, world_size):
        sentences.append(f"it was saved by {size} ranks, but there are {world_size} now")
    missing, unexpected = parts.missing[:_MOST_NAMES], parts.unexpected[:_MOST_NAMES]
    return Resumed(step=step, world_size=size, anew=tuple(anew), missing=missing, unexpected=unexpected), tuple(
        sentences
    )


def _names(parts: TrainingParts) -> list[str]:
    return [name for name in ("optimizer", "scheduler", "scaler") if getattr(parts, name) is not None]


class _SavedGuard(msgspec.Struct):
    lr_factor: Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)] = 1.0
    lr_cut_at: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)] | None = None


class _EpochStart(msgspec.Struct):
    generators: list[bytes]
    rng: Any = None


class _SavedData(msgspec.Struct):
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    taken: Annotated[int, msgspec.Meta(ge=0)]
    begun: bool
    skipped: list[tuple[int, int]]
    length: Any
    epoch_start: _EpochStart
    loader: Any = None

    def __post_init__(self) -> None:
        if self.begun and self.loader is None and (wrong := _wrong_rng(self.epoch_start.rng)) is not None:
            raise ValueError(f"its epoch began with what {wrong}")


def wrong_with(extra: Any) -> str | None:
    """Return why what was saved beside model and optimizer cannot be restored, or None. Right bytes may still be wrong
    state. What an older version did not save is not required."""
    if not isinstance(extra, dict):
        return f"it is a {type(extra).__name__}"
    if extra.get("rng") is not None and (wrong := _wrong_rng(extra["rng"])) is not None:
        return f"its rng {wrong}"
    for name, form in (("guard", _SavedGuard), ("data", _SavedData)):
        if extra.get(name) is not None:
            try:
                msgspec.convert(extra[name], form, builtin_types=(bytes,))
            except msgspec.ValidationError as error:
                return f"its {name} cannot be right: {error}"
    return None


def _wrong_rng(state: Any) -> str | None:
    """Try it on generators that nothing else uses."""
    import torch

    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(generator_tensor(state["torch"]))
        if "numpy" in state:
            import numpy

            numpy.random.RandomState().set_state(state["numpy"])
    except Exception as error:
        return f"is not a state of the generators ({type(error).__name__}: {error})"
    cuda = state.get("cuda", [])
    if not isinstance(cuda, list) or not all(isinstance(text, bytes) for text in cuda):
        return "is not a state of the generators (cuda)"
    return None

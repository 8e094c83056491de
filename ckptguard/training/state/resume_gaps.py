"""Is a resumed training the one that was interrupted? Pure: what was saved against what is there now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.values.incident import Resumed

_NAMED = 3  # of the names that do not fit
_MOST_NAMES = 100  # of the same, in a record


@dataclass(frozen=True, kw_only=True)
class ResumeGaps:
    """What a resume lacks. `anew`: parts that begin anew; `missing` and `unexpected`: names of the model's state that
    only one side has; `world_size`: of the save, if it is known; `sentences` say everything for people, and are empty
    if training goes on as if nothing had happened."""

    anew: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    world_size: int | None = None
    sentences: tuple[str, ...] = ()

    def resumed(self, step: int, *, id: str, path: str) -> Resumed:
        """What training goes on from, for the report of an incident that comes later."""
        return Resumed(
            step=step,
            id=id,
            path=path,
            world_size=self.world_size,
            anew=self.anew,
            missing=self.missing[:_MOST_NAMES],
            unexpected=self.unexpected[:_MOST_NAMES],
        )


def saved_for_resume(parts: TrainingParts, world_size: int) -> dict[str, object]:
    """What a save says about itself, so that a resume can tell what is missing."""
    return {"parts": _names(parts), "world_size": world_size}


def gap(parts: TrainingParts, extra: dict[str, Any], world_size: int) -> ResumeGaps:
    """What a resume from a save with this `extra` lacks. What an older save does not say is not held against it."""
    about = extra.get("saved")
    about = about if isinstance(about, dict) else {}
    given, saved, size = _names(parts), about.get("parts"), about.get("world_size")
    fit = parts.fit
    anew, sentences = [], []
    if fit.missing:
        sentences.append(f"{_some(fit.missing)} of the model {_are(fit.missing)} not in the checkpoint")
    if fit.unexpected:
        sentences.append(f"{_some(fit.unexpected)} of the checkpoint {_are(fit.unexpected)} not in the model")
    if isinstance(saved, list):
        anew += [name for name in given if name not in saved]
        sentences += [f"the checkpoint holds no state of the {name}" for name in anew]
        sentences += [f"the checkpoint holds a {n}, and the guard was given none" for n in saved if n not in given]
    if "rng" not in extra:
        anew.append("rng")
        sentences.append("the states of the random number generators are not in it")
    if extra.get("data") is None:
        anew.append("data")
        sentences.append("the position in the data is not in it")
    known = isinstance(size, int)
    if known and size != world_size:
        sentences.append(f"it was saved by {size} ranks, and there are {world_size} now")
    return ResumeGaps(
        anew=tuple(anew),
        missing=fit.missing,
        unexpected=fit.unexpected,
        world_size=size if known else None,
        sentences=tuple(sentences),
    )


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _are(names: tuple[str, ...]) -> str:
    return "is" if len(names) == 1 else "are"


def _names(parts: TrainingParts) -> list[str]:
    return [name for name in ("optimizer", "scheduler", "scaler") if getattr(parts, name) is not None]

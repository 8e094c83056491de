"""Is a resumed training the one that was interrupted? Pure: what was saved against what is there now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptguard.training.parts import Parts


@dataclass(frozen=True, kw_only=True)
class Gap:
    """What a resume lacks. `anew`: parts that begin anew; `world_size`: of the save, if it is known; `sentences` say
    everything for people, and are empty if training goes on as if nothing had happened."""

    anew: tuple[str, ...] = ()
    world_size: int | None = None
    sentences: tuple[str, ...] = ()


def saved_for_resume(parts: Parts, world_size: int) -> dict[str, object]:
    """What a save says about itself, so that a resume can tell what is missing."""
    return {"parts": _names(parts), "world_size": world_size}


def gap(parts: Parts, extra: dict[str, Any], world_size: int) -> Gap:
    """What a resume from a save with this `extra` lacks. What an older save does not say is not held against it."""
    about = extra.get("saved")
    about = about if isinstance(about, dict) else {}
    given, saved, size = _names(parts), about.get("parts"), about.get("world_size")
    anew, sentences = [], []
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
    return Gap(anew=tuple(anew), world_size=size if known else None, sentences=tuple(sentences))


def _names(parts: Parts) -> list[str]:
    return [name for name in ("optimizer", "scheduler", "scaler") if getattr(parts, name) is not None]

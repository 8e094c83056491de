"""Rank 0 decides and finds the checkpoint. The other ranks load what it loads, and get its result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from ckptguard.decisions.rollback import RollbackDecision
from ckptguard.errors import CkptguardError, NoKnownGoodError, RanksError, RollbackExhausted
from ckptguard.training.ranks import Ranks
from ckptguard.values.ids import CheckpointId

if TYPE_CHECKING:
    from ckptguard.training.saving.stores import LedStore, Store

Done = TypeVar("Done")
_KINDS = {kind.kind: kind for kind in (NoKnownGoodError, RollbackExhausted)}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that is now loaded. `extra` is what was saved beside it (empty: unknown)."""

    step: int
    id: CheckpointId
    path: str
    extra: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """What was loaded, and why. The updates from `onset` to `last` may have done the harm."""

    loaded: Loaded
    decision: RollbackDecision
    onset: int
    last: int


def lead_or_follow(ranks: Ranks, store: Store, work: Callable[[], Done], kind: Any) -> Done:
    """Rank 0 does the work, which loads through the store. Every rank returns its result, with its own extra.

    `kind` is the result's type: Loaded, Rollback, or None.
    """
    if ranks.size == 1:
        return work()
    led = cast("LedStore", store)
    if ranks.rank != 0:
        answer, extra = led.follow()
        if "failed" in answer:
            raise _KINDS.get(answer["failed"], RanksError)(f"rank 0: {answer['message']}")
        followed: Done = _with_extra(msgspec.convert(answer["done"], kind), extra)
        return followed
    try:
        done = work()
    except Exception as error:
        message = error.message if isinstance(error, CkptguardError) else repr(error)
        with contextlib.suppress(RanksError):  # if a rank is gone, rank 0 still raises the reason
            led.finish({"failed": getattr(error, "kind", "error"), "message": message})
        raise
    # Each rank has its own extra, and that of rank 0 holds values that are not JSON.
    led.finish({"done": msgspec.to_builtins(_with_extra(done, {}))})
    return done


def _with_extra(done: Any, extra: dict[str, Any]) -> Any:
    if isinstance(done, Rollback):
        return dataclasses.replace(done, loaded=_with_extra(done.loaded, extra))
    return dataclasses.replace(done, extra=extra) if done is not None else None

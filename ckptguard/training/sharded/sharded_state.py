"""Model and optimizer as torch.distributed.checkpoint sees them: tensors by names that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptguard.errors import CkptguardError, RanksError, StateError
from ckptguard.training.content.tagged_json import decode_state
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import Ranks, together


def live_of_all(parts: TrainingParts, ranks: Ranks, what: str, *, with_optimizer: bool) -> dict[str, Any]:
    """The tensors that lie on this rank, once every rank has its own: none may wait in torch for one that has not."""
    live: list[dict[str, Any]] = []
    together(ranks, what, lambda: live.append(_live(parts, with_optimizer=with_optimizer)))
    return live[0]


def has_stepped(parts: TrainingParts, ranks: Ranks) -> bool:
    """Whether the optimizer has a state; torch would make one by stepping it, and not the one of an uninterrupted
    training."""
    return ranks.any(parts.optimizer is not None and bool(parts.optimizer.state))


def put_back(parts: TrainingParts, state: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Give everything its loaded state: tensors that were loaded into `live_of_all`, and a checkpoint's other state."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer = parts.model, parts.optimizer
    set_model_state_dict(model, live["model"], options=StateDictOptions(strict=parts.strict))
    if "optimizer" in live:
        set_optimizer_state_dict(model, optimizer, live["optimizer"])
    elif optimizer is not None:
        optimizer.load_state_dict(decode_state(state["optimizer"]))
    for name, part in (("scheduler", parts.scheduler), ("scaler", parts.scaler)):
        if part is not None:
            if name not in state:
                raise StateError(f"the checkpoint holds no state of the {name}")
            part.load_state_dict(decode_state(state[name]))


@contextmanager
def torch_failures(what: str) -> Iterator[None]:
    """RanksError for whatever torch raises: what it says, with the ranks it names, without their stacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CkptguardError:
        raise
    except (Exception, CheckpointException) as error:  # torch's own is none of the former
        failures = getattr(error, "failures", None)
        if isinstance(failures, dict) and failures:
            said = "; ".join(f"rank {rank}: {trouble[0]!r}" for rank, trouble in failures.items())
        else:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RanksError(f"{what}: {said}") from error


def _live(parts: TrainingParts, *, with_optimizer: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    live: dict[str, Any] = {"model": get_model_state_dict(parts.model)}
    if with_optimizer and parts.optimizer is not None:
        live["optimizer"] = get_optimizer_state_dict(parts.model, parts.optimizer)
    return live

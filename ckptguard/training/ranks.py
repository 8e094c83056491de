"""The ranks of one training: what one of them knows, all of them know, over a gloo group of our own.

Our own group, because the training's may be busy on a device, and a message of ours must never be taken for one of
theirs. Everything here is called by all ranks in the same order, from the thread that trains. So whether something is
called must follow from what all ranks know alike: never from a clock, a file or a number that one rank sees alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ckptguard.decisions.health import Diagnosis
from ckptguard.errors import CkptguardError, RanksError

T = TypeVar("T")
_TIMEOUT = 600.0
_log = logging.getLogger("ckptguard")


class Ranks:
    """All ranks of a training, of which this process is one; of this class itself: the only one."""

    rank = 0
    size = 1

    def any(self, mine: bool) -> bool:
        """True if any rank says so."""
        return mine

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has to say, by rank; JSON values."""
        return [mine]

    def tell(self, value: Any) -> Any:
        """What rank 0 has to say; JSON values."""
        return self.gather(value if self.rank == 0 else None)[0]


class GlooRanks(Ranks):
    """The ranks of torch's default process group. RanksError, which names them, when some do not answer in time. To be
    made by all ranks; `timeout` in seconds is how long one rank waits for the slowest: longer than a checkpoint takes
    to be verified and loaded."""

    def __init__(self, timeout: float = _TIMEOUT) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout = timeout
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self.broken = False  # whether a message was lost: what is said from then on may be taken for another

    def again(self) -> GlooRanks:
        """The same ranks in a group of its own; to be made by all ranks."""
        try:
            return GlooRanks(self._timeout)
        except RuntimeError as error:
            raise RanksError(f"rank {self.rank} of {self.size} could not meet the others: {error}") from error

    def leave(self) -> None:
        """End this rank's part in the group, which is used no more."""
        import torch.distributed as dist

        dist.destroy_process_group(self.group)

    def any(self, mine: bool) -> bool:
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(mine)], dtype=torch.int32)
        self._talk(lambda: dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group))
        return bool(flag.item())

    def gather(self, mine: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        text = json.dumps(mine).encode()
        own = torch.tensor([len(text)], dtype=torch.int64)
        sizes = [torch.zeros_like(own) for _ in range(self.size)]
        self._talk(lambda: dist.all_gather(sizes, own, group=self.group))
        longest = max(int(size.item()) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = [torch.zeros_like(padded) for _ in range(self.size)]
        self._talk(lambda: dist.all_gather(texts, padded, group=self.group))
        return [json.loads(t[: int(s.item())].numpy().tobytes()) for t, s in zip(texts, sizes, strict=True)]

    def _talk(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except (RuntimeError, ValueError) as error:
            self.broken = True
            said = re.sub(r"^\[[^]]*\] *", "", str(error)).partition("\n")[0].partition(". ")[0]
            raise RanksError(
                f"rank {self.rank} of {self.size} did not hear from the others: {said}",
                hint="see which rank ended; all must be started again",
            ) from error


def ranks_of_training(timeout: float = _TIMEOUT) -> Ranks:
    """The ranks of torch's default process group, if there is one with several; to be called by all of them."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return GlooRanks(timeout) if dist.get_world_size() > 1 else Ranks()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        _log.warning(
            "WORLD_SIZE is %s, and torch.distributed is not initialised: this process guards its run alone, and must "
            "not share it with the others; call init_process_group before",
            os.environ["WORLD_SIZE"],
        )
    return Ranks()


def together(ranks: Ranks, what: str, work: Callable[[], Any]) -> list[Any]:
    """Every rank does its part; what each returned (a JSON value), by rank. If any rank failed, all raise. A rank that
    raised a CkptguardError of its own raises that; the others RanksError, which names the ranks and their reasons."""
    own: CkptguardError | None = None
    result: Any = None
    try:
        result = work()
        json.dumps(result)  # what cannot be told fails here, where the others hear of it
    except CkptguardError as error:
        own = error
    except Exception as error:  # it must not leave the others waiting; it is raised as what it is below
        own = RanksError(f"{what}: {type(error).__name__}: {error}")
        own.__cause__ = error
    answers = ranks.gather([None, own.message] if own is not None else [result, None])
    reasons = {number: reason for number, (_, reason) in enumerate(answers) if reason is not None}
    if own is not None:
        raise own
    if reasons:
        said = "; ".join(f"rank {number}: {reason}" for number, reason in reasons.items())
        raise RanksError(f"{what} failed on {len(reasons)} of {ranks.size} ranks: {said}")
    return [answer for answer, _ in answers]


def each(ranks: Ranks, what: str, work: Callable[[], T]) -> T:
    """Every rank does its part and keeps what it returned. If any failed, all raise as in `together`; where there is
    one rank only, what it raises is raised as it is."""
    if ranks.size == 1:
        return work()
    kept: list[T] = []
    together(ranks, what, lambda: kept.append(work()))
    return kept[0]


def agree(ranks: Ranks, own: Diagnosis | None) -> Diagnosis | None:
    """The sickness of all: None if no rank is sick, else that of the earliest onset, with its rank named."""
    if ranks.size == 1 or not ranks.any(own is not None):
        return own
    reports = ranks.gather(None if own is None else msgspec.to_builtins(own, enc_hook=repr))
    sick = [(msgspec.convert(answer, Diagnosis), rank) for rank, answer in enumerate(reports) if answer is not None]
    first, rank = min(sick, key=lambda s: (s[0].surely_by, s[1]))
    return dataclasses.replace(
        first, reason=f"rank {rank}: {first.reason}", evidence={**first.evidence, "ranks": [r for _, r in sick]}
    )

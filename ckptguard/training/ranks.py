"""The ranks of one training share what they know, over a gloo group of our own.

The training's own group may be busy on a device, and our messages must not mix with its messages. All ranks call
everything here in the same order, from the training thread. So a call must depend only on what all ranks know alike,
never on a clock, a file or a number of one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ckptguard.decisions.health import Diagnosis
from ckptguard.errors import CkptguardError, NoKnownGoodError, RanksError, RollbackExhausted
from ckptguard.values.own_log import log as _log

if TYPE_CHECKING:
    from ckptguard.records.who_and_when import Owner

T = TypeVar("T")
_FOLLOWED = {kind.kind: kind for kind in (NoKnownGoodError, RollbackExhausted)}
_TIMEOUT = 600.0
_ENDING_SECONDS = 2.0  # between the end of a rank's connection and of its process


class Ranks:
    """All ranks of a training, including this process. This class itself is a single rank."""

    rank = 0
    size = 1
    group: Any = None  # torch's process group; None: torch need not ask anybody
    broken = False  # whether a message was lost: later messages could be mixed up

    def again(self) -> Ranks:
        """Return the same ranks in a new group. All ranks must call it."""
        return self

    def leave(self) -> None:
        """Leave the group, which is no longer used."""

    def any(self, mine: bool) -> bool:
        """True if it is true on any rank."""
        return mine

    def gather(self, mine: Any) -> list[Any]:
        """Return the JSON value of each rank, by rank."""
        return [mine]

    def tell(self, value: Any) -> Any:
        """Return the JSON value of rank 0."""
        return self.gather(value if self.rank == 0 else None)[0]


class GlooRanks(Ranks):
    """The ranks of torch's default process group. All ranks must create it.

    A rank waits `timeout` seconds for the slowest, so that must be longer than verifying and loading a checkpoint. If
    a rank ended, RanksError names it where that can be told.
    """

    def __init__(self, timeout: float = _TIMEOUT) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout = timeout
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self._owners: list[Owner] = []
        self._owners = self._processes()

    def again(self) -> GlooRanks:
        """Return the same ranks in a new group. All ranks must call it."""
        try:
            return GlooRanks(self._timeout)
        except RuntimeError as error:
            raise RanksError(f"rank {self.rank} of {self.size} could not connect to the others: {error}") from error

    def leave(self) -> None:
        """Leave the group, which is no longer used."""
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
            ended = self._ended()
            names = f"rank{'s' * (len(ended) > 1)} {' and '.join(map(str, ended))}"
            who = f"{names} {'have' if len(ended) > 1 else 'has'} ended ({said})" if ended else said
            first = f"see the log of {names}" if ended else "find out which rank ended"
            raise RanksError(
                f"rank {self.rank} of {self.size} got no answer from the others: {who}",
                hint=f"{first}; all must be started again",
                ended=ended,
            ) from error

    def _processes(self) -> list[Owner]:
        """Return the process of each rank."""
        from ckptguard.records.who_and_when import Owner, this_process

        answers = self.gather(msgspec.to_builtins(this_process()))
        return [msgspec.convert(answer, Owner) for answer in answers]

    def _ended(self) -> list[int]:
        """Return the ranks that ended first, if that can be told: by this machine, or by a rank on theirs.

        Each rank notes in the training's store which others it saw end, and that it lost them: a rank that ended
        because others did is not named.
        """
        from ckptguard.records.who_and_when import has_ended

        here: list[int] = []
        until = time.monotonic() + _ENDING_SECONDS
        while self._owners and not here and time.monotonic() < until:
            here = [rank for rank, owner in enumerate(self._owners) if rank != self.rank and has_ended(owner)]
            time.sleep(0.0 if here else 0.05)
        noted: list[set[int]] = []
        # A store whose host is gone may not answer.
        thread = threading.Thread(target=lambda: noted.extend(_noted_in_store(self.rank, here)), daemon=True)
        thread.start()
        thread.join(_ENDING_SECONDS)
        ended, lost = noted if len(noted) == 2 else (set(here), set())
        return sorted(ended - lost)


def _noted_in_store(own: int, ended: Sequence[int]) -> tuple[set[int], set[int]]:
    """Note which ranks this one saw end, and that it lost others. Return what all noted of both."""
    from torch.distributed import distributed_c10d

    found = []
    try:
        store: Any = distributed_c10d._get_default_store()
        for key, ranks in (("ckptguard/ended", ended), ("ckptguard/lost", [own])):
            for rank in ranks:
                store.append(key, f"{rank} ")
            found.append({int(rank) for rank in store.get(key).split()} if store.check([key]) else set())
    except Exception as error:  # of any kind of store
        _log.debug("the store of the training could not be read: %r", error)
        return set(ended), set()
    return found[0], found[1]


def ranks_of_training(timeout: float = _TIMEOUT) -> Ranks:
    """Return the ranks of torch's default process group if it has several. All of them must call it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return GlooRanks(timeout) if dist.get_world_size() > 1 else Ranks()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        _log.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialised: this process guards its run alone and must "
            "not share it with the others; call init_process_group first",
            os.environ["WORLD_SIZE"],
        )
    return Ranks()


def together(ranks: Ranks, what: str, work: Callable[[], Any]) -> list[Any]:
    """Let every rank do its part. Returns each rank's JSON value, by rank. If one fails, all raise.

    A rank whose part raised a CkptguardError raises that. The others raise RanksError, with the ranks and their
    reasons.
    """
    own: CkptguardError | None = None
    result: Any = None
    try:
        result = work()
        json.dumps(result)  # a value that is not JSON fails here, and the others are informed
    except CkptguardError as error:
        own = error
    except Exception as error:  # the others must not wait for it; below it is raised unchanged
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
    """Let every rank do its part and keep its own result. If one fails, all raise as in `together`. A single rank
    raises its error unchanged."""
    if ranks.size == 1:
        return work()
    kept: list[T] = []
    together(ranks, what, lambda: kept.append(work()))
    return kept[0]


class Led:
    """Work that rank 0 leads. In the midst of it every rank does a part, such as loading its shards.

    `parts` are the functions that do one, by name. They take JSON values. `own` is what this rank's last part returned.
    """

    def __init__(self, ranks: Ranks, **parts: Callable[..., Any]) -> None:
        self._ranks, self._parts = ranks, parts
        self.own: Any = None

    def on_all(self, part: str, *arguments: Any) -> Any:
        """Rank 0, within `lead`: have every rank do this part. Returns what rank 0's own part returns."""
        self._ranks.tell([part, *arguments])
        return self._parts[part](*arguments)

    def lead(self, work: Callable[[], Any]) -> Any:
        """Let rank 0 do the work, and the others their parts. Every rank returns the result, a JSON value.

        If it fails, all raise. Ranks other than 0 raise RanksError, NoKnownGoodError or RollbackExhausted.
        """
        if self._ranks.rank != 0:
            return self._follow()
        try:
            result = work()
        except Exception as error:
            message = error.message if isinstance(error, CkptguardError) else repr(error)
            with contextlib.suppress(RanksError):  # if a rank is gone, rank 0 still raises the reason
                self._ranks.tell(["failed", getattr(error, "kind", "error"), message])
            raise
        self._ranks.tell(["done", result])
        return result

    def _follow(self) -> Any:
        while True:
            order, *arguments = self._ranks.tell(None)
            if order == "done":
                return arguments[0]
            if order == "failed":
                kind, message = arguments
                raise _FOLLOWED.get(kind, RanksError)(f"rank 0: {message}")
            try:
                self.own = self._parts[order](*arguments)
            except CkptguardError as error:
                _log.warning("%s", error.message)  # rank 0 has it, too, and decides


def agree(ranks: Ranks, own: Diagnosis | None) -> Diagnosis | None:
    """Return the sickness of all ranks: None, or the one with the earliest onset, with its rank named."""
    if ranks.size == 1 or not ranks.any(own is not None):
        return own
    reports = ranks.gather(None if own is None else msgspec.to_builtins(own, enc_hook=repr))
    sick = [(msgspec.convert(answer, Diagnosis), rank) for rank, answer in enumerate(reports) if answer is not None]
    first, rank = min(sick, key=lambda s: (s[0].surely_by, s[1]))
    return dataclasses.replace(
        first, reason=f"rank {rank}: {first.reason}", evidence={**first.evidence, "ranks": [r for _, r in sick]}
    )

"""Ranks that are threads of one process: a collective that one of them skips is an error at once, and no hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ckptguard.training.ranks import Ranks


class LeftAlone(Exception):
    """A rank waits for another one that has ended."""


class _Meeting:
    """Where the ranks meet, round by round."""

    def __init__(self, size: int) -> None:
        self.size, self._changed = size, threading.Condition()
        self._rounds: list[dict[int, Any]] = [{}]
        self._somebody_ended = False

    def gather(self, rank: int, mine: Any) -> list[Any]:
        with self._changed:
            this = self._rounds[-1]
            this[rank] = mine
            if len(this) == self.size:
                self._rounds.append({})
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(this) == self.size or self._somebody_ended)
            if len(this) < self.size:
                raise LeftAlone(f"rank {rank} in round {len(self._rounds)}")
            return [this[number] for number in range(self.size)]

    def end(self) -> None:
        with self._changed:
            self._somebody_ended = True
            self._changed.notify_all()


class ThreadRanks(Ranks):
    """One of the ranks."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def any(self, mine: bool) -> bool:
        return any(self.gather(mine))

    def gather(self, mine: Any) -> list[Any]:
        return self._meeting.gather(self.rank, mine)


def run_threads(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `work` returned or raised on each rank."""
    meeting = _Meeting(size)
    ends: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            ends[rank] = work(ThreadRanks(rank, meeting))
        except Exception as error:
            ends[rank] = error
        finally:
            meeting.end()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends

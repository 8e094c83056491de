"""Lanes: threads in which many runs have their turns. A run has at most one lane at a time."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ckptguard.decisions.turns import LARGE, SLOW, FairShare, TurnRequest, may_read_large, next_lane_in, should_yield
from ckptguard_daemon.log import log

LONGEST_SLEEP = 10.0  # seconds; so often the lanes show that they are alive
_IDLE = 20.0  # seconds until a lane without work ends
_GAP = 0.5  # seconds between two turns of one run that is woken all the time


class Turn:
    """One turn in a lane. Only the lane's thread calls it; others may read its attributes."""

    def __init__(self, asking: TurnRequest, lanes: Lanes) -> None:
        self.asking, self._lanes = asking, lanes
        self.began = time.monotonic()
        self.read = 0  # bytes that it began to read
        self.is_reading = False

    def may_begin(self, size: int) -> bool:
        """True if it may read this number of bytes now. If not, the work ends and asks for another turn."""
        if not self._lanes.lets_begin(self, size):
            return False
        self.read += size
        self.is_reading = True
        return True


Work = Callable[[Any, Turn], float | None]


class Lanes:
    """Gives turns to all who asked for one. `work` is called with a key in a lane's thread. It returns in how many
    seconds that key has its next turn, or None if nothing is left to do until it is woken.

    Any thread may call `wake`, at any rate. `end_lane` is called in the thread of a lane that ends, and `begin_lane` in
    one that begins.
    """

    def __init__(
        self,
        name: str,
        work: Work,
        stop: threading.Event,
        *,
        storage_of: Callable[[Any], str] = lambda key: "",
        begin_lane: Callable[[], None] = lambda: None,
        end_lane: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._work, self._stop = name, work, stop
        self._storage_of, self._begin_lane, self._end_lane = storage_of, begin_lane, end_lane
        self.alive_at = time.time()  # when the thread that gives turns last did so
        self._changed = threading.Condition()
        self._number = itertools.count()
        self._heap: list[tuple[float, int, Any]] = []  # an entry counts if `_due` has the same time
        self._due: dict[Any, float] = {}
        self._last: dict[Any, float] = {}  # when a key's last turn ended, while that may delay the next one
        self._ready: dict[Any, TurnRequest] = {}  # their time has come, in this order
        self._busy: dict[Any, Turn] = {}
        self._woken: set[Any] = set()  # and had no turn since
        self._slow: set[Any] = set()
        self._idle: list[queue.SimpleQueue[Turn | None]] = []
        self._lanes = 0
        self._share = FairShare()

    def wake(self, keys: Iterable[Any]) -> None:
        """Give these a turn soon, because something changed."""
        with self._changed:
            for key in keys:
                self._woken.add(key)
                if key not in self._busy and key not in self._ready:
                    self._schedule(key, self._last.get(key, 0.0) + _GAP)
            self._changed.notify_all()

    def expects(self, key: Any) -> bool:
        """True if this one has a turn now, or was woken and has had none since."""
        with self._changed:
            return key in self._busy or key in self._woken

    def turn_of(self, key: Any) -> Turn | None:
        """Return the turn that this one has now."""
        return self._busy.get(key)

    def last_progress(self) -> float:
        """Return when turns were last given (seconds since 1970) if nobody has one now, else 0."""
        return 0.0 if self._busy else self.alive_at

    def is_waiting(self, key: Any) -> bool:
        """True if the turn of this one has come, and there is no lane for it yet."""
        return key in self._ready

    def somebody_waits(self) -> bool:
        """True if the turn of somebody has come, and there is no lane for it yet."""
        return bool(self._ready)

    def lets_begin(self, turn: Turn, size: int) -> bool:
        """True if a turn may go on with this number of bytes. Else it yields to others."""
        with self._changed:
            if self._stop.is_set():
                return False
            others = (other.asking for other in self._busy.values() if other is not turn)
            large = Counter(other.storage for other in others if other.large)
            is_large = size > LARGE
            if is_large != turn.asking.large:
                turn.asking = msgspec.structs.replace(turn.asking, large=is_large)
            if is_large and not may_read_large(large, turn.asking.storage):
                return False
            seconds = time.monotonic() - turn.began
            return not should_yield(turn.read, seconds, others_wait=bool(self._ready))

    def run(self) -> None:
        """Give turns until `stop` is set. Call `wake` after that to end it quickly. The lanes then end, too."""
        with self._changed:
            while not self._stop.is_set():
                self.alive_at = time.time()
                pause = min(self._move_due(), self._give_turns())
                self._changed.wait(min(pause, LONGEST_SLEEP))
            for idle in self._idle:
                idle.put(None)
            self._idle.clear()

    def wait_for_end(self, seconds: float) -> bool:
        """Return whether all lanes end within this time. Call it after `stop` was set."""
        with self._changed:
            return self._changed.wait_for(lambda: self._lanes == 0, seconds)

    # The rest is called with the condition held.

    def _schedule(self, key: Any, due: float) -> None:
        before = self._due.get(key)
        if before is None or due < before:
            self._due[key] = due
            heapq.heappush(self._heap, (due, next(self._number), key))

    def _move_due(self) -> float:
        """Make those ready whose time has come. Returns the seconds until that of the next one."""
        now = time.monotonic()
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due and due > now:
                return due - now
            heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self._ready[key] = TurnRequest(key=key, storage=self._storage_of(key), slow=key in self._slow)
        return LONGEST_SLEEP

    def _give_turns(self) -> float:
        """Give lanes to those who are ready. Returns the seconds until a further lane may start."""
        while self._ready:
            if not self._idle:
                now = time.monotonic()
                pause = next_lane_in([now - turn.began for turn in self._busy.values()])
                if pause is None or pause > 0:
                    return LONGEST_SLEEP if pause is None else pause
            first = self._share.choose(self._ready.values(), [turn.asking for turn in self._busy.values()])
            if first is None:
                return LONGEST_SLEEP  # until a turn ends
            if not self._idle and not self._start_lane():
                return 1.0
            del self._ready[first.key]
            self._woken.discard(first.key)
            turn = self._busy[first.key] = Turn(first, self)
            self._idle.pop().put(turn)  # the one that was idle for the shortest time, so that the others can end
        return LONGEST_SLEEP

    def _start_lane(self) -> bool:
        turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._lane, args=(turns,), name=self.name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the existing lanes do it
            log("no_lane", level="warning", reason=str(error))
            return False
        self._lanes += 1
        self._idle.append(turns)
        return True

    def _lane(self, turns: queue.SimpleQueue[Turn | None]) -> None:
        """What the thread of a lane does."""
        try:
            self._begin_lane()
            while (turn := self._next_turn(turns)) is not None:
                pause = self._stays_alive(turn)
                with self._changed:
                    self._end_turn(turn, pause)
                    if self._stop.is_set():
                        return
                    self._idle.append(turns)
                    self._changed.notify_all()
        finally:
            try:
                self._end_lane()
            finally:
                with self._changed:
                    self._lanes -= 1
                    self._changed.notify_all()

    def _next_turn(self, turns: queue.SimpleQueue[Turn | None]) -> Turn | None:
        try:
            return turns.get(timeout=_IDLE)
        except queue.Empty:
            with self._changed:
                if turns in self._idle:
                    self._idle.remove(turns)
                    return None
            return turns.get()  # it was given a turn just now

    def _stays_alive(self, turn: Turn) -> float | None:
        try:
            return self._work(turn.asking.key, turn)
        except Exception:
            log("lane_failed", level="error", trace=True, lane=self.name)
            return LONGEST_SLEEP

    def _end_turn(self, turn: Turn, pause: float | None) -> None:
        key, now = turn.asking.key, time.monotonic()
        del self._busy[key]
        self._share.charge(key, turn.read)
        (self._slow.add if now - turn.began > SLOW else self._slow.discard)(key)
        if pause is not None and pause <= 0:
            # It has yielded, and waits behind the others at once.
            large = turn.asking.large
            self._ready[key] = TurnRequest(key=key, storage=self._storage_of(key), large=large, slow=key in self._slow)
            return
        self._last[key] = now
        if key in self._woken:
            self._schedule(key, now + _GAP)
        elif pause is not None:
            self._schedule(key, now + pause)
        else:
            del self._last[key]
            self._slow.discard(key)

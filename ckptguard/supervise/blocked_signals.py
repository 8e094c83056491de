"""Signals held back and taken one by one, so that who waits for a command decides what each of them does."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Self

# What ends us, and what people tell their trainers by.
ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
_PASSED_ON = frozenset((signal.SIGUSR1, signal.SIGUSR2))
_AT_ONCE, _KEYS_IN_A_ROW = 1.0, 2.0  # seconds
_TICK = 1.0  # seconds after which a signal that reached another thread is noticed
# What Python ignores for itself, and a command must not inherit as ignored.
RESTORED = tuple(getattr(signal, name) for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ") if hasattr(signal, name))


class HeldSignals:
    """Holds back the signals that may be sent to us, from entering to leaving; `take` gives them out.

    Enter it in the main thread, before other threads start: those inherit what is held back. A signal that was ignored
    (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        self.before: set[int] = set()  # the mask of signals that a command is started with
        self._held: set[int] = set()
        self._handlers: dict[int, object] = {}
        self._caught: deque[int] = deque()

    def __enter__(self) -> Self:
        wanted = {n for n in ENDING | _PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN}
        for number in wanted:  # should a thread that is not ours get it after all
            self._handlers[number] = signal.signal(number, self._catch)
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._held = {*wanted, signal.SIGCHLD}
        self.before = set(signal.pthread_sigmask(signal.SIG_BLOCK, self._held))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            with contextlib.suppress(TypeError, ValueError):
                signal.signal(number, handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def take(self, seconds: float) -> tuple[int, bool] | None:
        """The next signal, and whether the terminal sent it (then all of its foreground processes have it); None
        after `seconds`, or sooner. SIGCHLD is one: something ended, or somebody wants us to look."""
        if self._caught:
            return self._caught.popleft(), False
        info = signal.sigtimedwait(self._held, max(0.0, min(seconds, _TICK)))
        return None if info is None else (info.si_signo, info.si_code > 0)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """For the calling thread as it was before, so that what it starts begins like that. What arrives meanwhile is
        not lost, unless it is SIGCHLD: whoever waits looks again by itself."""
        held = signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)


def means_it(asked: Sequence[float], now: float, from_terminal: bool) -> bool:
    """Whether one more word means that patience is over: of the keys of a terminal the second in a row, because to a
    debugger Ctrl-C is no end; of others any but what comes with the first (`timeout` tells us, and then our group)."""
    if from_terminal:
        return bool(asked) and now - asked[-1] < _KEYS_IN_A_ROW
    return bool(asked) and now - asked[0] > _AT_ONCE

"""Wait for a command or for another thread, and still react to signals. They are held and taken one by one, so the
waiting code decides about each."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from ckptguard.scan.process.low_priority import NICENESS
from ckptguard.supervise.command import SupervisedCommand

Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")
# Signals that end us, and signals that people send to their trainers.
ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
_PASSED_ON = frozenset((signal.SIGUSR1, signal.SIGUSR2))
_AT_ONCE, _KEYS_IN_A_ROW = 1.0, 2.0  # seconds
_TICK = 1.0  # seconds until a signal that reached another thread is noticed
_STOP_SECONDS = 2.5  # for our own work once we are asked to end, and no command runs


class HeldSignals:
    """Holds the signals that others may send to us while it is entered; `take` returns them.

    Enter it in the main thread before other threads start, because they inherit the mask. An ignored signal (``nohup``)
    stays ignored.
    """

    def __init__(self) -> None:
        self.before: set[int] = set()  # the signal mask that a command is started with
        self._held: set[int] = set()
        self._handlers: dict[int, object] = {}
        self._caught: deque[int] = deque()

    def __enter__(self) -> Self:
        wanted = {n for n in ENDING | _PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN}
        for number in wanted:  # for a signal that reaches another thread
            self._handlers[number] = signal.signal(number, lambda caught, _: self._caught.append(caught))
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._held = {*wanted, signal.SIGCHLD}
        self.before = set(signal.pthread_sigmask(signal.SIG_BLOCK, self._held))
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            with contextlib.suppress(TypeError, ValueError):
                signal.signal(number, handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def take(self, seconds: float) -> tuple[int, bool] | None:
        """Return the next signal, and whether the terminal sent it to all foreground processes. None after `seconds` at
        most.

        SIGCHLD is one of them: a process ended, or a thread wakes us.
        """
        if self._caught:
            return self._caught.popleft(), False
        info = signal.sigtimedwait(self._held, max(0.0, min(seconds, _TICK)))
        return None if info is None else (info.si_signo, info.si_code > 0)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Restore the calling thread's mask, so that what it starts inherits that.

        No signal is lost meanwhile except SIGCHLD, and waiting code checks again anyway.
        """
        held = signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def means_it(asked: Sequence[float], now: float, from_terminal: bool) -> bool:
    """True if this signal means that patience is over.

    From a terminal it is the second key in a row, because Ctrl-C does not end a debugger. Other signals count unless
    they come together with the first: `timeout` signals us, then our process group.
    """
    if from_terminal:
        return bool(asked) and now - asked[-1] < _KEYS_IN_A_ROW
    return bool(asked) and now - asked[0] > _AT_ONCE


def _yield_to_others() -> None:
    """Lower the priority of this thread, and of what it starts."""
    with contextlib.suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


class WaitAbandoned(Exception):
    """We were asked to end while no command runs, and the current work may be left at once."""


class SignalWatch:
    """Waits, and forwards our signals to the command. Call its methods in the thread that holds the signals.

    Calls that may hang run one after another in another thread, and are waited for. The process may end without it.
    """

    def __init__(self, signals: HeldSignals, command: SupervisedCommand, tell: Callable[[str], None]) -> None:
        self._signals, self._command, self._tell = signals, command, tell
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.asked: int | None = None  # the first signal that asked us to end
        self.command_runs = False  # as far as it was waited for
        self._asked_at: list[float] = []  # when we were asked to end, each time
        self._only_looking = False
        self._leave_at: float | None = None  # when our own work is left to the next supervise
        # An executor's thread would be waited for at the end of the process, however that comes.
        threading.Thread(target=self._make_calls, name="saves", daemon=True).start()

    def wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds, or for some seconds, and handle signals meanwhile."""
        end = None if seconds is None else time.monotonic() + seconds
        while not condition():
            left = 3600.0 if end is None else end - time.monotonic()
            if left <= 0:
                return
            taken = self._signals.take(left)
            if taken is not None:
                self._pass_on(*taken)

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Return the future of a call in the other thread. Its end has `wait` check its condition."""
        future: Future[Result] = Future()
        future.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGCHLD))
        self._calls.put((future, call))
        return future

    def _make_calls(self) -> None:
        _yield_to_others()
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    def beside(
        self, call: Callable[[], Result], otherwise: Otherwise, *, only_looks: bool = False
    ) -> Result | Otherwise:
        """Return the result of a call in the other thread, or `otherwise` if it fails unexpectedly.

        Raises WaitAbandoned if we are asked to end while no command runs, and the call takes longer than some seconds
        or the request is firm. `only_looks`: it changes nothing but may take as long as reading a checkpoint, so a
        request to end is enough.
        """
        future = self.submit(call)
        self._only_looking = only_looks
        try:
            self.wait(lambda: future.done() or self._may_leave())
        finally:
            self._only_looking = False
        if not future.done():
            raise WaitAbandoned
        error = future.exception()
        if error is not None:
            self._tell(f"unexpected {type(error).__name__}: {error}")
            return otherwise
        return future.result()

    def _may_leave(self) -> bool:
        """True if we were asked to end, and have worked on long enough since without a command."""
        if self.asked is None or not self._command.has_ended():
            return False
        now = time.monotonic()
        if self._leave_at is None:
            self._leave_at = now + _STOP_SECONDS
        return now >= self._leave_at

    def _pass_on(self, number: int, from_terminal: bool) -> None:
        """Forward a signal to the command, unless the terminal sent it to both. After a second request, kill it."""
        if number == signal.SIGCHLD:
            return
        running, is_firm = not self._command.has_ended(), False
        if number in ENDING:
            now = time.monotonic()
            is_firm = means_it(self._asked_at, now, from_terminal)
            self.asked = self.asked or number
            self._asked_at.append(now)
            if not running and not self.command_runs and (is_firm or self._only_looking):
                raise WaitAbandoned
        if is_firm and running:
            self._tell("killing the command")
            self._command.kill()
        elif running and not (from_terminal and self._command.shares_our_terminal()):
            self._command.send(number)

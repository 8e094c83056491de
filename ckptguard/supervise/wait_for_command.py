"""Waiting for a command, or for work in another thread, without being deaf to signals meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from ckptguard.supervise.background_thread import Background
from ckptguard.supervise.blocked_signals import ENDING, HeldSignals, means_it
from ckptguard.supervise.command import SupervisedCommand

Result = TypeVar("Result")


class WaitAbandoned(Exception):
    """We were told to end while no command runs, and what we do then may be left at once."""


class SignalWatch:
    """Waits, and passes on to the command what is sent to us. Its methods are for the thread that holds the signals
    back; what may hang is done in the one of `background`, and waited for."""

    def __init__(
        self, signals: HeldSignals, command: SupervisedCommand, background: Background, tell: Callable[[str], None]
    ) -> None:
        self._signals, self._command, self._background, self._tell = signals, command, background, tell
        self.asked: int | None = None  # the first signal by which we were told to end
        self.command_runs = False  # as far as it was waited for
        self._asked_at: list[float] = []  # when we were told to end, each time
        self._only_looking = False

    def wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds, or for some seconds, and see to signals meanwhile."""
        end = None if seconds is None else time.monotonic() + seconds
        while not condition():
            left = 3600.0 if end is None else end - time.monotonic()
            if left <= 0:
                return
            taken = self._signals.take(left)
            if taken is not None:
                self._pass_on(*taken)

    def beside(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """The result of a call in the other thread; `otherwise` if it fails unexpectedly. WaitAbandoned if we are told
        to end while no command runs, and whoever does so means it."""
        future = self._background.submit(call, wake_waiting)
        self.wait(future.done)
        error = future.exception()
        if error is not None:
            self._tell(f"unexpected {type(error).__name__}: {error}")
            return otherwise
        return future.result()

    def look_at(self, look: Callable[[], Result], otherwise: Result) -> Result:
        """The same for what changes nothing and may take as long as reading a checkpoint: the first word to end is
        enough for WaitAbandoned."""
        self._only_looking = True
        try:
            return self.beside(look, otherwise)
        finally:
            self._only_looking = False

    def _pass_on(self, number: int, from_terminal: bool) -> None:
        """The command gets what we get, but not twice what the terminal sends to both. The second time that we are
        told to end, we see to it."""
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


def wake_waiting() -> None:
    """Wake the waiting thread to check its condition."""
    os.kill(os.getpid(), signal.SIGCHLD)

"""End soon after a signal, whatever hangs: a store that does not answer, a dead mount, a hook."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

STOP_SECONDS = 4.0  # from a signal to the end; a busy machine may take the rest of 5 seconds
_SAY_SECONDS = 0.3
_LOOK = 0.5


class _Ending(NamedTuple):
    """What was asked for last, and in which process."""

    codes: Mapping[int, int]
    stop: Callable[[], None]
    wanted: Callable[[], bool] | None
    say: Callable[[], None] | None
    pid: int


_ending = _Ending({}, lambda: None, None, None, 0)


def end_in_time(
    codes: Mapping[int, int],
    stop: Callable[[], None] = lambda: None,
    *,
    wanted: Callable[[], bool] | None = None,
    say: Callable[[], None] | None = None,
) -> None:
    """Call `stop` at the first of these signals, and end the process with the signal's code STOP_SECONDS later.

    The same happens, with the first of these codes, once `wanted` is no longer true. `say` is called before the process
    is ended so. What is left undone must be made up by the next start. Call it in the main thread, and then give the
    signals a handler. Of several calls the last one counts.
    """
    global _ending
    before, _ending = _ending, _Ending(codes, stop, wanted, say, os.getpid())
    if before.pid == os.getpid():
        return  # the thread is there
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    thread = threading.Thread(target=_watch, args=(reading,), name="end", daemon=True)
    with contextlib.suppress(RuntimeError):  # no room for a thread: a signal ends the process as it does any other
        thread.start()
    atexit.register(_kill_hooks)  # an interrupted command does not wait for them


def _watch(signals: int) -> None:
    # A handler runs only once the main thread runs Python again. It may hang in a dead mount, and never does.
    code = None
    while code is None:
        arrived = select.select([signals], [], [], _LOOK)[0]
        ending = _ending
        if arrived:
            code = next((ending.codes[number] for number in os.read(signals, 512) if number in ending.codes), None)
        elif ending.wanted is not None and not ending.wanted():
            code = next(iter(ending.codes.values()))
    ending.stop()
    time.sleep(STOP_SECONDS)
    if ending.say is not None:  # where it is said to may hang, too
        saying = threading.Thread(target=ending.say, daemon=True)
        saying.start()
        saying.join(_SAY_SECONDS)
    _kill_hooks()
    os._exit(code)


def _kill_hooks() -> None:
    """Kill commands that are being told, with their children. Scanning processes end with this one by themselves."""
    channels = sys.modules.get("ckptguard.reporting.channels")  # absent until somebody is told
    if channels is not None:
        with contextlib.suppress(Exception):
            channels.kill_commands()

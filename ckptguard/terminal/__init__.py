"""What every command of ours does on a terminal: its streams, columns, words for wrong usage, and its end."""

from __future__ import annotations

import os
import signal


def end_at_once() -> None:
    """From now on, SIGINT ends the process without a word, as a shell's programs end: 128 plus the signal's number.

    For a program that has done nothing yet: its imports would print a traceback. Where a shell has the signal ignored,
    it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))

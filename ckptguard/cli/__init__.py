"""The command line: a command is options, one operation, rendering and an exit code. It holds no knowledge."""

from __future__ import annotations

import atexit
import gc
import signal
import sys

from ckptguard.terminal import end_at_once


def main() -> None:
    """Run the command line and exit with its code (`exit_codes`)."""
    end_at_once()
    # What a command loads is in use until it ends. Looking for garbage in it, and once more at the end, would take a
    # fifth of the time of a short command.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    from ckptguard.cli.entry import commands
    from ckptguard.terminal.end_in_time import end_in_time
    from ckptguard.terminal.output import open_closed_streams, trouble
    from ckptguard.values.exit_codes import ExitCode

    open_closed_streams()
    if sys.argv[1:2] != ["supervise"]:  # which holds the signals, and ends with its command
        abandoned = "interrupted: what did not answer was not waited for"
        end_in_time({signal.SIGINT: ExitCode.INTERRUPTED}, say=lambda: trouble(abandoned))
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the commands say that they were interrupted
    commands.main(prog_name="ckptguard")

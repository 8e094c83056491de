"""The command line: a command is options, one operation, rendering and an exit code. It holds no knowledge."""

from __future__ import annotations

import atexit
import gc


def main() -> None:
    """Run the command line and exit with its code (`exit_codes`)."""
    # What a command loads is in use until it ends. Looking for garbage in it, and once more at the end, would take a
    # fifth of the time of a short command.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    from ckptguard.cli.entry import commands
    from ckptguard.cli.output import open_closed_streams

    open_closed_streams()
    commands.main(prog_name="ckptguard")

"""The command line: a command is options, one operation, rendering and an exit code. It holds no knowledge."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code (`exit_codes`)."""
    from ckptguard.cli.entry import commands
    from ckptguard.cli.output import open_closed_streams

    open_closed_streams()
    commands.main(prog_name="ckptguard")

"""The command ``ckptguard-daemon``."""

from __future__ import annotations

from ckptguard.terminal import end_at_once


def main() -> None:
    """The entry point. Until the daemon takes the signals, it has done nothing that an interruption could cut off."""
    end_at_once()
    from ckptguard_daemon.command import command

    command(prog_name="ckptguard-daemon")


if __name__ == "__main__":
    main()

"""Wrong usage, told as all our errors are: one sentence, and one that says what to do."""

from __future__ import annotations

from typing import IO, Any

import click

from ckptguard.terminal.output import trouble

# What to use instead of options that a command once had.
_REMOVED = {
    ("ckptguard-daemon", "settle"): "use the setting settle, or CKPTGUARD_SETTLE",
    ("ckptguard-daemon", "interval"): "use the setting scan_interval, or CKPTGUARD_SCAN_INTERVAL",
    ("ckptguard-daemon", "records"): "use the setting records, or CKPTGUARD_RECORDS",
    ("ckptguard-daemon", "open"): "open the link that it prints",
    ("dashboard", "open"): "open the link that it prints",
    ("list", "watch"): "use watch ckptguard list RUN, or ckptguard dashboard RUN",
    ("verify", "executor"): "it reads in threads, as many as the setting workers says",
    ("scrub", "md5"): "equal BLAKE3 digests mean equal bytes; use ckptguard sums for the MD5",
    ("scrub", "subset"): "use --max-duration, and the next scrub goes on where it stopped",
}


class WrongUsage(click.UsageError):
    """Wrong usage, told as all our errors are: one sentence, and one that says what to do."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Write both to stderr."""
        trouble(f"error: {self.message}")
        if self.ctx is not None:
            trouble(f"hint: {self.ctx.command_path} --help")


def restated(error: click.UsageError) -> click.UsageError:
    """The same error on one line, for an option that is gone with what to use instead. Help that was asked for by
    giving no arguments is left as it is."""
    if isinstance(error, WrongUsage | click.exceptions.NoArgsIsHelpError):
        return error
    words = " ".join(error.format_message().split())
    if isinstance(error, click.NoSuchOption):
        instead = _REMOVED.get((error.ctx.info_name or "" if error.ctx else "", error.option_name.removeprefix("--")))
        if instead is not None:
            words = f"there is no option {error.option_name} any more: {instead}"
    return WrongUsage(words, error.ctx)

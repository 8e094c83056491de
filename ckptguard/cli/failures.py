"""How a command fails: a sentence on stderr, an exit code, and with --json one document on stdout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

import click

from ckptguard.errors import CkptguardError
from ckptguard.terminal.output import discard_stdout, emit_once, report_error, trouble
from ckptguard.values.exit_codes import ExitCode, of_error


def report_failure(error: BaseException, words: Sequence[str], commands: Collection[str]) -> int:
    """Say what went wrong with a command line of these `words`; returns the exit code."""
    code, reported = _reported(error)
    if isinstance(error, OSError):  # of writing help or a version: what a command meets is an error of ours
        discard_stdout()
    ours = words[: words.index("--")] if "--" in words else words
    if "--json" in ours:
        name = next((word for word in ours if not word.startswith("-")), None)
        # Nothing may be raised here: an error of ours would hide the first one.
        with contextlib.suppress(CkptguardError, OSError, MemoryError, ImportError):
            emit_once(name if name in commands else None, error={**error_fields(reported), "exit_code": int(code)})
    return code


def error_fields(error: CkptguardError) -> dict[str, Any]:
    """An error as documents show it."""
    return {"kind": error.kind, "message": error.message, "hint": error.hint}


def _reported(error: BaseException) -> tuple[ExitCode, CkptguardError]:
    """The exit code, and the error as one of ours, after it was told on stderr."""
    if isinstance(error, click.Abort | KeyboardInterrupt):
        trouble("interrupted")
        return ExitCode.INTERRUPTED, _error("interrupted", "interrupted")
    if isinstance(error, click.UsageError):
        from ckptguard.terminal.usage import restated  # only for who mistyped

        error = restated(error)
    if isinstance(error, click.ClickException):
        with contextlib.suppress(OSError):
            error.show()
        where = getattr(error, "ctx", None)
        return ExitCode.USAGE, _error("usage", error.format_message(), where and f"{where.command_path} --help")
    _debug_traceback()
    reported = error if isinstance(error, CkptguardError) else None
    if isinstance(error, OSError):
        reported = CkptguardError(f"the output cannot be written: {error.strerror}")
    reported = reported or trouble_of_machine(error)
    if reported is None:
        reported = _error(
            "unexpected",
            f"unexpected {type(error).__name__}: {error}",
            hint="this is a mistake in ckptguard: please report it with the output of CKPTGUARD_DEBUG=1",
        )
    report_error(reported)
    return of_error(reported), reported


def _error(kind: str, message: str, hint: str | None = None) -> CkptguardError:
    error = CkptguardError(message, hint=hint)
    error.kind = kind
    return error


def trouble_of_machine(error: BaseException) -> CkptguardError | None:
    """Our error for what the machine lacks; None for what may be a mistake of ours."""
    try:
        from ckptguard.storage.failures import machine_trouble
    except (MemoryError, OSError, ImportError):
        return CkptguardError("this machine lacks what it takes to start")
    return machine_trouble(error)


def _debug_traceback() -> None:
    """Show where an error came from, to those who asked for it."""
    if os.environ.get("CKPTGUARD_DEBUG") == "1":
        import traceback

        traceback.print_exc(file=sys.stderr)

"""Data to stdout, trouble to stderr, and never a traceback for a reader that has gone."""

from __future__ import annotations

import io
import os
import sys

import click

from ckptguard.errors import CkptguardError


def open_closed_streams() -> None:
    """Let what the caller closed (``>&-``) lead nowhere. Left closed, its number would be that of the next file to be
    opened, which would get our text."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the process's whole life
            setattr(sys, name, stream)


def prepare_streams() -> None:
    """Make writing to stdout and stderr total: what their encoding cannot say is written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def escape(text: str) -> str:
    """Text from a file, safe to print. What it takes is imported when it is first needed: help needs none of it."""
    from ckptguard.values import ids

    return ids.escape(text)


def say(text: str) -> None:
    """One or more lines of data to stdout. A reader that closed the pipe early ends the output, not the command:
    its exit code still tells what was found."""
    try:
        click.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise CkptguardError(f"the output cannot be written: {error.strerror}") from error


def discard_stdout() -> None:
    """Send everything still to come nowhere, so that neither we nor the interpreter's exit complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def emit(command: str, result: object = None, form: str = "", /, **parts: object) -> None:
    """One JSON document to stdout: the parts, then the keys of the result. ASCII only: names with control or surrogate
    characters stay exact and harmless."""
    import json

    from ckptguard.documents.build import document, fields

    keys = {} if result is None else fields(result, form)
    say(json.dumps(document(command, **parts, **keys), ensure_ascii=True, allow_nan=False, indent=2))


def trouble(text: str) -> None:
    """One sentence to stderr, escaped; losing it must not change the outcome."""
    try:
        click.echo(escape(text), err=True)
    except OSError:
        pass


def report_error(error: CkptguardError) -> None:
    """The error as one sentence, and its hint as another."""
    trouble(f"error: {error.message}")
    if error.hint:
        trouble(f"hint: {error.hint}")

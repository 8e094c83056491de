"""Data to stdout, trouble and progress to stderr, and never a traceback for a reader that has gone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptguard.errors import CkptguardError

if TYPE_CHECKING:
    from ckptguard.runs.work import Work


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


_has_emitted = False  # a document was printed
_is_quiet = False  # -q was given


def prepare_streams() -> None:
    """Make writing to stdout and stderr total: what their encoding cannot say is written as an escape."""
    global _has_emitted, _is_quiet
    _has_emitted = _is_quiet = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def escape(text: str) -> str:
    """Text from a file, safe to print. What it takes is imported when it is first needed: help needs none of it."""
    try:
        from ckptguard.values import ids
    except (ImportError, MemoryError):  # a machine without memory: it is to be said all the same
        return ascii(text)[1:-1]
    return ids.escape(text)


def say(text: str) -> None:
    """One or more lines of data to stdout. A reader that closed the pipe early ends the output, not the command:
    its exit code still tells what was found."""
    try:
        click.echo(text, color=_has_colours())
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise CkptguardError(f"the output cannot be written: {error.strerror}") from error


def _has_colours() -> bool | None:
    """Return whether the environment says that output has colours, as https://no-color.org/ has it. None: it says
    nothing, and terminals have them."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return False if os.environ.get("TERM") == "dumb" else None


def be_quiet() -> None:
    """From now on, leave out what is well, and progress bars."""
    global _is_quiet
    _is_quiet = True


def is_quiet() -> bool:
    """Whether only what is wrong is to be said."""
    return _is_quiet


def say_well(text: str) -> None:
    """Lines about what is well: -q leaves them out."""
    if not _is_quiet:
        say(text)


def discard_stdout() -> None:
    """Send everything still to come nowhere, so that neither we nor the interpreter's exit complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def emit(command: str, result: object = None, form: str = "", /, **parts: object) -> None:
    """One JSON document to stdout: the parts, then the keys of the result. ASCII only: names with control or surrogate
    characters stay exact and harmless."""
    from ckptguard.documents.build import fields

    emit_once(command, **parts, **({} if result is None else fields(result, form)))


def emit_once(command: str | None, /, **parts: object) -> None:
    """The same of plain parts. A second document would break what reads the first: it is left out."""
    import json

    from ckptguard.documents.build import document

    global _has_emitted
    if not _has_emitted:
        _has_emitted = True
        say(json.dumps(document(command, **parts), ensure_ascii=True, allow_nan=False, indent=2))


def trouble(text: str) -> None:
    """One sentence to stderr, escaped; losing it must not change the outcome."""
    with contextlib.suppress(OSError):
        print(escape(text), file=sys.stderr, flush=True)  # not click's own, which writes into the line of a bar


def warn(*sentences: str) -> None:
    """Say on stderr what should be known, and is no error."""
    for sentence in sentences:
        trouble(f"warning: {sentence}")


def say_errors(sentences: Iterable[str]) -> None:
    """Say on stderr what could not be done or found out, although the command did the rest."""
    for sentence in sentences:
        trouble(f"error: {sentence}")


def log_trouble(event: str, *, level: str = "info", **fields: object) -> None:
    """What is logged while a command works: only what is wrong is said."""
    if level != "info":
        warn(f"{event}: " + ", ".join(f"{name}={value}" for name, value in fields.items()))


def report_error(error: CkptguardError) -> None:
    """The error as one sentence, and its hint as another."""
    trouble(f"error: {error.message}")
    if error.hint:
        trouble(f"hint: {error.hint}")


@contextlib.contextmanager
def progress_bar(title: str, total: int | None = None) -> Iterator[Callable[[int], None] | None]:
    """A bar for long reads, on a terminal only. Yield what to call with the bytes done since the last call, from any
    thread; None where nobody is watching."""
    if _is_quiet or not sys.stderr.isatty() or "JPY_PARENT_PID" in os.environ:  # a notebook would show every redraw
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total or None)
        yield lambda done: bar.advance(task, done)


@contextlib.contextmanager
def working(title: str, total: int | None = None, **how: Any) -> Iterator[Work]:
    """Yield the `Work` that is done in this way, with a bar that shows how far it is."""
    from ckptguard.runs.work import Work

    with progress_bar(title, total) as advance:
        yield Work(progress=advance, **how)


def bytes_below(target: str) -> int | None:
    """An estimate for the bar alone: the bytes of a local file or folder; None where that is not known.

    What several links lead to counts once: in a hub cache the links are the files.
    """
    if "://" in target or not sys.stderr.isatty():
        return None
    if os.path.isfile(target):
        return os.path.getsize(target)
    from ckptguard.values.ids import RECORDS_FOLDER

    sizes: dict[tuple[int, int], int] = {}
    for folder, folders, names in os.walk(target):
        folders[:] = [f for f in folders if f != RECORDS_FOLDER]
        for name in names:
            with contextlib.suppress(OSError):
                info = os.stat(os.path.join(folder, name))
                sizes[info.st_dev, info.st_ino] = info.st_size
    return sum(sizes.values())

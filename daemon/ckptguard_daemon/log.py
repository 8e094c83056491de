"""Structured logs: one JSON object per line, with the keys time, level, event and the event's own fields. On a terminal
each is a sentence instead. The systemd journal gets each with its priority.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import threading
import time
import traceback
from typing import Any

import msgspec

from ckptguard.storage.failures import machine_trouble
from ckptguard.values.ids import escape
from ckptguard_daemon.log_sentences import sentence

_LOG = logging.getLogger("ckptguard_daemon")
FIELDS = "ckptguard_fields"
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class _Lines(logging.Formatter):
    """`for_people`: sentences in local time, else JSON. `for_journal`: each line begins with its priority."""

    def __init__(self, *, for_people: bool, for_journal: bool) -> None:
        super().__init__()
        self._for_people, self._for_journal = for_people, for_journal

    def format(self, record: logging.LogRecord) -> str:
        text = self._text(record)
        if not self._for_journal:
            return text
        return "\n".join(f"<{_PRIORITIES.get(record.levelno, 6)}>{line}" for line in text.split("\n"))

    def _text(self, record: logging.LogRecord) -> str:
        fields, ms = getattr(record, FIELDS, None), int(record.msecs)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{at}.{ms:03}Z", "level": record.levelname.lower()}
        if fields is None:  # from a library
            line |= {"event": "library", "logger": record.name, "message": record.getMessage()}
        else:
            line |= {"event": record.getMessage(), **fields}
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        if self._for_people:
            trace = str(line.pop("traceback", "")).splitlines()
            line["time"] = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.created))}.{ms:03}"
            return "\n".join([sentence(_printable(line)), *map(escape, trace)])
        return msgspec.json.encode(_printable(line), enc_hook=str).decode()


def start_logging(log_file: str | None = None, form: str = "auto") -> None:
    """Send logs to stderr, or append them to a file, which may be rotated. `form` is "text", "json", or "auto": text on
    a terminal."""
    out: logging.Handler = logging.StreamHandler(sys.stderr)
    if log_file is not None:
        out = logging.handlers.WatchedFileHandler(log_file, encoding="utf-8")
    on_terminal = log_file is None and sys.stderr.isatty()
    for_people = form == "text" or (form == "auto" and on_terminal)
    out.setFormatter(_Lines(for_people=for_people, for_journal=log_file is None and _is_journal()))
    root = logging.getLogger()
    root.handlers[:] = [out]
    root.setLevel(logging.WARNING)
    _LOG.setLevel(logging.INFO)
    logging.captureWarnings(True)  # libraries warn; a warning must not break the log's lines
    threading.excepthook = _thread_failed
    sys.unraisablehook = _unraisable
    logging.raiseExceptions = False  # a full disk under the log must not end the guard


def _is_journal() -> bool:
    """True if stderr is the stream that systemd has given us to its journal, and not one that replaced it."""
    with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
        found = os.fstat(sys.stderr.fileno())
        return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    return False


def also_to(listener: logging.Handler) -> None:
    """Give every line to a listener too, from now on."""
    _LOG.addHandler(listener)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Log one line for a thread that ends by an exception."""
    if failed.exc_value is None or isinstance(failed.exc_value, SystemExit):
        return
    reason = _reason(failed.exc_value)
    log("thread_failed", level="error", thread=failed.thread.name if failed.thread else None, reason=reason)


def _unraisable(failed: sys.UnraisableHookArgs) -> None:
    """Log one line for an exception that cannot be raised, such as in a library's cleanup."""
    what = failed.err_msg or "an exception was ignored"
    log("library", level="warning", message=what, reason=_reason(failed.exc_value))


def _reason(error: BaseException | None) -> str:
    reported = None if error is None else machine_trouble(error)
    return f"{type(error).__name__}: {error}" if reported is None else reported.message


def log(event: str, /, *, level: str = "info", trace: bool = False, **fields: object) -> None:
    """Log one line. Text in `fields` may come from files, so it is escaped. `trace` adds the current exception."""
    number = logging.getLevelNamesMapping()[level.upper()]
    _LOG.log(number, event, extra={FIELDS: fields}, exc_info=trace)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(str(name)): _printable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(inner) for inner in value]
    return value

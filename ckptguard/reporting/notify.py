"""Telling people: what is news, told once, to a command and a webhook.

Each has a thread of its own, so that nothing here blocks the loop.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ckptguard.decisions.known_good import standings
from ckptguard.records.incidents import Incident
from ckptguard.records.ledger import ledger_names
from ckptguard.records.run import Run
from ckptguard.runs.results import Checked
from ckptguard.values.ids import Step, escape
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome, Severity

COMMAND_SECONDS = 60.0
WEBHOOK_SECONDS = 10.0
_MOST_WAITING = 1000
_LONGEST_OUTPUT = 2000

_TOLD = (Outcome.BAD, Outcome.SUSPECT, Outcome.INCOMPLETE)
_MOST_FINDINGS = 20

Known = dict[tuple[str, str], Outcome]  # (series, id) -> outcome
Event = dict[str, Any]
Log = Callable[..., None]  # log(event, *, level="info", **fields)


class Hooks:
    """Sends each event once to the command and the webhook of the settings. Results and failures are logged to `log`.

    The command is started within `around_start`, for callers that block signals.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        around_start: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._log = log
        self._around_start = around_start
        self._command = settings.on_incident
        self._webhook = settings.webhook
        self._running: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._lines: list[_Line] = []
        if self._command:
            self._lines.append(_Line("on_incident", self._run_command, log))
        if self._webhook is not None:
            self._lines.append(_Line("webhook", self._post, log))

    def tell(self, event: Event) -> None:
        """Queue an event; returns at once."""
        for line in self._lines:
            line.put(event)

    @property
    def pids(self) -> list[int]:
        """The command, while it runs; also one that is being started now."""
        with self._starting:
            running = self._running
        return [] if running is None else [running.pid]

    def close(self, *, patience: float) -> None:
        """Wait at most `patience` seconds for what is queued, then give up on it."""
        deadline = time.monotonic() + patience
        for line in self._lines:
            line.close(deadline)
        running = self._running
        if running is not None:
            _kill_group(running)

    def _run_command(self, event: Event) -> None:
        with self._starting, self._around_start():
            self._running = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            output, _ = process.communicate(msgspec.json.encode(event) + b"\n", timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            output, _ = process.communicate()
            self._log("hook_timed_out", level="warning", hook="on_incident", seconds=COMMAND_SECONDS)
        finally:
            self._running = None
        said = output[-_LONGEST_OUTPUT:].decode("utf-8", "replace")
        level = "info" if process.returncode == 0 else "warning"
        self._log("hook_ran", level=level, hook="on_incident", exit_code=process.returncode, output=said)

    def _post(self, event: Event) -> None:
        assert self._webhook is not None
        request = urllib.request.Request(
            self._webhook,
            data=msgspec.json.encode(event),
            headers={"Content-Type": "application/json", "User-Agent": "ckptguard"},
            method="POST",
        )
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(request, timeout=WEBHOOK_SECONDS) as answer:
            self._log("hook_ran", hook="webhook", status=answer.status)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A webhook that sends us elsewhere (to file:, or into the private network) is a failure."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _Line:
    """A queue with one thread that hands over events one by one."""

    def __init__(self, name: str, hand_over: Callable[[Event], None], log: Log) -> None:
        self._name = name
        self._log = log
        self._hand_over = hand_over
        self._events: queue.Queue[Event | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"hook-{name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._log("hook_event_dropped", level="error", hook=self._name, about=event)

    def close(self, deadline: float) -> None:
        with contextlib.suppress(queue.Full):
            self._events.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._log("hook_abandoned", level="warning", hook=self._name)

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._hand_over(event)
            except (OSError, ValueError, urllib.error.URLError, subprocess.SubprocessError) as error:
                self._log("hook_failed", level="warning", hook=self._name, reason=f"{type(error).__name__}: {error}")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def known_outcomes(run: Run) -> Known:
    """The outcomes that the ledger holds now: none of them is news."""
    return {
        (series, str(id)): standing.outcome
        for series, names in ledger_names(run).items()
        for id, standing in standings(series, names).items()
    }


def news_in(checked: Iterable[Checked], known: Known) -> list[Checked]:
    """Those that turned bad, suspect or incomplete since `known`, which is brought up to date."""
    news = []
    for one in checked:
        key = (one.series, one.path if one.id is None else str(one.id))
        if one.outcome in _TOLD and known.get(key) is not one.outcome:
            news.append(one)
        known[key] = one.outcome
    return news


def verdict_event(run: Run, checked: Checked, *, source: str) -> Event:
    """What hooks are told of a checkpoint that turned bad, suspect or incomplete."""
    id = None if checked.id is None else str(checked.id)
    weighty = [f for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
    return {
        **_event(run, "verdict", checked.step, cause=checked.outcome.value, reason=reason_of(checked), source=source),
        "checkpoint": {"path": escape(checked.path), "series": escape(checked.series), "id": id},
        "findings": [
            {"check": f.check, "file": _escaped(f.file), "tensor": _escaped(f.tensor), "message": escape(f.message)}
            for f in weighty[:_MOST_FINDINGS]
        ],
    }


def incident_event(run: Run, incident: Incident) -> Event:
    """What hooks are told of an incident that was reported."""
    cause, reason, source = escape(incident.cause), escape(incident.reason), escape(incident.source)
    event = _event(run, "incident", incident.step, cause=cause, reason=reason, source=source)
    return {**event, "incident": msgspec.to_builtins(incident)}


def replica_event(run: Run, url: str, reason: str, *, source: str) -> Event:
    """What hooks are told of a replica that cannot be brought up to date."""
    return _event(run, "replica", None, cause="replica", reason=escape(f"{url}: {reason}"), source=source)


def _event(run: Run, event: str, step: Step, *, cause: str, reason: str, source: str) -> Event:
    return {
        "schema": 1,
        "command": "incident",
        "event": event,
        "run": run.run_id,
        "url": escape(run.url),
        "step": step,
        "cause": cause,
        "reason": reason,
        "source": source,
        "checkpoint": None,
        "findings": [],
        "incident": None,
    }


def reason_of(checked: Checked) -> str:
    """The heaviest finding in one line; "" where nothing weighs."""
    for severity in (Severity.ERROR, Severity.SICKNESS, Severity.WARNING):
        for finding in checked.findings:
            if finding.severity is severity:
                about = finding.tensor or finding.file
                return escape(f"{about}: {finding.message}" if about else finding.message)
    return ""


def _escaped(text: str | None) -> str | None:
    return None if text is None else escape(text)

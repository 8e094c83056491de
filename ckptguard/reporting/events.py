"""What is news of a run, and the event by which people are told: a document, with a few words for chats in it."""

from __future__ import annotations

import contextlib
import shlex
import uuid
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from ckptguard.decisions.known_good import CurrentVerdict, current_verdicts
from ckptguard.errors import CkptguardError
from ckptguard.records.incidents import Incident, incident_ids, read_incident
from ckptguard.records.ledger import series_names
from ckptguard.records.manifests import read_manifest
from ckptguard.records.notified import event_key, verdict_key
from ckptguard.records.run import Run
from ckptguard.reporting.channels import Event
from ckptguard.runs.history import History
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId, Step, escape, name_of_run, step_text
from ckptguard.values.settings import LABELS
from ckptguard.values.verdict import Outcome, Severity, Verdict, heaviest_words

_LONGEST_TEXT = 700  # characters of a reason in a message
_REPORTED = (Outcome.BAD, Outcome.SUSPECT, Outcome.INCOMPLETE)
_MOST_FINDINGS = 20
# What calls everybody to the screen, in one chat or another, if a tensor is named so.
_HARMLESS = str.maketrans({"@": "\N{FULLWIDTH COMMERCIAL AT}", "<": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}"})

Known = dict[tuple[str, str], Outcome]  # (series, id) -> outcome


def known_outcomes(history: History) -> Known:
    """The outcomes that the ledger holds now and that are reported: none of them is news."""
    return {
        (series, str(id)): current_verdict.outcome
        for series in history.names
        for id, current_verdict in history.current_verdicts(series).items()
        if current_verdict.outcome in _REPORTED
    }


def news_in(checked: Iterable[Checked], known: Known) -> list[Checked]:
    """Those that turned bad, suspect or incomplete since `known`, which is brought up to date."""
    news = []
    for one in checked:
        key = (one.series, one.path if one.id is None else str(one.id))
        if one.outcome not in _REPORTED:
            known.pop(key, None)
        elif known.get(key) is not one.outcome:
            news.append(one)
            known[key] = one.outcome
    return news


def verdict_event(run: Run, checked: Checked, *, source: str) -> Event:
    """What hooks are told of a checkpoint that turned bad, suspect or incomplete."""
    current_verdict = None
    if checked.id is not None:
        with contextlib.suppress(CkptguardError):  # then it may be told again after a restart
            current_verdict = current_verdicts(checked.series, series_names(run, checked.series)).get(checked.id)
    key = uuid.uuid4().hex if current_verdict is None else verdict_key(current_verdict)
    return _verdict_event(run, checked, key, source=source)


def _verdict_event(run: Run, about: Checked, key: str, *, source: str) -> Event:
    weighty = [f for f in about.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
    cause, place = about.outcome.value, run.usable(about.path)
    then = f"ckptguard verify {shlex.quote(place)}" if about.outcome is Outcome.INCOMPLETE else _incident_command(run)
    return _event(
        run,
        "verdict",
        key,
        step=about.step,
        cause=cause,
        reason=reason_of(about),
        source=source,
        reported=(f"{about.path} is {cause}", then),
        checkpoint={"path": escape(about.path), "series": escape(about.series), "id": about.id and str(about.id)},
        findings=[
            {"check": f.check, "file": _escaped(f.file), "tensor": _escaped(f.tensor), "message": escape(f.message)}
            for f in weighty[:_MOST_FINDINGS]
        ],
    )


def incident_event(run: Run, incident: Incident) -> Event:
    """What hooks are told of an incident that was reported."""
    cause, at = escape(incident.cause), "" if incident.step is None else f" at update {incident.step}"
    return _event(
        run,
        "incident",
        event_key("incident", incident.id),
        step=incident.step,
        cause=cause,
        reason=escape(incident.reason),
        source=escape(incident.source),
        reported=(f"incident in training{at} ({cause})", _incident_command(run)),
        incident=msgspec.to_builtins(incident),
    )


def unfinished_event(run: Run, path: str, step: Step, reason: str, written_at: int, *, source: str) -> Event:
    """What hooks are told of the newest save, if it is unfinished for long. `written_at` is in ns since 1970."""
    return _event(
        run,
        "unfinished",
        event_key("unfinished", path, str(written_at)),
        step=step,
        cause="unfinished",
        reason=escape(reason),
        source=source,
        reported=(f"the newest save, {path}, is unfinished", f"ckptguard list {shlex.quote(run.url)}"),
    )


def replica_event(run: Run, url: str, reason: str, *, source: str) -> Event:
    """What hooks are told of a replica that cannot be brought up to date."""
    reported = ("a replica is not up to date", f"ckptguard status {shlex.quote(run.url)}")
    reason = escape(f"{url}: {reason}")
    return _event(run, "replica", uuid.uuid4().hex, cause="replica", reason=reason, source=source, reported=reported)


def trial_event(run: Run | None) -> Event:
    """What `ckptguard notify --test` sends."""
    where = "" if run is None else f"\nRun: {escape(run.url)}"
    text = f"Messages about your training checkpoints will arrive here.{where}".translate(_HARMLESS)
    title, asked = "ckptguard: this is a test", "a test was asked for"
    return _event(run, "test", uuid.uuid4().hex, cause="test", reason=asked, source="cli", title=title, text=text)


def events_on_record(view: RunView) -> dict[str, Callable[[], Event | None]]:
    """What is on record to be told: the key of each event, and what makes it; None where another event tells it."""
    found: dict[str, Callable[[], Event | None]] = {}
    for series in view.history.names:
        of_series = view.history.current_verdicts(series)
        for current_verdict in sorted(of_series.values(), key=lambda s: s.id.order):
            if current_verdict.outcome in _REPORTED:
                found[verdict_key(current_verdict)] = partial(_verdict_on_record, view, current_verdict)
    for incident_id in incident_ids(view.run):
        found[event_key("incident", incident_id)] = partial(_incident_on_record, view.run, incident_id)
    return found


def _verdict_on_record(view: RunView, current_verdict: CurrentVerdict) -> Event | None:
    about = judged_on_record(view, current_verdict.id)
    if about is None or about.outcome not in _REPORTED:
        return None
    return _verdict_event(view.run, about, verdict_key(current_verdict), source="records")


def judged_on_record(view: RunView, id: CheckpointId) -> Checked | None:
    """Return the verdict that counts for a generation, as if it was given now. None if there is none."""
    verdict = view.history.verdict(id)
    if verdict is None:
        return None
    try:
        manifest = read_manifest(view.run, id)
    except CkptguardError:
        manifest = None
    path = manifest.path if manifest is not None else id.series.replace("#", step_text(id.step))
    return Checked(
        path=path,
        series=id.series,
        layout="",
        step=id.step,
        id=id,
        outcome=verdict.outcome,
        digest_origin=None,
        bytes=0,
        seconds=None,
        findings=verdict.findings,
    )


def _incident_on_record(run: Run, incident_id: str) -> Event | None:
    incident = read_incident(run, incident_id)
    # A bad save is told by its verdict.
    return None if incident is None or "checkpoint" in incident.evidence else incident_event(run, incident)


def _event(
    run: Run | None,
    event: str,
    key: str,
    *,
    cause: str,
    reason: str,
    source: str,
    step: Step = None,
    reported: tuple[str, str] = ("", ""),
    **about: object,
) -> Event:
    """An event, and the same in words: one line, and some more. `reported`: what happened, and the command to run next.
    Nothing in the words calls anybody, whatever a tensor is named."""
    what, then = reported
    name, url = ("", "") if run is None else (escape(name_of_run(run.url)), escape(run.url))
    short = reason if len(reason) <= _LONGEST_TEXT else f"{reason[:_LONGEST_TEXT]}..."
    labels = (
        {} if run is None else {name: escape(value) for name, value in zip(LABELS, run.labels, strict=False) if value}
    )
    whose = ", ".join(f"{label} {value}" for label, value in labels.items())
    lines = (short, f"Run: {url}", whose and f"Labels: {whose}", f"Next: {escape(then)}")
    return {
        "schema": 1,
        "command": "incident",
        "id": key if run is None else f"{run.run_id}.{key}",
        "event": event,
        "run": None if run is None else run.run_id,
        "url": None if run is None else url,
        "labels": labels,
        "step": step,
        "cause": cause,
        "reason": reason,
        "source": source,
        "title": f"ckptguard: {name}: {escape(what)}".translate(_HARMLESS),
        "text": "\n".join(line for line in lines if line).translate(_HARMLESS),
        "checkpoint": None,
        "findings": [],
        "incident": None,
        **about,
    }


def _incident_command(run: Run) -> str:
    return f"ckptguard incident {shlex.quote(run.url)}"


def reason_of(checked: Checked | Verdict) -> str:
    """The heaviest finding in one line; "" where nothing weighs."""
    return escape(heaviest_words(checked.findings))


def _escaped(text: str | None) -> str | None:
    return None if text is None else escape(text)

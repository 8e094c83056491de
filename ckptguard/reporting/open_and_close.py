"""Open an incident about a bad save, and close incidents, each with its report for people.

A sickness that a guard noticed inside of training, and the poisoned save that a daemon found, are one trouble. Such a
save becomes evidence of the incident that is there, and incidents about saves are closed with the one they belong to.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from ckptguard.checks.schema import QUESTIONS
from ckptguard.decisions.known_good import CurrentVerdict, current_verdicts, since
from ckptguard.errors import BusyError, CkptguardError, ObjectExistsError, RecordsError, RunRemovedError
from ckptguard.records.incidents import (
    Incident,
    list_incidents,
    open_incident,
    report_key,
    update_incident,
)
from ckptguard.records.ledger import series_names
from ckptguard.records.manifests import read_manifest
from ckptguard.records.notified import INCIDENTS, mark_notified, read_notified, skip_notifications, verdict_key
from ckptguard.records.run import Run, create_record
from ckptguard.recover.roll_back import RolledBack
from ckptguard.reporting.build_report import checkpoint_of, report_of
from ckptguard.reporting.events import judged_on_record, reason_of
from ckptguard.reporting.report_html import report_html
from ckptguard.reporting.report_text import report_text
from ckptguard.reporting.report_words import NO_SICKNESS
from ckptguard.runs.history import History
from ckptguard.runs.lock import run_lock
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId, single_number
from ckptguard.values.own_log import log as _log
from ckptguard.values.packed_names import PackedNames
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome, Severity

_MOST = 64  # incidents that are looked at, the newest ones
_LONGEST = 10_000  # characters about bad saves of one trouble
_LOCK_SECONDS = 5.0
_VERDICT = "verdict"  # in the evidence: the number of the verdict for which an incident was opened
_SECOND = 1_000_000_000  # incidents are dated to the second
_OF_NUMBERS = {"finite", "stale", "drift", "incident"}
_OF_COPY = {"kept"}
_OF_STORAGE = (*NO_SICKNESS, "damage", "crash")


def record_bad_save(run: Run, checked: Checked, *, source: str, report: bool = True) -> Incident | None:
    """Open an incident about a checkpoint, and write its report from the records. If training noticed the same trouble
    itself, the checkpoint becomes evidence of that incident instead. None if there is nothing to record: it is not bad,
    only the user can decide, or this generation has an incident already. Without `report` the caller writes that
    later."""
    recorded = record_bad_saves(run, (checked,), source=source, report=report)
    return recorded[0][1] if recorded else None


def record_bad_saves(
    run: Run, found: Sequence[Checked], *, source: str, report: bool = True
) -> list[tuple[Checked, Incident]]:
    """Do the same for several checkpoints. Returns those for which there was something to record."""
    found = [one for one in found if _needs_incident(one)]
    if not found:
        return []
    with contextlib.ExitStack() as held:
        with contextlib.suppress(BusyError):  # two incidents are better than none
            held.enter_context(run_lock(run, timeout=_LOCK_SECONDS))  # a daemon may judge the same save now
        incidents, recorded = list_incidents(run), []
        for one in found:
            incident = _record_bad_save(run, one, source, incidents, report=report)
            if incident is not None:
                incidents = [*(other for other in incidents if other.id != incident.id), incident]
                recorded.append((one, incident))
        return recorded


def _needs_incident(checked: Checked) -> bool:
    asks = checked.outcome is Outcome.SUSPECT and _checks_of(checked) <= QUESTIONS
    return checked.outcome in (Outcome.BAD, Outcome.SUSPECT) and not asks and checked.id is not None


def _checks_of(checked: Checked) -> set[str]:
    return {f.check for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)}


def _record_bad_save(
    run: Run, checked: Checked, source: str, incidents: Sequence[Incident], *, report: bool
) -> Incident | None:
    assert checked.id is not None
    names = series_names(run, checked.series)
    errors = _checks_of(checked)
    about = [i for i in incidents if checkpoint_of(i) == checked.id or (errors == _OF_COPY and _is_of_copy(i, checked))]
    if about and _is_reported(checked.id, names, about):
        return None
    noticed = _noticed_by_guard(run, checked.id, incidents) if errors and errors <= _OF_NUMBERS else None
    if noticed is not None:
        sentence = f"{checked.path}: {reason_of(checked)}"
        known = str(noticed.evidence.get("bad_saves", ""))
        if sentence in known or len(known) > _LONGEST:
            return None
        return update_incident(run, noticed, evidence={"bad_saves": f"{known}; {sentence}" if known else sentence})
    current_verdict = current_verdicts(checked.series, names).get(checked.id)
    incident = open_incident(
        run,
        step=single_number(checked.step),
        cause="numeric" if errors & _OF_NUMBERS else "damage",
        reason=f"{checked.path} is {checked.outcome.value}: {reason_of(checked)}",
        evidence={
            "checkpoint": str(checked.id),
            "series": checked.series,
            "path": checked.path,
            **({} if current_verdict is None else {_VERDICT: current_verdict.number}),
        },
        source=source,
    )
    if report:
        leave_report(run, incident)
    return incident


def _is_of_copy(incident: Incident, checked: Checked) -> bool:
    about = {"kept_copy": str(checked.id), "series": checked.series}
    return about.items() <= incident.evidence.items()


def _is_reported(id: CheckpointId, names: Iterable[str], about: Iterable[Incident]) -> bool:
    """True if the trouble that a checkpoint has now is that of one of the incidents about it. It is not if the
    checkpoint was good after they were closed. `names` are those of the ledger."""
    first = since(id, names, set(Outcome) - {Outcome.GOOD})
    for incident in about:
        number = incident.evidence.get(_VERDICT)  # an older version noted none
        if incident.state != "closed" or first is None or not isinstance(number, int) or number >= first.number:
            return True
    return False


def close_incident(
    run: Run, incident: Incident, *, action: str, known_good: str | None = None, state: str = "closed"
) -> str | None:
    """Record what was done, and write the report. Return the path of its text, None if it could not be made.

    `state` is "open" if somebody else has to go on. A daemon's incidents about saves of the same trouble are closed,
    too. A report that fails is no error; StorageError if the record itself cannot be written.
    """
    concluded = None
    try:
        known = msgspec.structs.replace(incident, known_good=known_good or incident.known_good)
        concluded = report_of(_view(run), known).details
    except Exception as error:
        _log.warning("the report of incident %s is not complete: %r", incident.id, error)
    closed = update_incident(run, incident, state=state, action=action, known_good=known_good, details=concluded)
    try:
        _close_same_trouble(run, closed, action=action)
    except CkptguardError as error:
        _log.warning("incidents about saves of the same trouble stay open: %s", error.message)
    return leave_report(run, closed)


def close_as_good(run: Run, path: str, id: CheckpointId) -> None:
    """Close the open incidents about a checkpoint that is good now. Never raises."""
    close_incidents_about(run, id=id, action=f"{path} was verified again, and is good")


def close_incidents_about(
    run: Run,
    paths: Collection[str] = (),
    *,
    id: CheckpointId | None = None,
    action: str,
    known_good: str | None = None,
) -> list[str]:
    """Close the open incidents about these checkpoints of a run, named by path or id: a user dealt with them. Return
    the paths of their reports. Never raises: what was done is done."""
    reports: list[str] = []
    try:
        for incident in list_incidents(run, most=_MOST):
            is_about = incident.evidence.get("path") in paths or (id is not None and checkpoint_of(incident) == id)
            if incident.state == "open" and is_about:
                report = close_incident(run, incident, action=action, known_good=known_good)
                reports += [] if report is None else [report]
    except RunRemovedError:
        pass
    except CkptguardError as error:
        _log.warning("the incidents stay open: %s", error.message)
    return reports


def close_after_rollback(run: Run, done: RolledBack) -> list[str]:
    """Close the incidents about what a rollback moved aside, and return the paths of their reports; a plan closes none.
    Never raises."""
    if done.dry_run:
        return []
    good = str(done.known_good.id)
    return close_incidents_about(run, done.quarantined, action=f"went back to {good}", known_good=good)


def leave_report(run: Run, incident: Incident) -> str | None:
    """Write the report as text and page; returns where the text is. One that is there already stays: what came later
    is in the incident's revisions. Never raises."""
    try:
        report = report_of(_view(run), incident)
        for suffix, text in (("html", report_html(report)), ("txt", report_text(report))):
            with contextlib.suppress(ObjectExistsError):
                create_record(run, report_key(incident.id, suffix), text.encode("utf-8", "backslashreplace"))
        return run.usable_record(report_key(incident.id, "txt"))
    except RunRemovedError:
        return None
    except Exception as error:
        _log.warning("the report of incident %s could not be written: %r", incident.id, error)
        return None


class MissedIncidents:
    """Makes the incidents of a guarded run follow its ledger, whatever was killed after it wrote a verdict. What the
    ledger said when it was guarded for the first time needs none.

    A change of the ledger's names makes work, and nothing else does.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._settled: set[str] | None = None  # keys of verdicts; None: not begun
        self._names: PackedNames | None = None

    @property
    def has_begun(self) -> bool:
        """True if it is known what needs no incident."""
        return self._settled is not None

    def begin(self, view: RunView) -> None:
        """Note what needs no incident, and make up for what was left undone. Call it before the first new verdict.
        Raises StorageError."""
        settled = read_notified(view.run).get(INCIDENTS)
        if settled is None:
            settled = {verdict_key(current_verdict) for current_verdict in _changes(view.history)}
            skip_notifications(view.run, INCIDENTS, settled)
        self._send_missed(view, settled)
        self._settled = settled

    def record_missed(self, view: RunView, names: PackedNames | None) -> list[Checked]:
        """Open and close what is due, unless the names of the ledger are those of the last time. Returns the
        checkpoints whose incident was opened. Raises StorageError, and is tried again then."""
        if self._settled is None or (names is not None and names == self._names):
            return []
        opened = self._send_missed(view, self._settled)
        self._names = names
        return opened

    def _send_missed(self, view: RunView, settled: set[str]) -> list[Checked]:
        new = {verdict_key(current_verdict): current_verdict for current_verdict in _changes(view.history)}
        judged = {key: judged_on_record(view, new[key].id) for key in new if key not in settled}
        found = [one for one in judged.values() if one is not None]
        for one in found:
            if one.outcome is Outcome.GOOD and one.id is not None:
                close_as_good(view.run, one.path, one.id)
        bad = [one for one in found if one.outcome is Outcome.BAD]
        opened = record_bad_saves(view.run, bad, source=self._source)
        for one, incident in opened:
            is_own = checkpoint_of(incident) == one.id  # and not one of the training that it joined
            if is_own and one.id is not None and view.history.is_quarantined(one.id):
                close_incident(view.run, incident, action=f"{one.path} was moved aside before")
        for key in judged:
            mark_notified(view.run, INCIDENTS, key)  # so no later start asks about it
            settled.add(key)
        return [one for one, _ in opened]


def _changes(history: History) -> Iterator[CurrentVerdict]:
    """Yield the first verdict of each trouble that lasts, and of each that ended well."""
    for series in list(history.names):
        for current_verdict in history.current_verdicts(series).values():
            is_again = current_verdict.outcome is Outcome.GOOD and current_verdict.number > 1
            if current_verdict.outcome is Outcome.BAD or is_again:
                first = history.first_of(current_verdict)
                if first.outcome is Outcome.BAD or first.number > 1:
                    yield first


def _view(run: Run) -> RunView:
    """Enough to report by: only records are read, which the settings of a run do not change."""
    return RunView(run, Settings())


def _noticed_by_guard(run: Run, id: CheckpointId, incidents: Sequence[Incident]) -> Incident | None:
    """Return the newest incident of the training itself that explains why a checkpoint's numbers are sick, or None.

    The save falls between that incident's onset and the step that noticed it, and was written before the incident.
    """
    found = [incident for incident in incidents[-_MOST:] if _explains(run, incident, id)]
    return found[-1] if found else None


def _close_same_trouble(run: Run, incident: Incident, *, action: str) -> None:
    """Close the open incidents about sick saves that this one explains, which was dealt with by `action`."""
    for other in list_incidents(run, most=_MOST):
        about_save = checkpoint_of(other) is not None and (other.cause, other.state) == ("numeric", "open")
        if about_save and other.id != incident.id and _explains(run, incident, checkpoint_of(other)):
            reason = f"the same trouble as incident {incident.id}: {action}"
            update_incident(run, other, state="closed", action=reason, known_good=incident.known_good)


def _explains(run: Run, incident: Incident, id: CheckpointId | None) -> bool:
    if id is None or id.number is None or incident.step is None:
        return False
    if incident.source == "daemon" or checkpoint_of(incident) is not None or incident.cause in _OF_STORAGE:
        return False
    onset = incident.known_details().onset
    first = onset if onset is not None else incident.step
    return first <= id.number <= incident.step and _written_before(run, incident, id)


def _written_before(run: Run, incident: Incident, id: CheckpointId) -> bool:
    """Whether the save was there when the incident was opened: what was saved since is of the training after it."""
    try:
        manifest = read_manifest(run, id)
        opened = datetime.datetime.fromisoformat(incident.opened_at).timestamp()
    except (RecordsError, ValueError, OverflowError):
        return False
    times = [f.mtime_ns for f in manifest.files if f.mtime_ns is not None] if manifest is not None else []
    return bool(times) and max(times) < (int(opened) + 1) * _SECOND

"""See a run: what the names of its records and its listing say, and the few records that are new.

The same names give the same rows, whatever the catalogue held before. Only reading less depends on that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from ckptguard.catalogue.curves import see_curve
from ckptguard.catalogue.look import RunLook, below, digest_of
from ckptguard.catalogue.rows import Event, Noted, RunSeen, event_key
from ckptguard.decisions.known_good import verdict_name
from ckptguard.decisions.run_summary import last_read, summarize
from ckptguard.errors import NoKnownGoodError, StorageError
from ckptguard.records.after_seal import late_md5_key
from ckptguard.records.audit import BEGAN, parse_action, read_state
from ckptguard.records.audit import FOLDER as AUDIT
from ckptguard.records.incidents import FOLDER as INCIDENTS
from ckptguard.records.incidents import Incident, newest_revisions, read_revision
from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.kept import read_kept
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.pins import FOLDER as PINS
from ckptguard.records.pins import PINNED, Pin, read_pins
from ckptguard.records.pins import counts as still_counts
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.run import Run
from ckptguard.records.scrubs import FOLDER as SCRUBS
from ckptguard.records.scrubs import IN_PLACE, Where, newest_scrubs, parse_scrub
from ckptguard.records.scrubs import KEPT as KEPT_PLACE
from ckptguard.records.silences import FOLDER as SILENCES
from ckptguard.records.silences import read_silence
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.records.who_and_when import seconds_of
from ckptguard.reporting.events import reason_of
from ckptguard.runs.find_known_good import Wanted, best_on_record
from ckptguard.runs.history import History, StepRecords
from ckptguard.runs.run_reader import RunMemory, RunReader, stored
from ckptguard.values.ids import CheckpointId, escape, parse_id
from ckptguard.values.run_rows import LONGEST_TEXT, Generation, IncidentRow
from ckptguard.values.verdict import Outcome

_MOST_READ = 200  # generations whose records are read in one pass; the next pass goes on
_NOTHING = Noted()
_ACTION = "action"


def observe(
    run: Run,
    look: RunLook,
    *,
    now: float,
    known: Noted = _NOTHING,
) -> RunSeen:
    """Return the rows of a run. What is known is not read again. Raises CouldNotTellError."""
    history = History(run, look.names, has_kept=True)
    reader = RunReader(history, RunMemory())
    records = {
        id: step
        for series in history.series
        for step in history.steps(series)
        for id in (*step.current_verdicts, *step.ids[MANIFESTS])
    }
    scrubs = [scrub for key in below(SCRUBS, look.names) if (scrub := parse_scrub(key)) is not None]
    read = {where: s.began for where, s in newest_scrubs([s for s in scrubs if s.is_whole], now).items()}
    pins = read_pins(run, below(PINS, look.names))
    pinned: dict[CheckpointId, list[Pin]] = {}
    for pin in sorted(pins, key=lambda pin: pin.key):
        if pin.reason == PINNED and still_counts(run, pin):
            pinned.setdefault(pin.id, []).append(pin)
    rows: dict[CheckpointId, Generation] = {}
    events: list[Event] = []
    left = _MOST_READ
    for id in sorted(records, key=lambda id: (id.order, id.series), reverse=True):
        row = known.generations.get(id.record_path)
        if row is None or not _is_current(row, id, records[id]):
            row = _named(id, records[id])
            if left > 0:
                row, news = _described(reader, id)
                events += reversed(news)
            left -= 1
        own = pinned.get(id, ())
        ends = [math.inf if pin.until is None else seconds_of(pin.until) or math.inf for pin in own]
        last = max(ends, default=math.inf)
        row = msgspec.structs.replace(
            row, pinned="; ".join(_text(pin.words) for pin in own), pinned_until=None if last == math.inf else last
        )
        rows[id] = _placed(run, row, id, look, records[id], read)
    incidents, reported = _incidents(run, look.names, known.incidents)
    curve = see_curve(run, look) if look.curve != known.curve.identity else None
    is_whole = left >= 0 and (curve is not None or look.curve == known.curve.identity)
    return RunSeen(
        id=run.run_id,
        digest=digest_of(look) if is_whole else b"",
        summary=summarize(
            look, rows, incidents, known_good_of(history), read_silence(run, below(SILENCES, look.names))
        ),
        generations=tuple(rows.values()),
        incidents=tuple(incidents),
        events=(*reversed(events), *reported, *_action_events(run, look.names, known)),
        curve=curve,
        paths=look.paths,
    )


def known_good_of(history: History) -> CheckpointId | None:
    """Return what known-good is now, or None if nothing is. Raises CouldNotTellError."""
    try:
        return best_on_record(history.run, Wanted(sure=True), history).id
    except NoKnownGoodError:
        return None
    except StorageError:
        if not history.unread:
            raise
        return None


def _short(id: CheckpointId, name: str) -> str:
    """Return the part of a verdict's name that differs among those of one generation."""
    return name.removeprefix(f"{id.record_name}.").removesuffix(".json")


def _is_current(row: Generation, id: CheckpointId, records: StepRecords) -> bool:
    """True if no record of it is new since its row was made."""
    current_verdict = records.current_verdicts.get(id)
    same = row.verdict == ("" if current_verdict is None else _short(id, verdict_name(current_verdict)))
    return same and (row.path is not None or id not in records.ids[MANIFESTS])


def _named(id: CheckpointId, records: StepRecords) -> Generation:
    """Return the row of a generation whose records are not read yet."""
    entry = records.current_verdicts.get(id)
    # Only the record itself says that a good one is about these bytes.
    outcome = entry.outcome if entry is not None and entry.outcome is not Outcome.GOOD else Outcome.PENDING
    return Generation(name=id.record_path, outcome=outcome.value)


def _described(reader: RunReader, id: CheckpointId) -> tuple[Generation, list[Event]]:
    """Read the records of a generation. Returns its row, and the events of its verdicts."""
    row, history, events = reader.row(id), reader.history, []
    for name, current_verdict in sorted(history.entries(id).items()):
        cause, at, reason = row.outcome, row.judged_at, row.reason
        if _short(id, name) != row.verdict:  # an earlier one
            verdict = history.entry(current_verdict, name)
            if verdict is None:
                continue
            cause, at, reason = verdict.outcome.value, seconds_of(verdict.checked_at), reason_of(verdict)[:LONGEST_TEXT]
        key = event_key("verdict", id.record_path, name)
        event = Event(key=key, kind="verdict", at=at, about=id.record_path, step=id.number, cause=cause, text=reason)
        events.append(event)
    history.forget(id)  # a manifest may be large, and there may be many
    return row, events


def _placed(
    run: Run, row: Generation, id: CheckpointId, look: RunLook, records: StepRecords, read: Mapping[Where, float]
) -> Generation:
    """Add where a generation is, and when its places were last read."""
    copy, place = read_kept(run, id) if id in records.ids[KEPT] else None, look.places.get(id)
    saved, good, times = row.saved_at, row.outcome == Outcome.GOOD.value, list[float | None]()
    is_sealed = id in records.ids[MANIFESTS]
    if not is_sealed:  # an incomplete one has only the times of its files
        mark = read_quarantined(run, id) if id in records.ids[QUARANTINE] else None
        saved = place.written_at if place is not None else mark.written_at if mark is not None else None
    if place is not None and is_sealed:
        times.append(last_read(row.judged_at, read.get((id, IN_PLACE)), None, good=good))
    if copy is not None and (copy.how != "link" or place is None):  # else it is read in place
        times.append(last_read(row.judged_at, read.get((id, KEPT_PLACE)), seconds_of(copy.kept_at), good=good))
    if place is not None and place.unread:  # without a verdict's name it is read again from the records
        row = msgspec.structs.replace(row, outcome=Outcome.PENDING.value, verdict="", reason="it could not be read")
    return msgspec.structs.replace(
        row,
        in_place=place is not None,
        saved_at=saved,
        kept="" if copy is None else copy.how,
        aside=TRASH if f"{TRASH}/{id.record_path}.json" in look.names else QUARANTINE * (id in records.ids[QUARANTINE]),
        replicated=look.replicated.get(id, 0),
        md5=row.md5 if row.md5 == "sealed" else "later" * (late_md5_key(id) in look.names),
        scrubbed_at=min((time for time in times if time is not None), default=None),
    )


def _incidents(
    run: Run, names: Iterable[str], known: Mapping[str, IncidentRow]
) -> tuple[list[IncidentRow], list[Event]]:
    """Return the incidents of a run, and the events of those that are new."""
    rows, events = [], list[Event]()
    for name, revision in sorted(newest_revisions(below(INCIDENTS, names)).items()):
        row = known.get(name)
        if row is None or row.revision != revision:
            incident = read_revision(run, name, revision)
            row = _incident_row(name, revision, incident)
            events += _incident_events(row) if incident is not None else []
        rows.append(row)
    return rows, events


def _incident_row(name: str, revision: int, incident: Incident | None) -> IncidentRow:
    if incident is None:
        return IncidentRow(name=name, revision=revision)
    action = incident.actions[-1] if incident.actions else ""
    is_own = incident.state == "closed" and not action.startswith("the same trouble as incident ")
    went_back = incident.known_good if is_own else None
    id = parse_id("", went_back or "")
    if went_back is not None and "checkpoint" not in incident.evidence:
        went_back = f"{went_back} {name}"  # one rollback closes all incidents about its saves, but one of a training
    return IncidentRow(
        name=name,
        revision=revision,
        cause=_text(incident.cause),
        step=stored(incident.step),
        at=seconds_of(incident.opened_at),
        onset=stored(incident.known_details().onset),
        open=incident.state != "closed",
        reason=_text(incident.reason),
        went_back=None if went_back is None else _text(went_back),
        went_back_to=None if id is None else id.number,
        went_back_at=None if went_back is None else seconds_of(incident.closed_at or incident.opened_at),
        decided_at=seconds_of(incident.closed_at) if is_own and incident.closed_at else None,
    )


def _incident_events(row: IncidentRow) -> list[Event]:
    event = partial(Event, about=row.name, cause=row.cause or "", text=row.reason)
    opened = event(key=event_key("incident", row.name), kind="incident", at=row.at, step=row.step)
    if row.went_back is None:
        return [opened]
    key = event_key("rollback", row.name)
    return [opened, event(key=key, kind="rollback", at=row.went_back_at, step=row.went_back_to)]


def _action_events(run: Run, names: Iterable[str], known: Noted) -> list[Event]:
    """Return the events of actions that are not known. Raises StorageError."""
    keys, events = {one.event.key for one in known.events if one.event.kind == _ACTION}, []
    for id, state in sorted(filter(None, map(parse_action, below(AUDIT, names)))):
        key = event_key(_ACTION, id, state)
        action = read_state(run, id, state) if key not in keys else None
        if action is None:
            continue
        came_of_it = f": {action.result[0]}" if action.result else ""
        text = action.reason if state == BEGAN else f"{action.state}{came_of_it}"
        events.append(
            Event(
                key=key,
                kind=_ACTION,
                at=seconds_of(action.began_at if state == BEGAN else action.ended_at or ""),
                about=id,
                cause=_text(action.verb),
                text=_text(f"{action.name}: {text}"),
            )
        )
    return events


def _text(text: str) -> str:
    return escape(text[:LONGEST_TEXT])

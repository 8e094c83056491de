"""Incident report: an incident with everything that the records, or the checkpoints themselves, still know about it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from ckptguard.errors import NotFoundError
from ckptguard.inspect.bad_tensors import Culprit, find_culprits
from ckptguard.inspect.diff import MOST_CHANGES, changed_tensors
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.tensor_table import TensorSource, locate
from ckptguard.records.incidents import Incident, list_incidents, read_incident
from ckptguard.records.run import Run
from ckptguard.reporting.causes import likely_causes
from ckptguard.reporting.onset import with_onset
from ckptguard.reporting.report_words import NO_SICKNESS
from ckptguard.runs.history import History
from ckptguard.runs.run_view import RunView
from ckptguard.runs.trainer_log import logged_samples
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.values.ids import CheckpointId, parse_id
from ckptguard.values.incident import (
    MOST_REPLAYED,
    CheckpointFacts,
    Details,
    IncidentReport,
    Magnitude,
    Replay,
    SickTensor,
)
from ckptguard.values.verdict import Finding, Outcome, Severity
from ckptguard.verification.collect_evidence import roles_of

MOST_TENSORS = 50
_MOST_SAMPLES = 2000
_MOST_ERRORS = 20
_OWN_FIELDS = ("run", "details")  # the other fields of a report are those of the incident
_KINDS = {"model": "weight", "optimizer": "optimizer"}


def choose_incident(run: Run, incident_id: str | None) -> Incident:
    """An incident by its id or the start of it; the newest one without. NotFoundError where there is none."""
    every = list_incidents(run)
    exact = read_incident(run, incident_id) if incident_id is not None else None
    found = [exact] if exact is not None else [i for i in every if i.id.startswith(incident_id or "")]
    if incident_id is not None and len(found) > 1:
        raise NotFoundError(f"{incident_id} begins {len(found)} incidents of {run.url}")
    if not every and not found:
        raise NotFoundError(
            f"{run.url} has no incidents", hint=f"`ckptguard verify {shlex.quote(run.url)}` looks for damage now"
        )
    if not found:
        raise NotFoundError(
            f"{run.url} has no incident {incident_id}", hint=f"ckptguard incidents {shlex.quote(run.url)}"
        )
    return found[-1]


def checkpoint_of(incident: Incident) -> CheckpointId | None:
    """The checkpoint that an incident is about, where it names one."""
    about, series = incident.evidence.get("checkpoint"), incident.evidence.get("series")
    return parse_id(series, about) if isinstance(about, str) and isinstance(series, str) else None


def report_of(view: RunView, incident: Incident, *, read: bool = False, work: Work = PLAIN) -> IncidentReport:
    """Return the report of an incident. The conclusions of its closing stay. Missing ones come from the records. With
    `read`, they also come from the bytes of the last good and the first bad checkpoint, if they still exist."""
    details = _bounded(incident.known_details())
    if incident.cause not in NO_SICKNESS:
        history = view.history
        good = _last_good(history, incident, details)
        bad = _first_bad(history, incident, good)
        details = msgspec.structs.replace(
            details,
            last_good=details.last_good or (_facts(history, good) if good else None),
            first_bad=details.first_bad or (_facts(history, bad) if bad else None),
        )
        if not details.samples and details.training is None:
            details = _with_log(view.run, details, bad or good)
        if bad is not None and not details.tensors:
            details = _with_tensors(history, details, bad)
        if read:
            details = _read(view, details, good, bad, work)
    same = {name: getattr(incident, name) for name in IncidentReport.__struct_fields__ if name not in _OWN_FIELDS}
    report = IncidentReport(run=view.run.url, details=details, **same)
    report = msgspec.structs.replace(report, details=with_onset(report))
    if details.causes and not read:
        return report
    return msgspec.structs.replace(
        report, details=msgspec.structs.replace(report.details, causes=likely_causes(report))
    )


def _bounded(details: Details) -> Details:
    """No longer than a report can show, whatever the record holds."""
    return msgspec.structs.replace(
        details,
        samples=tuple(sorted(details.samples[-_MOST_SAMPLES:], key=lambda s: s.step)),
        tensors=details.tensors[:MOST_TENSORS],
        tensors_omitted=details.tensors_omitted + max(0, len(details.tensors) - MOST_TENSORS),
        changes=details.changes[:MOST_CHANGES],
        changes_omitted=details.changes_omitted + max(0, len(details.changes) - MOST_CHANGES),
        causes=details.causes[:MOST_TENSORS],
        replay=_bounded_replay(details.replay) if details.replay is not None else None,
    )


def _bounded_replay(replay: Replay) -> Replay:
    updates, batches = replay.updates[:MOST_REPLAYED], replay.batches[:MOST_TENSORS]
    return msgspec.structs.replace(replay, updates=updates, batches=batches)


def _last_good(history: History, incident: Incident, details: Details) -> CheckpointId | None:
    """Return the checkpoint that training went back to, else the newest good one from before the onset. For a fixed
    name that is its last good save before the one that the incident is about."""
    named = parse_id("", incident.known_good) if incident.known_good else None
    onset = details.onset if details.onset is not None else incident.step
    known = [pair for series in history.names for pair in history.current_verdicts(series).items()]
    if named is not None:
        return next((id for id, _ in known if id.order == named.order), None)
    about = checkpoint_of(incident)
    fixed = about if about is not None and about.step is None else None
    found = (
        id
        for id, current_verdict in known
        if current_verdict.outcome is Outcome.GOOD and _is_before(id, onset, fixed) and not history.is_quarantined(id)
    )
    return max(found, key=lambda id: (id.order, id.series), default=None)


def _is_before(id: CheckpointId, onset: int | None, fixed: CheckpointId | None) -> bool:
    if fixed is not None:
        return id.series == fixed.series and id.generation < fixed.generation
    return id.number is not None and (onset is None or id.number < onset)


def _first_bad(history: History, incident: Incident, good: CheckpointId | None) -> CheckpointId | None:
    """The checkpoint that the incident is about; else the first bad one after the last good one that was noticed."""
    about, after = checkpoint_of(incident), good.number if good is not None else None
    if about is not None and about.series in history.names:
        return about
    if incident.step is None:
        return None
    found = [
        id
        for name in ([good.series] if good is not None else history.names)
        for id, current_verdict in history.current_verdicts(name).items()
        if id.number is not None
        and current_verdict.outcome in (Outcome.BAD, Outcome.SUSPECT)
        and (after is None or after < id.number)
        and id.number <= incident.step
    ]
    return min(found, key=lambda id: (id.order[0], -id.generation, id.series), default=None)


def _facts(history: History, id: CheckpointId) -> CheckpointFacts:
    manifest, verdict = history.manifest(id), history.verdict(id)
    sizes = _recorded_sizes(history, id)
    facts = verdict.facts if verdict is not None else None
    if not sizes and facts is not None and facts.largest_magnitude is not None and facts.largest_tensor is not None:
        sizes = [Magnitude(facts.largest_tensor, facts.largest_magnitude)]
    weighty = [f for f in (verdict.findings if verdict else ()) if f.severity in (Severity.ERROR, Severity.SICKNESS)]
    return CheckpointFacts(
        path=manifest.path if manifest else id.series,
        step=id.number,
        id=str(id),
        outcome=verdict.outcome.value if verdict else "pending",
        largest=_largest(sizes),
        holds=facts.resumable if facts is not None else (),
        world_size=facts.world_size if facts is not None else None,
        errors=tuple((f.check, _said(f)) for f in weighty[:_MOST_ERRORS]),
    )


def _recorded_sizes(history: History, id: CheckpointId) -> list[Magnitude]:
    manifest = history.manifest(id)
    tensors = [t for f in (manifest.files if manifest else ()) for t in f.tensors if t.role == "model"]
    return [Magnitude(t.name, t.largest, t.dtype) for t in tensors if t.largest is not None]


def _said(finding: Finding) -> str:
    about = finding.tensor or finding.file
    return finding.message if about and about in finding.message else finding.sentence


def _largest(sizes: Sequence[Magnitude]) -> tuple[Magnitude, ...]:
    return tuple(sorted(sizes, key=lambda m: -m.largest)[:MOST_TENSORS])


def _with_log(run: Run, details: Details, id: CheckpointId | None) -> Details:
    """With what the trainer itself logged."""
    facts = details.first_bad or details.last_good
    if id is None or facts is None:
        return details
    samples = logged_samples(run, id, facts.path)
    return msgspec.structs.replace(details, samples=samples)


def _with_tensors(
    history: History, details: Details, bad: CheckpointId, source: TensorSource | None = None, work: Work = PLAIN
) -> Details:
    """With what is wrong in the first bad checkpoint: by the records, and by its bytes where there is a `source`."""
    manifest, verdict = history.manifest(bad), history.verdict(bad)
    path = manifest.path if manifest is not None else bad.series
    culprits = find_culprits(source, path, verdict.findings if verdict else (), work=work)
    return msgspec.structs.replace(
        details,
        tensors=tuple(_sick_tensor(c) for c in culprits[:MOST_TENSORS]),
        tensors_omitted=max(0, len(culprits) - MOST_TENSORS),
        tensors_from=path if culprits else None,
    )


def _sick_tensor(culprit: Culprit) -> SickTensor:
    where = culprit.tensor if culprit.check == "finite" else None
    return SickTensor(
        name=where or ": ".join(p for p in (culprit.file, culprit.tensor) if p) or culprit.check,
        kind=_KINDS.get(culprit.role or "", "tensor") if where else "file",
        nan=culprit.nan,
        inf=culprit.inf,
        elements=culprit.elements,
        what=None if culprit.elements is not None else culprit.message,
    )


def _read(view: RunView, details: Details, good: CheckpointId | None, bad: CheckpointId | None, work: Work) -> Details:
    """What the bytes still say: of the last good one, of the first bad one, and what sets the two apart."""
    history, wanted = view.history, {good, bad} - {None}
    found: dict[CheckpointId | None, TensorSource | None]
    found = {state.id: locate(view, state) for state in survey(view) if state.id in wanted}
    before, after = found.get(good), found.get(bad)
    sizes = _recorded_sizes(history, good) if good is not None else []
    if before is not None and details.last_good is not None and len(details.last_good.largest) < 2:
        sizes = _magnitudes(before, work) or sizes
        known = msgspec.structs.replace(details.last_good, largest=_largest(sizes) or details.last_good.largest)
        details = msgspec.structs.replace(details, last_good=known)
    if after is not None and bad is not None and details.tensors_from != "memory":
        details = _with_tensors(history, details, bad, after, work)
    if before is not None and after is not None and good is not None and bad is not None and good.series == bad.series:
        by_name = {m.tensor: m.largest for m in sizes}
        changes, omitted, note = changed_tensors(before, after, by_name, work=work)
        details = msgspec.structs.replace(details, changes=changes, changes_omitted=omitted, changes_note=note)
    return details


def _magnitudes(source: TensorSource, work: Work) -> list[Magnitude]:
    found = work.scanner(source.storage, source.checkpoint.files, ScanOptions(md5=False), work.progress).files
    roles = roles_of(found)
    return [
        Magnitude(tensor.name, numbers.largest, tensor.dtype)
        for file in found
        for tensor, role, numbers in zip(file.structure.tensors, roles[file.entry.key], file.numbers, strict=True)
        if numbers is not None and role == "model"
    ]

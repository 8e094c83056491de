"""Kept damage: a kept copy's bytes are wrong. It counts no more, and the ledger and an incident say so."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.incidents.open_and_close import leave_report
from ckptguard.keep.copies import put_aside
from ckptguard.records.incidents import Incident, list_incidents, open_incident
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.records.ledger import append_verdict
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.file_signatures import entry_now
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.scan.reread import WrongFile
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Finding, Outcome, Severity, limit_findings
from ckptguard.version import __version__

CHECK = "kept"
_SAID = "in the kept copy: "


def record_kept_damage(
    view: RunView, copy: KeptCopy, manifest: Manifest, wrong: Sequence[WrongFile], *, source: str
) -> tuple[tuple[Finding, ...], Incident | None]:
    """Set the copy aside, and record what is wrong with it: as warnings where the place still holds the generation,
    else as errors, for then no whole copy is left. A finding names each tensor that was hit, or the file where none can
    be named. Returns the findings, and the incident unless there is one."""
    run = view.run
    with run_lock(run):
        if read_kept(run, copy.id) != copy:
            return (), None  # released meanwhile
        view.refresh(copy.series)
        alone = not _in_place(view, manifest)
        severity = Severity.ERROR if alone else Severity.WARNING
        findings = limit_findings(
            [
                Finding(check=CHECK, severity=severity, message=_SAID + one.message, file=one.file, tensor=tensor)
                for one in wrong
                for tensor in one.tensors or (None,)
            ]
        )
        before = view.history.verdict(copy.id)
        if before is not None and not set(findings) <= set(before.findings):
            verdict = msgspec.structs.replace(
                before,
                outcome=Outcome.BAD if alone else before.outcome,
                findings=(*(f for f in before.findings if f.check != CHECK), *findings),
                checked_at=utc_now(),
                version=__version__,
                digests=("blake3",),
                seconds=None,
                place_damaged=before.place_damaged or alone,
                content=sealed_outcome(before) if alone else before.content,
            )
            view.history.note_verdict(copy.series, append_verdict(run, verdict))
        incident = _incident(run, copy, findings, source)  # before anybody can repair it, who closes it
        put_aside(run, copy)
    return findings, incident


def _in_place(view: RunView, manifest: Manifest) -> bool:
    """Whether the place is where this generation lies, as far as records and sizes tell."""
    id, history = manifest.id, view.history
    verdict = history.verdict(id)
    if verdict is None or verdict.place_damaged or history.current_if_readable(id.series, id.step, manifest.path) != id:
        return False
    found = ((entry_now(view.run.storage, file.path), file) for file in manifest.files)
    return all(entry is not None and entry.size == file.size for entry, file in found)


def _incident(run: Run, copy: KeptCopy, findings: tuple[Finding, ...], source: str) -> Incident | None:
    about = {"kept_copy": str(copy.id), "series": copy.series, "path": copy.path}
    if any(about.items() <= i.evidence.items() and i.state != "closed" for i in list_incidents(run)):
        return None
    first = findings[0]
    where = f"{first.file}: {first.tensor}" if first.tensor else first.file
    incident = open_incident(
        run,
        step=copy.step,
        cause="damage",
        reason=f"the kept copy of {copy.path} is damaged: {where}: {first.message}",
        evidence=about,
        source=source,
    )
    leave_report(run, incident)
    return incident

"""Verify one checkpoint of a run: read every byte once, judge, record."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from ckptguard.checks import Evidence, facts_of, run_checks
from ckptguard.errors import (
    BusyError,
    ChangedWhileReadError,
    CouldNotTellError,
    ObjectMissingError,
    ResavingError,
)
from ckptguard.keep.copies import put_aside
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.clock import utc_now
from ckptguard.records.kept import read_kept
from ckptguard.records.ledger import append_verdict
from ckptguard.records.run import Run
from ckptguard.records.run_settings import allowed_nonfinite
from ckptguard.runs.file_signatures import Seen, signature_seen
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.listing import find_checkpoint
from ckptguard.runs.results import Checked
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.scan import Progress, Scanner, ScanOptions, scan_files
from ckptguard.scan.result import Scan
from ckptguard.values.ids import checkpoint_id
from ckptguard.values.manifest import Manifest, identity
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Facts, Finding, Outcome, Severity, Verdict, is_clearance, judge, limit_findings
from ckptguard.verify.collect_evidence import collect_evidence, manifest_files, scan_checkpoint
from ckptguard.verify.compare_copy import copy_differs
from ckptguard.verify.damage_or_resave import Change, classify_change
from ckptguard.verify.recorded_md5 import md5_is_recorded
from ckptguard.verify.seal import seal_observed
from ckptguard.version import __version__


class Resave(enum.Enum):
    """What to do about a sealed checkpoint of which some files were saved anew and others were not."""

    JUDGE = "judge"  # what lies there now is no whole checkpoint: BAD
    WAIT = "wait"  # raise ResavingError: it may still complete
    GIVE_UP = "give up"  # INCOMPLETE, until it completes after all


_RACES = 4  # other processes may seal the same checkpoint meanwhile; then look again


def verify_checkpoint(
    run: Run,
    checkpoint: Checkpoint,
    settings: Settings,
    *,
    scanner: Scanner = scan_files,
    record: bool = True,
    md5: bool = True,
    resealed: bool = False,
    resave: Resave = Resave.JUDGE,
    reference: Manifest | None = None,
    notes: tuple[Finding, ...] = (),
    progress: Progress | None = None,
) -> Checked:
    """Verify a checkpoint in place, now, and record the verdict unless `record` is false; `notes` go into it.

    The caller has seen to it that the files are quiet. `resealed` takes what lies there as a new generation, whatever
    the manifest says. `resave` says what to do about a re-save that is only half done. `md5`: take MD5 too, unless
    the settings leave it out where it is on record.

    Raises CouldNotTellError and its kinds when there can be no verdict: a file changed or vanished while it was read,
    storage failed, the scanning process died.
    """
    if md5 and settings.digest == "blake3" and not resealed:
        md5 = not md5_is_recorded(run, checkpoint)
    options = ScanOptions(md5=md5)
    scan = scan_checkpoint(run.storage, checkpoint, options, scanner=scanner, progress=progress)
    now = find_checkpoint(run, checkpoint.path)
    if now is None or now.signature != checkpoint.signature:
        raise ChangedWhileReadError(f"{checkpoint.path} changed while it was read", key=checkpoint.path)
    for _ in range(_RACES):
        history = load_history(run)
        try:
            return _judge_and_record(
                run,
                history,
                checkpoint,
                scan,
                settings,
                scanner=scanner,
                record=record,
                md5=md5,
                resealed=resealed,
                resave=resave,
                user_reference=reference,
                notes=notes,
            )
        except BusyError:
            continue
    raise CouldNotTellError(f"other processes kept sealing {checkpoint.path} at the same time")


def _judge_and_record(
    run: Run,
    history: History,
    checkpoint: Checkpoint,
    scan: Scan,
    settings: Settings,
    *,
    scanner: Scanner,
    record: bool,
    md5: bool,
    resealed: bool,
    resave: Resave,
    user_reference: Manifest | None,
    notes: tuple[Finding, ...],
) -> Checked:
    series, step = checkpoint.series, checkpoint.step
    key = None if resealed else history.current(series, step, checkpoint.path)
    sealed = history.manifest(series, key) if key else None
    layout = LAYOUTS[checkpoint.layout]
    change = Change.SAME
    if key is not None and sealed is not None:
        found = {f.entry.key: f for f in scan.files}
        first = collect_evidence(run.storage, checkpoint, scan, sealed=sealed)
        change = classify_change(
            sealed,
            found,
            whole=not any(f.structure.problems for f in scan.files) and not any(g.fatal for g in first.gaps),
            last_written=layout.last_written(sealed.path),
            ever_good=history.was_good(series, key),
            sealed_by_writer=layout.sealed_by_writer,
            other_contents=_other_contents(history, series, key),
            facts=_facts(history, series, key),
        )
        if change is Change.RESAVING and resave is Resave.WAIT:
            raise ResavingError(f"{checkpoint.path} is being saved again", key=checkpoint.path)
        if change is Change.RESAVED:
            key, sealed = None, None
    if key is None:
        key = (step, history.next_generation(series, step))
    chosen = (user_reference, None) if user_reference else history.reference(series, *key)
    evidence = collect_evidence(
        run.storage,
        checkpoint,
        scan,
        sealed=sealed,
        reference=chosen[0] if chosen else None,
        reference_facts=chosen[1].facts if chosen and chosen[1] else None,
        previous=history.previous(series, step),
        allow_nonfinite=(*settings.allow_nonfinite, *allowed_nonfinite(run)),
        trust_globals=settings.trust_globals,
    )
    findings = run_checks(evidence)
    if layout.sealed_by_writer and sealed is None:
        findings.append(_never_committed())
    before = history.verdict(series, key)
    findings = [*_with_suspicion(findings, before, *_verdicts_of_the_same_bytes(history, evidence, key)), *notes]
    outcome = judge(findings, sealed=sealed is not None)
    if change is Change.RESAVING and resave is Resave.GIVE_UP:
        outcome = Outcome.INCOMPLETE
    damaged = sealed is not None and change is not Change.SAME
    if record:
        commits = sealed is None and outcome is not Outcome.INCOMPLETE and not layout.sealed_by_writer
        if commits:
            sealed = seal_observed(run, evidence, key[1])
        _record(
            run,
            history,
            evidence,
            key,
            outcome,
            limit_findings(findings),
            before,
            scan.seconds,
            md5=md5,
            damaged=damaged,
            seen=signature_seen(checkpoint, sealed) if sealed is not None and outcome is Outcome.GOOD else (),
        )
        if damaged and sealed is not None:
            _confirm_kept(run, series, key, sealed, scanner)
    return Checked(
        path=checkpoint.path,
        series=series,
        layout=checkpoint.layout,
        step=step,
        id=checkpoint_id(*key) if record or sealed else None,
        outcome=outcome,
        digest_origin=sealed.digest_origin if sealed else None,
        bytes=checkpoint.bytes,
        seconds=round(scan.seconds, 3),
        findings=limit_findings(findings),
    )


def _facts(history: History, series: str, key: Key) -> Facts:
    verdict = history.verdict(series, key)
    return verdict.facts if verdict is not None and not verdict.place_damaged else Facts()


def _other_contents(history: History, series: str, key: Key) -> list[Manifest]:
    others = sorted(
        (k for k in history.sealed(series) if k[0] != key[0]), key=lambda k: abs((k[0] or 0) - (key[0] or 0))
    )
    manifests = (history.manifest(series, k) for k in others[:20])
    return [m for m in manifests if m is not None]


def _never_committed() -> Finding:
    message = "its writer never sealed it: the save did not finish"
    return Finding(check="completeness", severity=Severity.ERROR, message=message, file=None)


def _with_suspicion(findings: list[Finding], *before: Verdict | None) -> list[Finding]:
    """SUSPECT belongs to a generation: re-verifying keeps it, and only `clear` lifts it, for good."""
    past = next((v for v in before if v is not None and (_sickness(v) or _cleared(v))), None)
    if past is None:
        return findings
    cleared = _cleared(past)
    if cleared:
        findings = [
            msgspec.structs.replace(f, severity=Severity.NOTICE) if f.severity is Severity.SICKNESS else f
            for f in findings
        ]
    carried = _sickness(past)
    again = {f.check for f in carried}
    still = [f for f in findings if f.check not in again or f.severity is Severity.ERROR]
    return [*still, *carried, *cleared]


def _sickness(verdict: Verdict) -> list[Finding]:
    return [f for f in verdict.findings if f.severity is Severity.SICKNESS]


def _cleared(verdict: Verdict) -> list[Finding]:
    return [f for f in verdict.findings if is_clearance(f)]


def _verdicts_of_the_same_bytes(history: History, evidence: Evidence, key: Key) -> Iterator[Verdict | None]:
    """SUSPECT follows the bytes: of a checkpoint that was moved back from quarantine, or resealed without having been
    saved again. A save of its own (other times and inodes) is not suspect, even with equal bytes."""
    checkpoint = evidence.checkpoint
    present = {e.key: e.signature for e in checkpoint.entries}
    for generation in history.generations(checkpoint.series, checkpoint.step):
        earlier = (checkpoint.step, generation)
        manifest = history.manifest(checkpoint.series, earlier)
        if earlier == key or manifest is None or manifest.path != checkpoint.path:
            continue
        written = {f.path: (f.size, f.mtime_ns, f.inode, f.etag) for f in manifest.files}
        if written == present and identity(manifest.files) == identity(manifest_files(evidence)):
            yield history.verdict(checkpoint.series, earlier)


def _record(
    run: Run,
    history: History,
    evidence: Evidence,
    key: Key,
    outcome: Outcome,
    findings: tuple[Finding, ...],
    before: Verdict | None,
    seconds: float,
    *,
    md5: bool,
    damaged: bool,
    seen: tuple[Seen, ...],
) -> None:
    """Append the verdict; a re-check that changes nothing, also not how the storage describes the files, appends
    nothing."""
    weighty = [f for f in findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
    standing = history.standings(evidence.checkpoint.series).get(key)
    torn = standing is not None and (before is None or standing.outcome is not before.outcome)
    if before is not None and before.outcome is outcome and not torn:
        known = [f for f in before.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
        if {_essence(f) for f in known} == {_essence(f) for f in weighty} and seen in (
            (),
            before.seen,
        ):
            return
    verdict = Verdict(
        series=evidence.checkpoint.series,
        step=key[0],
        generation=key[1],
        outcome=outcome,
        findings=findings,
        checked_at=utc_now(),
        version=__version__,
        digests=("blake3", "md5") if md5 else ("blake3",),
        seconds=round(seconds, 3),
        facts=facts_of(evidence),
        place_damaged=damaged,
        seen=seen,
        read_back="bytes",
        content=sealed_outcome(before) if damaged and before is not None else None,
    )
    append_verdict(run, verdict)


def _essence(finding: Finding) -> tuple[object, ...]:
    return (finding.check, finding.severity, finding.file, finding.tensor)


def _confirm_kept(run: Run, series: str, key: Key, manifest: Manifest, scanner: Scanner) -> None:
    """The bytes in place were damaged: the kept copy counts only if its own bytes are right (a hard link shares the
    damage, a copy does not)."""
    copy = read_kept(run, series, *key)
    if copy is not None:
        try:
            wrong = copy_differs(run.records, copy.folder + "/", manifest, scanner=scanner)
        except ObjectMissingError:
            wrong = "gone"
        if wrong:
            put_aside(run, copy)

"""The JSON documents that scripts rely on; `DOCUMENTS.md` beside this file shows one example of each.

Every document starts ``{"schema": 1, "command": ...}``, keys come in the order written here, and what is not known
is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ckptguard.values.ids import checkpoint_id

if TYPE_CHECKING:
    from ckptguard.inspect.bisect import Bisection
    from ckptguard.inspect.diff import Diff
    from ckptguard.inspect.doctor import Diagnosis
    from ckptguard.inspect.list_states import CheckpointState
    from ckptguard.inspect.show import Shown
    from ckptguard.inspect.status import Status
    from ckptguard.recover.restore import Restored
    from ckptguard.recover.roll_back import RolledBack
    from ckptguard.runs.find_known_good import KnownGood
    from ckptguard.runs.results import Checked, Report
    from ckptguard.values.manifest import Tensor
    from ckptguard.values.verdict import Finding, Verdict

SCHEMA = 1
Document = dict[str, object]


def document(command: str, /, **fields: object) -> Document:
    """The start that every document has, then its own keys in order."""
    return {"schema": SCHEMA, "command": command, **{name: plain(value) for name, value in fields.items()}}


def plain(value: object) -> object:
    """The value as JSON knows it; a number that is not finite is null, because JSON has no word for it."""
    built = msgspec.to_builtins(value)
    return _finite(built)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def verify_document(report: Report) -> Document:
    """What `verify` found."""
    return document(
        "verify",
        target=report.target,
        kind=report.kind,
        outcome=report.outcome,
        checkpoints=[checked_fields(c) for c in report.checkpoints],
    )


def checked_fields(checked: Checked) -> Document:
    """One checkpoint of a verification."""
    return {
        "path": checked.path,
        "series": checked.series,
        "layout": checked.layout,
        "step": checked.step,
        "id": checked.id,
        "outcome": checked.outcome.value,
        "digest_origin": checked.digest_origin,
        "bytes": checked.bytes,
        "seconds": None if checked.seconds is None else round(checked.seconds, 3),
        "findings": [finding_fields(f) for f in checked.findings],
    }


def finding_fields(finding: Finding) -> Document:
    """One finding; `omitted` is there only in the one that says how many were left out."""
    fields: Document = {
        "check": finding.check,
        "severity": finding.severity.value,
        "file": finding.file,
        "tensor": finding.tensor,
        "count": finding.count,
        "expected": finding.expected,
        "found": finding.found,
        "message": finding.message,
    }
    if isinstance(finding.omitted, int):
        fields["omitted"] = finding.omitted
    return fields


def known_good_fields(known_good: KnownGood) -> Document:
    """The known-good checkpoint; `path` is usable as it is."""
    return {
        "path": known_good.path,
        "series": known_good.series,
        "step": known_good.step,
        "id": known_good.id,
        "kept": known_good.kept,
        "place": known_good.place,
        "verified_at": known_good.verified_at,
        "reason": known_good.reason,
    }


def known_good_document(known_good: KnownGood) -> Document:
    """The answer of `known-good`."""
    return document("known-good", **known_good_fields(known_good))


def state_fields(state: CheckpointState) -> Document:
    """Where one generation of a checkpoint stands by the records."""
    return {
        "path": state.path,
        "series": state.series,
        "layout": state.layout,
        "step": state.step,
        "id": state.id,
        "outcome": state.outcome.value,
        "in_place": state.in_place,
        "kept": state.kept,
        "kept_how": state.kept_how,
        "quarantined": state.quarantined,
        "trashed": state.trashed,
        "verified_at": state.verified_at,
        "bytes": state.bytes,
        "kept_bytes": state.kept_bytes,
        "pins": list(state.pins),
        "reason": state.reason,
    }


def list_document(target: str, states: Sequence[CheckpointState]) -> Document:
    """The answer of `list`."""
    return document("list", target=target, checkpoints=[state_fields(s) for s in states])


def status_document(status: Status) -> Document:
    """The answer of `status`."""
    return document(
        "status",
        target=status.run,
        protected=status.protected,
        explanation=status.explanation,
        known_good=None if status.known_good is None else known_good_fields(status.known_good),
        known_good_age_seconds=status.known_good_age_seconds,
        pending=status.pending,
        outcomes=status.outcomes,
        last_incident=status.last_incident and msgspec.structs.replace(status.last_incident, details=msgspec.UNSET),
        daemon=status.daemon,
        kept_kinds=status.kept_kinds,
        replicas=[
            {"url": r.url, "behind": r.behind, "last_good": r.last_good, "trouble": r.trouble} for r in status.replicas
        ],
    )


def restore_document(target: str, restored: Restored) -> Document:
    """The answer of `restore`; `path` is usable as it is."""
    return document(
        "restore",
        target=target,
        path=restored.path,
        series=restored.series,
        step=restored.step,
        id=restored.id,
        outcome=restored.outcome,
        bytes=restored.bytes,
        kept=restored.kept,
        source=restored.source,
    )


def rollback_document(target: str, rolled_back: RolledBack) -> Document:
    """The answer of `rollback`."""
    return document(
        "rollback",
        target=target,
        dry_run=rolled_back.dry_run,
        known_good=known_good_fields(rolled_back.known_good),
        quarantined=rolled_back.quarantined,
        put_back=rolled_back.put_back,
        unverified=rolled_back.unverified if rolled_back.dry_run else (),
    )


def verdict_fields(verdict: Verdict) -> Document:
    """One verdict on one generation."""
    return {
        "outcome": verdict.outcome.value,
        "checked_at": verdict.checked_at,
        "version": verdict.version,
        "digests": list(verdict.digests),
        "findings": [finding_fields(f) for f in verdict.findings],
    }


def clear_document(target: str, verdict: Verdict) -> Document:
    """The answer of `clear`: the verdict that lifts the suspicion."""
    return document(
        "clear",
        target=target,
        series=verdict.series,
        step=verdict.step,
        id=checkpoint_id(verdict.step, verdict.generation),
        **verdict_fields(verdict),
    )


def tensor_fields(tensor: Tensor) -> Document:
    """One tensor of a manifest."""
    from ckptguard.inspect.show import fp16_share, stored_bytes

    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "role": tensor.role,
        "bytes": stored_bytes(tensor),
        "largest": tensor.largest,
        "rms": tensor.rms,
        "fp16_headroom": fp16_share(tensor),
    }


def show_document(shown: Shown) -> Document:
    """The answer of `show`; paths of files are those of the manifest."""
    manifest = shown.manifest
    files = [
        {
            "path": file.path,
            "size": file.size,
            "format": file.format,
            "md5": file.md5,
            "tensors": [tensor_fields(t) for t in file.tensors],
        }
        for file in manifest.files
    ]
    return document(
        "show",
        target=shown.target,
        series=manifest.series,
        layout=manifest.layout,
        step=manifest.step,
        id=shown.id,
        sealed=shown.sealed,
        digest_origin=manifest.digest_origin if shown.sealed else None,
        bytes=manifest.bytes,
        metrics=manifest.given_metrics(),
        files=files,
        verdict=verdict_fields(shown.verdict) if shown.verdict else None,
        history=shown.history,
    )


def diff_fields(diff: Diff, top: int | None) -> Document:
    """What two checkpoints differ in; `top` limits the tensors of each kind of change."""
    from ckptguard.inspect.diff import shown

    kept = shown(diff.changes, top)
    return {
        "a": diff.a,
        "b": diff.b,
        "same": diff.same,
        "counts": diff.counts,
        "prefixes": diff.prefixes,
        "changes": kept,
        "omitted": len(diff.changes) - len(kept),
        "damaged": diff.damaged,
    }


def diff_document(diff: Diff, top: int | None) -> Document:
    """The answer of `diff`."""
    return document("diff", **diff_fields(diff, top))


def bisect_document(found: Bisection, top: int | None) -> Document:
    """The answer of `bisect`."""
    return document(
        "bisect",
        target=found.target,
        series=found.series,
        stages=found.stages,
        last_good=found.last_good,
        first_bad=found.first_bad,
        findings=[finding_fields(f) for f in found.findings],
        culprits=found.culprits,
        diff=None if found.diff is None else diff_fields(found.diff, top),
        notes=found.notes,
    )


def doctor_document(found: Diagnosis) -> Document:
    """What a storage does and does not."""
    return document("doctor", target=found.url, outcome=found.outcome, probes=found.probes, seconds=found.seconds)

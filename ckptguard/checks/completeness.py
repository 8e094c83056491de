"""Is everything there that the layout, the manifest and the reference say belongs to it?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.manifest import File, Manifest
from ckptguard.verdict import Finding, Severity

_STATE_ROLES = ("model", "optimizer", "ema")


def check_completeness(evidence: Evidence) -> Iterator[Finding]:
    """Errors for gaps that make the checkpoint unusable, warnings for the others.

    Files added after the seal (evaluation results, a README) are a notice.
    """
    for gap in evidence.gaps:
        severity = Severity.ERROR if gap.fatal else Severity.WARNING
        yield _finding(severity, gap.message, gap.file)
    if evidence.sealed is not None:
        yield from _against_seal(evidence, evidence.sealed)
    if evidence.reference is not None:
        yield from _against_reference(evidence, evidence.reference)


def _against_seal(evidence: Evidence, sealed: Manifest) -> Iterator[Finding]:
    present = set(evidence.checkpoint.files)
    for file in sealed.files:
        if file.path not in present:
            yield _finding(Severity.ERROR, "the manifest lists this file, but it is not there", file.path)
    for path in sorted(present - {f.path for f in sealed.files}):
        yield _finding(Severity.NOTICE, "was added after the checkpoint was sealed", path)


def _against_reference(evidence: Evidence, reference: Manifest) -> Iterator[Finding]:
    """Files that the reference has, digits in names aside, and this checkpoint has not."""
    shapes = {_shape(evidence.checkpoint.inside(key)) for key in evidence.checkpoint.files}
    for file in reference.files:
        inside = file.path.removeprefix(reference.path + "/")
        if evidence.checkpoint.layout != "file" and _shape(inside) not in shapes:
            what = f"{reference.path} ({reference.id}) has {inside}; this checkpoint has nothing like it"
            yield _finding(_severity(evidence, reference, file), what, None)


def _severity(evidence: Evidence, reference: Manifest, file: File) -> Severity:
    roles = {t.role for t in file.tensors}.intersection(_STATE_ROLES)
    if roles == {"optimizer"} and precedes(evidence, reference):
        return Severity.NOTICE  # optimizer state appears with the first update
    return Severity.ERROR if roles else Severity.WARNING


def precedes(evidence: Evidence, reference: Manifest) -> bool:
    """Whether the checkpoint is of an earlier step than its reference, which only the first ones of a run are."""
    step = evidence.checkpoint.step
    return step is not None and reference.step is not None and step < reference.step


def _shape(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _finding(severity: Severity, message: str, file: str | None) -> Finding:
    return Finding(check="completeness", severity=severity, message=message, file=file)

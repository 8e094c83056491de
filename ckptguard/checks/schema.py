"""Do keys, shapes and dtypes match the reference?"""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.checks.completeness import precedes
from ckptguard.checks.evidence import Evidence
from ckptguard.manifest import Manifest
from ckptguard.schema import SchemaDifference, compare_schemas, schema_of
from ckptguard.verdict import Finding, Severity

_ACCEPT = "if the change is deliberate: ckptguard accept RUN --step N"


def check_schema(evidence: Evidence) -> Iterator[Finding]:
    """Errors for model tensors that are missing, unexpected, reshaped or re-typed, and for optimizer state that
    vanished: against this checkpoint's own manifest if it was sealed, and against the reference."""
    for manifest, where in (
        (evidence.sealed, "the sealed manifest"),
        (evidence.reference, evidence.reference and f"{evidence.reference.path} ({evidence.reference.id})"),
    ):
        if manifest is not None and where:
            for role in ("model", "ema"):
                yield from _compare_role(evidence, manifest, role, where)
            yield from _optimizer(evidence, manifest, where)


def _compare_role(evidence: Evidence, reference: Manifest, role: str, where: str) -> Iterator[Finding]:
    expected = schema_of(reference, role)
    tensors = [t for t in evidence.tensors() if t.role == role]
    if not expected or (not tensors and not evidence.scan.files):
        return
    broken = {f.entry.key for f in evidence.scan.files if f.structure.problems}
    sources = {t.name: f.path for f in reference.files for t in f.tensors}
    places = {t.name: t.file for t in tensors}
    aliases = {a for f in evidence.scan.files for a in f.structure.metadata if a != "format"}
    found = {t.name: (t.dtype, t.shape) for t in tensors}
    known = {a for f in reference.files for a in f.aliases}
    difference = compare_schemas(
        expected, {n: s for n, s in found.items() if n not in known or n in expected}, aliases=aliases
    )
    for finding in _differences(difference, where):
        name = finding.tensor or ""
        file = places.get(name) or (sources.get(name) if reference is evidence.sealed else None)
        absent = file is not None and evidence.scan.file(file) is None
        if file not in broken and not absent:  # a broken or missing file is named by its own findings already
            yield Finding(
                check="schema",
                severity=Severity.ERROR,
                message=finding.message,
                file=file,
                tensor=finding.tensor,
                expected=finding.expected,
                found=finding.found,
            )


def _differences(difference: SchemaDifference, where: str) -> Iterator[Finding]:
    if difference.prefix:
        added, removed = difference.prefix
        change = f'"{added}" was put before' if added else f'"{removed}" is gone from'
        if added and removed:
            change = f'"{removed}" became "{added}" in'
        yield _finding(f"{change} every tensor name, compared with {where}; {_ACCEPT}")
    for name in difference.missing:
        yield _finding(f"{where} has this tensor; here it is missing; {_ACCEPT}", name)
    for name in difference.unexpected:
        yield _finding(f"{where} does not have this tensor; {_ACCEPT}", name)
    for name, shape, now in difference.reshaped:
        yield _finding(f"the shape differs from {where}; {_ACCEPT}", name, str(list(shape)), str(list(now)))
    for name, dtype, kind in difference.retyped:
        yield _finding(f"the dtype differs from {where}; {_ACCEPT}", name, dtype, kind)


def _optimizer(evidence: Evidence, reference: Manifest, where: str) -> Iterator[Finding]:
    """Optimizer state may appear after the first step, but never vanish."""
    if precedes(evidence, reference):
        return
    expected = {t.name: f.path for f in reference.files for t in f.tensors if t.role == "optimizer"}
    found = {t.name for t in evidence.tensors() if t.role == "optimizer"}
    broken = {f.entry.key for f in evidence.scan.files if f.structure.problems}
    if (
        not expected
        or broken
        or any(f.path not in evidence.checkpoint.files for f in (evidence.sealed.files if evidence.sealed else ()))
    ):
        return
    lost = sorted(set(expected) - found)
    if lost:
        yield Finding(
            check="schema",
            severity=Severity.ERROR,
            message=f"{len(lost)} optimizer tensors that {where} has are gone",
            file=expected[lost[0]] if reference is evidence.sealed else None,
            tensor=lost[0],
            count=len(lost),
        )


def _finding(message: str, tensor: str | None = None, expected: str | None = None, found: str | None = None) -> Finding:
    return Finding(
        check="schema", severity=Severity.ERROR, message=message, tensor=tensor, expected=expected, found=found
    )

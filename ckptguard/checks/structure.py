"""Is every file whole and readable as its format, and a regular file?"""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.formats import tensor_suffix
from ckptguard.values.verdict import Finding, Severity


def check_structure(evidence: Evidence) -> Iterator[Finding]:
    """An error for each structural problem, a sickness for each doubt; a warning for what is no regular file and holds
    no tensors."""
    for file in evidence.scan.files:
        for p in file.structure.problems:
            where = (file.entry.key, p.tensor)
            severity = Severity.SICKNESS if p.doubt else Severity.ERROR
            yield Finding("structure", severity, p.message, *where, expected=p.expected, found=p.found)
    for entry in evidence.checkpoint.irregular:
        what = "a link; links are not followed" if entry.kind == "link" else "not a regular file"
        severity = Severity.ERROR if tensor_suffix(entry.key) else Severity.WARNING
        yield Finding("structure", severity, f"{what}: it was not read", entry.key)

"""Check that every file is whole, readable in its format, and regular."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.formats import tensor_suffix
from ckptguard.values.verdict import Finding, Severity

_IRREGULAR = {"link": "a link; links are not followed", "unnamed": "its name is not valid Unicode"}


def check_structure(evidence: Evidence) -> Iterator[Finding]:
    """Report each structural problem as an error and each doubt as a sickness. So is a text under a tensor file's name
    an error, unless files with tensors are beside it. A file that is not regular and holds no tensors is a warning."""
    for file in evidence.scan.files:
        for p in file.structure.problems:
            where = (file.entry.key, p.tensor)
            severity = Severity.SICKNESS if p.doubt else Severity.ERROR
            yield Finding("structure", severity, p.message, *where, expected=p.expected, found=p.found)
    for file in evidence.scan.files if not any(file.structure.spans for file in evidence.scan.files) else ():
        if file.structure.format == "unrecognised" and not file.structure.problems:
            yield Finding("structure", Severity.ERROR, file.structure.metadata["unrecognised"], file.entry.key)
    for entry in evidence.checkpoint.irregular:
        what = _IRREGULAR.get(entry.kind, "not a regular file")
        severity = Severity.ERROR if tensor_suffix(entry.key) else Severity.WARNING
        yield Finding("structure", severity, f"{what}: it was not read", entry.key)

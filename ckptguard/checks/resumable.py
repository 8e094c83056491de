"""What would a resume from this checkpoint bring back?"""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.layouts.roles import file_role, number_role
from ckptguard.verdict import Finding, Severity

ROLES = ("model", "optimizer", "scheduler", "scaler", "rng", "data")


def check_resumable(evidence: Evidence) -> Iterator[Finding]:
    """A notice where a checkpoint holds only weights: resuming would restart the optimizer silently."""
    present = roles_present(evidence)
    if "model" in present and "optimizer" not in present:
        yield Finding(
            check="resumable",
            severity=Severity.NOTICE,
            message="it holds no optimizer state: a resume would start the optimizer anew",
        )


def roles_present(evidence: Evidence) -> tuple[str, ...]:
    """The roles that files, tensors or numbers of this checkpoint have, in a fixed order."""
    found = {t.role for t in evidence.tensors()} | {file_role(f.entry.key) for f in evidence.scan.files}
    found |= {
        number_role(f.entry.key, leaf.name, f.structure.containers)
        for f in evidence.scan.files
        for leaf in f.structure.leaves
    }
    return tuple(role for role in ROLES if role in found)

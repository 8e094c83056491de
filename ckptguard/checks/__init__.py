"""Pure functions from evidence to findings. One file per check, one line in the table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from ckptguard.checks.completeness import check_completeness
from ckptguard.checks.digests import check_digests
from ckptguard.checks.drift import check_drift
from ckptguard.checks.evidence import Evidence
from ckptguard.checks.finite import check_finite
from ckptguard.checks.headroom import check_headroom, largest_weight
from ckptguard.checks.moved_together import check_moved_together
from ckptguard.checks.order import check_order
from ckptguard.checks.pickle_safety import check_pickle_safety
from ckptguard.checks.resumable import check_resumable, roles_present, stated_world_size, taken_from
from ckptguard.checks.same_save import check_one_save
from ckptguard.checks.schema import check_schema
from ckptguard.checks.stale import check_stale, moments_present, skipped_steps, unchanged
from ckptguard.checks.structure import check_structure
from ckptguard.checks.understood import check_understood
from ckptguard.checks.zeros import check_zeros
from ckptguard.values.verdict import MOST_CONSTANT, Facts, Finding, Severity

CHECKS: tuple[Callable[[Evidence], Iterable[Finding]], ...] = (
    check_structure,
    check_understood,
    check_completeness,
    check_one_save,
    check_moved_together,
    check_digests,
    check_finite,
    check_zeros,
    check_schema,
    check_order,
    check_stale,
    check_drift,
    check_pickle_safety,
    check_resumable,
    check_headroom,
)

# What they find, no other save changes, but for infinities that the reference has, too.
_ALONE = (check_structure, check_completeness, check_one_save, check_digests, check_finite, check_headroom)

__all__ = ["CHECKS", "Evidence", "facts_of", "is_bad_alone", "run_checks"]


def run_checks(evidence: Evidence, *, alone: bool = False) -> list[Finding]:
    """Return the findings of all checks, in the table's order. `alone`: of those that compare with no other save. A
    file that a plugin read adds to them, and takes nothing away from what is found in the others."""
    findings = [finding for check in (_ALONE if alone else CHECKS) for finding in check(evidence)]
    if any(file.structure.plugin for file in evidence.scan.files):
        from ckptguard.checks.without_plugins import without_plugins

        rest = without_plugins(evidence)
        heavy = (f for f in run_checks(rest, alone=alone) if f.severity in (Severity.ERROR, Severity.SICKNESS))
        findings += [f for f in heavy if rest.scan.files and f not in findings]
    return findings


def is_bad_alone(evidence: Evidence) -> bool:
    """True if a checkpoint's own bytes make it bad, whatever is on record of others: damage, or NaN. A reference may
    have any infinities, too."""
    infinite = (t.name for t in evidence.tensors() if t.numbers and (t.numbers.posinf or t.numbers.neginf))
    sick = {t.name for t in evidence.tensors() if t.numbers and t.numbers.nan}
    allowed = (*evidence.allow_nonfinite, *(name for name in infinite if name not in sick))
    kindest = msgspec.structs.replace(evidence, allow_nonfinite=allowed)
    found = itertools.chain(check_structure(kindest), check_finite(kindest))
    return any(finding.severity is Severity.ERROR for finding in found)


def facts_of(evidence: Evidence) -> Facts:
    """Return the numbers that later checks of the series compare with; of files that a plugin read only if there are
    no others."""
    if any(file.structure.plugin for file in evidence.scan.files):
        from ckptguard.checks.without_plugins import without_plugins

        rest = without_plugins(evidence)
        evidence = rest if rest.tensors() else evidence
    largest, name, _ = largest_weight(evidence)
    thinned = taken_from(evidence) if evidence.thinned else ()
    constant = (tensor.name for tensor, numbers in evidence.weights() if len(tensor.shape) >= 2 and numbers.constant)
    return Facts(
        largest_magnitude=largest if name is not None else None,
        largest_tensor=name,
        constant=tuple(itertools.islice(constant, MOST_CONSTANT)),
        resumable=tuple(role for role in roles_present(evidence) if role not in thinned),
        stale=moments_present(evidence) and unchanged(evidence),
        skipped_steps=skipped_steps(evidence),
        world_size=stated_world_size(evidence),
        thinned=thinned,
    )

"""Findings are listed by their weight, and no file hides behind another one."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.values.plain_numbers import size
from ckptguard.values.verdict import MAX_FINDINGS_PER_CHECK, Finding, Severity, heaviest_first, limit_findings

_FINDINGS = st.builds(
    Finding,
    check=st.sampled_from(["finite", "pickle-safety"]),
    severity=st.sampled_from(list(Severity)),
    message=st.just("m"),
    file=st.sampled_from([f"{number}.pt" for number in range(12)]),
)


@given(st.lists(_FINDINGS, max_size=40).map(lambda some: some * 8))
def test_the_heaviest_come_first_and_every_file_is_named(findings: list[Finding]) -> None:
    """Weights never rise. Whatever is left out is counted, and of each check each file keeps its heaviest finding."""
    kept = limit_findings(findings)
    weights = [list(Severity).index(finding.severity) for finding in kept]
    assert weights == sorted(weights)
    left = sum(finding.omitted or 0 for finding in kept)
    assert left + sum(not finding.omitted for finding in kept) == len(findings)
    for check in ("finite", "pickle-safety"):
        own = [finding for finding in kept if finding.check == check]
        assert len(own) <= MAX_FINDINGS_PER_CHECK + 1
        errors = {finding.file for finding in findings if (finding.check, finding.severity) == (check, Severity.ERROR)}
        assert errors <= {finding.file for finding in own if finding.severity is Severity.ERROR}


@given(st.lists(_FINDINGS, max_size=40))
def test_findings_of_one_weight_keep_their_order(findings: list[Finding]) -> None:
    """Only the weight moves them."""
    ordered = heaviest_first(findings)
    for severity in Severity:
        assert [one for one in ordered if one.severity is severity] == [f for f in findings if f.severity is severity]


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_sizes_beside_each_other_have_one_unit(one: int, other: int) -> None:
    """They order as the numbers do, and what is not nothing is never shown as 0."""
    like = max(one, other)
    shown = [size(count, like=like) for count in (one, other)]
    assert len({text.split()[1] for text in shown}) == 1
    low, high = (float(re.sub(r"^<", "", text).split()[0]) for text in (size(min(one, other), like=like), size(like)))
    assert low <= high
    assert all(
        (float(text.split()[0].lstrip("<")) > 0) == (count > 0) for text, count in zip(shown, (one, other), strict=True)
    )

"""Does a snapshot of a Hugging Face hub cache hold the bytes that its blobs are named by, and all of them?"""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.layouts.hub_snapshot import HubFacts
from ckptguard.scan.result import Scan
from ckptguard.values.ids import escape
from ckptguard.values.verdict import Finding, Severity


def check_hub_cache(scan: Scan, facts: HubFacts) -> Iterator[Finding]:
    """Errors for bytes that are not those of the blob's name, for links that lead elsewhere, for blobs that are not
    there and downloads that did not end. A ref without its snapshot is a warning; files without a digest a notice."""
    for file in scan.files:
        algorithm, expected = facts.sums.get(file.entry.key, ("", None))
        found = file.sums.get(algorithm)
        if expected is not None and found != expected:
            message = f"{algorithm} is not the one that its blob is named by"
            yield Finding("digests", Severity.ERROR, message, file.entry.key, expected=expected, found=found)
    without = [f.entry.key for f in scan.files if f.entry.key not in facts.sums]
    if without:
        what = f"{len(without)} files have no digest in the cache: only their structure and numbers were checked"
        yield Finding("digests", Severity.NOTICE, what, without[0])
    for key, why in sorted(facts.refused.items()):
        yield Finding("structure", Severity.ERROR, f"{why}: it was not read", key)
    for key in facts.missing:
        yield Finding("completeness", Severity.ERROR, "its blob is not there: it was not downloaded, or removed", key)
    for key in facts.unfinished:
        yield Finding("completeness", Severity.ERROR, "a download into this repository did not end", key)
    for ref, commit in sorted(facts.lost_refs.items()):
        message = f"it names the commit {escape(commit)}, of which there is no snapshot"
        yield Finding("completeness", Severity.WARNING, message, ref)

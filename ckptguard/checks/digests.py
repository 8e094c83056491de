"""Compare the bytes with the sealed ones, and with those that a checksum file states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ckptguard.checks.evidence import Evidence
from ckptguard.formats import UNSUMMED, tensor_suffix
from ckptguard.scan.result import ScannedFile
from ckptguard.values.manifest import File
from ckptguard.values.verdict import Finding, Severity

_error = partial(Finding, "digests", Severity.ERROR)


def check_digests(evidence: Evidence) -> Iterator[Finding]:
    """Report each span, envelope or file that differs as an error, with the tensors of a damaged span."""
    yield from _stated_sums(evidence)
    if evidence.sealed is None:
        yield from _no_sums(evidence)
        return
    for sealed in evidence.sealed.files:
        found = evidence.scan.file(sealed.path)
        if found is not None:  # check_completeness reports a missing file
            yield from _compare(sealed, found, evidence.placed_digests.get(sealed.path))


def same_content(sealed: File, found: ScannedFile) -> bool:
    """True if a file's bytes are those of the manifest: same size, spans and BLAKE3 digests."""
    places = [(s.offset, s.length) for s in found.structure.spans]
    return (
        sealed.size == found.entry.size
        and sealed.envelope == found.envelope
        and [(s.offset, s.length) for s in sealed.spans] == places
        and all(s.blake3 == d for s, d in zip(sealed.spans, found.span_digests, strict=True))
    )


def changed_spans(sealed: File, found: ScannedFile, placed: Sequence[str | None] | None) -> list[int]:
    """Return the numbers of the sealed spans whose bytes differ or are missing."""
    digests: Sequence[str | None] = placed if placed is not None else found.span_digests
    if len(digests) != len(sealed.spans):
        return list(range(len(sealed.spans)))
    return [i for i, (s, d) in enumerate(zip(sealed.spans, digests, strict=True)) if s.blake3 != d]


def _compare(sealed: File, found: ScannedFile, placed: Sequence[str | None] | None) -> Iterator[Finding]:
    if same_content(sealed, found):
        if sealed.md5 and found.md5 and sealed.md5 != found.md5:
            # The record is wrong, not the file, but this is never silently good.
            message = "MD5 differs although BLAKE3 agrees: the record is wrong"
            yield _error(message, sealed.path, expected=sealed.md5, found=found.md5)
        return
    readable = not found.structure.problems  # otherwise a finding says so, and another size follows from it
    if sealed.size != found.entry.size and readable:
        expected, size = f"{sealed.size} bytes", f"{found.entry.size} bytes"
        yield _error("the size differs from the sealed size", sealed.path, expected=expected, found=size)
    by_span: dict[int | None, list[str]] = {}
    for tensor in sealed.tensors:
        by_span.setdefault(tensor.span, []).append(tensor.name)
    digests: Sequence[str | None] = placed or found.span_digests
    for number in changed_spans(sealed, found, placed):
        names = by_span.get(number, [])
        more = f" (shared by {len(names)} tensors)" if len(names) > 1 else ""
        yield _error(
            f"the bytes of this tensor differ from the sealed bytes{more}",
            sealed.path,
            names[0] if names else None,
            expected=_shown(sealed.spans[number].blake3),
            found=_shown(digests[number]) if number < len(digests) else None,
        )
    if sealed.envelope != found.envelope and placed is None and (readable or sealed.size == found.entry.size):
        message = "bytes outside the tensors (header, directory, pickle) differ from the sealed bytes"
        yield _error(message, sealed.path, expected=_shown(sealed.envelope), found=_shown(found.envelope))
    elif placed is not None and readable:
        yield _error("the tensors are no longer at their sealed places", sealed.path)


def _no_sums(evidence: Evidence) -> Iterator[Finding]:
    """Add one notice if nothing protects the bytes at first sight. Not for safetensors and ``.metadata``, where `show`
    says it: nearly every model would have it."""
    files = [f.entry.key for f in evidence.scan.files if f.structure.format in UNSUMMED and _is_state(f)]
    unknown = [key for key in files if key not in evidence.expected_sums]
    if unknown:
        message = "this format has no checksum of its own: damage from before the first reading cannot be found"
        yield Finding("digests", Severity.NOTICE, message, unknown[0], count=len(unknown))


def _is_state(file: ScannedFile) -> bool:
    told = file.structure.format not in ("safetensors", "dcp_metadata")
    return told and (bool(file.structure.spans) or tensor_suffix(file.entry.key))


def _shown(digest: str | None) -> str | None:
    return f"blake3 {digest[:16]}" if digest else None


def _stated_sums(evidence: Evidence) -> Iterator[Finding]:
    """Report stated sums that differ or whose file is missing as errors; a tensor file without a sum as a warning."""
    for scanned in evidence.scan.files if evidence.expected_sums else ():
        if scanned.entry.key not in evidence.expected_sums and scanned.structure.tensors:
            message = "the checksum file does not list it"
            yield Finding("digests", Severity.WARNING, message, scanned.entry.key)
    for path, (algorithm, expected) in sorted(evidence.expected_sums.items()):
        file = evidence.scan.file(path)
        if file is None:
            yield _error("the checksum file lists it, but it is not there", path)
            continue
        found = file.sums.get(algorithm) or (file.md5 if algorithm == "md5" else None)
        if found != expected:
            message = f"{algorithm} differs from the one in the checksum file"
            yield _error(message, path, expected=expected, found=found)

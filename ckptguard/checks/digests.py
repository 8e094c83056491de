"""Compare the bytes with the sealed ones, and with those that a checksum file states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from ckptguard.checks.evidence import Evidence, StatedSum
from ckptguard.formats import UNSUMMED, tensor_suffix
from ckptguard.scan.result import ScannedFile
from ckptguard.values.manifest import WHOLE_FORMATS, File
from ckptguard.values.verdict import Finding, Severity

UNSEEN_FLIPS = "a flipped bit inside a tensor cannot be seen"
_COMMON = ("safetensors", "dcp_metadata")
_FILE_AND_SOURCE = attrgetter("file", "source")
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
    if sealed.format in WHOLE_FORMATS or found.structure.format in WHOLE_FORMATS:
        # Either side may have been read without knowing the format, or without h5py.
        by_all = sealed.format in WHOLE_FORMATS or not sealed.spans
        by_all &= found.structure.format in WHOLE_FORMATS or not found.structure.spans
        return by_all and sealed.size == found.entry.size and sealed.envelope == found.envelope
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
    changed = changed_spans(sealed, found, placed)
    for number in changed:
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
        if sealed.format in WHOLE_FORMATS:
            if changed:
                return
            message = "its bytes differ from the sealed bytes"
        yield _error(message, sealed.path, expected=_shown(sealed.envelope), found=_shown(found.envelope))
    elif placed is not None and readable:
        yield _error("the tensors are no longer at their sealed places", sealed.path)


def _no_sums(evidence: Evidence) -> Iterator[Finding]:
    """Yield one notice if no checksum protects the bytes at first sight. In a run not for safetensors and
    ``.metadata``, where `show` says it: nearly every save would have it."""
    stated = {one.file for one in evidence.sums.stated} | evidence.vouched
    files = [f for f in evidence.scan.files if f.structure.format in UNSUMMED and f.entry.key not in stated]
    if evidence.in_run:
        unknown = [f.entry.key for f in files if f.structure.format not in _COMMON and _is_state(f)]
        message = "this format has no checksum of its own: damage from before the first reading cannot be found"
    else:
        unknown = [f.entry.key for f in files if f.structure.format == "dcp_metadata" or _is_state(f)]
        rest = len(unknown) - 1
        others = f"this and {rest} more file{'s' * (rest > 1)}" if rest > 0 else "this file"
        message = f"no checksum vouches for {others}: {UNSEEN_FLIPS}"
    if unknown:
        yield Finding("digests", Severity.NOTICE, message, unknown[0], count=len(unknown))


def _differing(one: StatedSum, found: str | None, right: StatedSum | None) -> Finding:
    """What a stated sum says that is not the file's. If a stronger one of the same list is, the line is wrong."""
    severity, message = Severity.ERROR, f"{one.algorithm} is not the one that {one.source} states"
    if right is not None and _strength(right) < _strength(one):
        severity = Severity.WARNING
        message += f", but {right.algorithm} is: {one.source} contradicts itself"
    elif one.doubtful:
        severity = Severity.SICKNESS
        message += ": it was written since, by you or by damage"
    return Finding("digests", severity, message, one.file, expected=one.digest, found=found)


def _strength(one: StatedSum) -> int:
    """Sort the stronger algorithm first: the one with more digits."""
    return -len(one.digest)


def _is_state(file: ScannedFile) -> bool:
    return bool(file.structure.spans) or tensor_suffix(file.entry.key)


def _shown(digest: str | None) -> str | None:
    return f"blake3 {digest[:16]}" if digest else None


def _stated_sums(evidence: Evidence) -> Iterator[Finding]:
    """Compare with what checksum files state. Sums that differ and missing files are errors. A tensor file without a
    sum is a warning. A notice says which list vouches for the others."""
    yield from evidence.sums.remarks
    named = {one.file for one in evidence.sums.stated}
    lists = evidence.sums.lists
    for scanned in evidence.scan.files if lists else ():
        if scanned.entry.key not in named and scanned.structure.tensors:
            message = f"{lists[0]} does not name it" if len(lists) == 1 else "the checksum files do not name it"
            yield Finding("digests", Severity.WARNING, message, scanned.entry.key)
    vouching: dict[tuple[str, str], list[str]] = {}
    groups = groupby(sorted(evidence.sums.stated, key=_FILE_AND_SOURCE), key=_FILE_AND_SOURCE)
    for (key, source), several in groups:
        file, stated = evidence.scan.file(key), sorted(several, key=_strength)
        if file is None:
            yield _error(f"{source} lists it, but it is not there", key)
            continue
        right = next((one for one in stated if not one.differs(evidence.scan)), None)
        if right is not None:
            vouching.setdefault((source, right.algorithm), []).append(key)
        for one in stated:
            if one.differs(evidence.scan):
                yield _differing(one, file.digest(one.algorithm), right)
    for (source, algorithm), files in vouching.items():
        what = evidence.checkpoint.inside(files[0]) if len(files) == 1 else f"{len(files)} files"
        if len(files) == 1 and files[0] == evidence.checkpoint.path:
            what = "it"
        yield Finding("digests", Severity.NOTICE, f"{source} vouches for {what} ({algorithm})", count=len(files))

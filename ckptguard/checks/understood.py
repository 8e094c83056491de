"""Decide whether content that no format explains may be good."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.formats import FORMATS
from ckptguard.formats.table import may_hold_state
from ckptguard.scan.result import ScannedFile
from ckptguard.values.manifest import WHOLE_FORMATS
from ckptguard.values.verdict import PLUGIN, UNDERSTOOD, Finding, Severity

# What these formats hold is read. The others hold settings and notes, or are unknown.
_READ = WHOLE_FORMATS.union(row.name for row in FORMATS if row.suffixes) | {"dcp_metadata", "torch_legacy"}
_WEIGHTS = ("model", "ema")


def check_understood(evidence: Evidence) -> Iterator[Finding]:
    """Report the files that nobody can read, if the checkpoint's weights may be in them. They are a sickness, unless
    something vouches for them."""
    for label, trouble in evidence.checkpoint.asked:
        severity = Severity.SICKNESS if trouble else Severity.NOTICE
        message = f"could not tell: {trouble}" if trouble else f"{label} took part"
        yield Finding(PLUGIN, severity, message, found=label)
    unread = _unread(evidence)
    wrong = not_understood(evidence) if unread else ()
    for key in wrong:
        message = f"{what_of(evidence, key)} is not understood, and nothing vouches for its content"
        yield Finding(UNDERSTOOD, Severity.SICKNESS, message, key)
    if unread and not wrong:
        message = "its format is not understood; something else vouches for its content"
        yield Finding(UNDERSTOOD, Severity.NOTICE, message, unread[0], count=len(unread))


def what_of(evidence: Evidence, key: str) -> str:
    """Return what of a file is not understood: some parts, or its format."""
    file = evidence.scan.file(key)
    parts = file.structure.not_understood if file is not None else ()
    if not parts:
        return "its format"
    return f"{parts[0]} (and {len(parts) - 1} more parts)" if len(parts) > 1 else parts[0]


def not_understood(evidence: Evidence) -> tuple[str, ...]:
    """Return the files because of which the checkpoint must not be called good.

    They may hold its weights, no other file of it does, and neither their writer, nor a checksum, nor a user vouches
    for them. Every path to a verdict asks this, and nothing else decides it.
    """
    if evidence.trusted or (evidence.sealed is not None and evidence.sealed.digest_origin == "writer"):
        return ()
    vouched = {one.file for one in evidence.sums.stated} | evidence.vouched
    return tuple(key for key in _unread(evidence) if key not in vouched)


def _unread(evidence: Evidence) -> tuple[str, ...]:
    """Return the files with state that is not understood, and those that no format explains and that may hold the
    weights, if no other file does."""
    parts = tuple(file.entry.key for file in evidence.scan.files if file.structure.not_understood)
    if any(leaf.of_array for leaf in evidence.leaves()):
        return parts
    if any(t.role in _WEIGHTS and t.span is not None for t in evidence.tensors()):
        return parts
    keys = (file.entry.key for file in evidence.scan.files if not _is_read(file) and file.entry.key not in parts)
    return (*parts, *(key for key in keys if key == evidence.checkpoint.path or may_hold_state(key)))


def _is_read(file: ScannedFile) -> bool:
    """True if a format explained the file. One that is broken has findings of its own, and so has one that is named
    like tensors only by chance (``tokens.bin``)."""
    structure = file.structure
    return structure.format in _READ or bool(structure.problems) or "unrecognised" in structure.metadata

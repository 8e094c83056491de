"""Decide whether content that no format explains may be good."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.formats import FORMATS
from ckptguard.formats.suffixes import may_hold_state
from ckptguard.scan.result import ScannedFile
from ckptguard.values.verdict import UNDERSTOOD, Finding, Severity

# What these formats hold is read. The others hold settings and notes, or are unknown.
_READ = frozenset(row.name for row in FORMATS if row.suffixes) | {"dcp_metadata", "torch_legacy"}
_WEIGHTS = ("model", "ema")


def check_understood(evidence: Evidence) -> Iterator[Finding]:
    """Report the files that nobody can read, if the checkpoint's weights may be in them. They are a sickness, unless
    something vouches for them."""
    unread = _unread(evidence)
    wrong = not_understood(evidence) if unread else ()
    for key in wrong:
        message = "its format is not understood, and nothing vouches for its content"
        yield Finding(UNDERSTOOD, Severity.SICKNESS, message, key)
    if unread and not wrong:
        message = "its format is not understood; something else vouches for its content"
        yield Finding(UNDERSTOOD, Severity.NOTICE, message, unread[0], count=len(unread))


def not_understood(evidence: Evidence) -> tuple[str, ...]:
    """Return the files because of which the checkpoint must not be called good.

    They may hold its weights, no other file of it does, and neither their writer, nor a checksum, nor a user vouches
    for them. Every path to a verdict asks this, and nothing else decides it.
    """
    if evidence.trusted or (evidence.sealed is not None and evidence.sealed.digest_origin == "writer"):
        return ()
    vouched = {one.file for one in evidence.expected_sums} | evidence.vouched
    return tuple(key for key in _unread(evidence) if key not in vouched)


def _unread(evidence: Evidence) -> tuple[str, ...]:
    """Return the files that no format explains and that may hold the weights, if no other file does."""
    if any(leaf.of_array for leaf in evidence.leaves()):
        return ()
    if any(t.role in _WEIGHTS and t.span is not None for t in evidence.tensors()):
        return ()
    keys = (file.entry.key for file in evidence.scan.files if not _is_read(file))
    return tuple(key for key in keys if key == evidence.checkpoint.path or may_hold_state(key))


def _is_read(file: ScannedFile) -> bool:
    """True if a format explained the file. One that is broken has findings of its own, and so has one that is named
    like tensors only by chance (``tokens.bin``)."""
    structure = file.structure
    return structure.format in _READ or bool(structure.problems) or "unrecognised" in structure.metadata

"""The results of verification."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.layouts import Checkpoint
from ckptguard.runs.not_understood import NotUnderstood
from ckptguard.values.ids import CheckpointId, Step
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Finding, Outcome, Severity, limit_findings, target_outcome


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one checkpoint. Paths are relative to the target of the call. PENDING: there is no verdict, and
    the findings say why."""

    path: str
    series: str
    layout: str
    step: Step
    id: CheckpointId | None
    outcome: Outcome
    digest_origin: str | None
    bytes: int
    seconds: float | None
    findings: tuple[Finding, ...] = ()


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call. `could_not_tell`: something could not be read. `notes` are for people, on stderr.

    `run`: the run whose records were used; None for what has none. `known_good`: if something is not good, the path
    and the id of the checkpoint that the run can go back to. `none_is_good`: all of the run was judged, and none is.
    """

    target: str
    kind: str  # "file" | "checkpoint" | "run"
    checkpoints: tuple[Checked, ...]
    notes: tuple[str, ...] = ()
    could_not_tell: bool = False
    not_understood: NotUnderstood | None = None  # what in the run nothing verifies
    run: str | None = None
    known_good: tuple[str, CheckpointId] | None = None
    none_is_good: bool = False

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of the checkpoints."""
        return target_outcome(c.outcome for c in self.checkpoints)

    @property
    def ok(self) -> bool:
        """Whether something was checked, all of it could be read, and all of it is good."""
        return bool(self.checkpoints) and self.outcome is Outcome.GOOD and not self.could_not_tell

    def __bool__(self) -> bool:
        return self.ok

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found in all checkpoints."""
        return tuple(finding for checked in self.checkpoints for finding in checked.findings)


def checked(
    checkpoint: Checkpoint,
    id: CheckpointId | None,
    outcome: Outcome,
    *,
    sealed: Manifest | None,
    seconds: float | None,
    findings: Sequence[Finding],
) -> Checked:
    """Build the result for a checkpoint. `sealed` is its current manifest."""
    return Checked(
        path=checkpoint.path,
        series=checkpoint.series,
        layout=checkpoint.layout,
        step=checkpoint.step,
        id=id,
        outcome=outcome,
        digest_origin=sealed.digest_origin if sealed else None,
        bytes=checkpoint.bytes,
        seconds=None if seconds is None else round(seconds, 3),
        findings=limit_findings(findings),
    )


def pending(checkpoint: Checkpoint, why: str, check: str = "reading") -> Checked:
    """Build the result for a checkpoint without a verdict, and say what hindered it."""
    finding = Finding(check=check, severity=Severity.NOTICE, message=why)
    return checked(checkpoint, None, Outcome.PENDING, sealed=None, seconds=None, findings=[finding])


def relative_to(checked: Checked, prefix: str) -> Checked:
    """Make the paths of a result relative to a folder of the run."""
    if not prefix:
        return checked

    def short(path: str) -> str:
        return path.removeprefix(prefix + "/") if path != prefix else path.rpartition("/")[2]

    findings = tuple(
        msgspec.structs.replace(f, file=short(f.file)) if f.file is not None else f for f in checked.findings
    )
    return msgspec.structs.replace(checked, path=short(checked.path), findings=findings)

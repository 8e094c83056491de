"""Verify what a user names: a single file, a checkpoint, or all checkpoints of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from ckptguard.errors import ChangedWhileReadError, ChecksumFileError, CouldNotTellError, NotFoundError, SettingsError
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.run import Run
from ckptguard.runs.pointers import pointer_notes
from ckptguard.runs.results import Checked, VerifyReport, pending, relative_to
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import wait_until_quiet
from ckptguard.runs.target import Target, resolve_target
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.values.ids import numbers_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.verification.checksum_files import read_check_sums
from ckptguard.verification.collect_evidence import (
    collect_evidence,
    manifest_files,
    manifest_without_seal,
    scan_checkpoint,
)
from ckptguard.verification.selection import Selection
from ckptguard.verification.stray import StrayJudge, relist

ALL = Selection()
Judged = Callable[[Run, Checked], str | None]


def verify_target(
    target: str | Target, settings: Settings, what: Selection = ALL, *, judged: Judged | None = None, work: Work = PLAIN
) -> VerifyReport:
    """Verify a file, a checkpoint or a run. A run's verdicts are recorded; any other target writes nothing.

    Each chosen checkpoint is judged once it is quiet. `judged` is called with each recorded verdict, and returns a note
    for the report, or None. NotFoundError if there is nothing to verify. What cannot be read is PENDING in the report,
    never BAD.
    """
    resolved = resolve_target(target, settings) if isinstance(target, str) else target
    notes = [
        f"{name} is a link out of the cache and was not followed; to verify it, name its target"
        for name in resolved.unread
    ]
    run = resolved.view if not what.check_sums else None  # with other sums than the sealed ones nothing is recorded
    chosen = _chosen(resolved, what)
    judge = _judge_of(resolved, run, settings, what, chosen, notes, work)
    results, unsure, unread = [], bool(resolved.unread), None
    for checkpoint in chosen:
        quiet = _when_quiet(resolved, run, checkpoint, settings.settle, what.wait)
        try:
            found = judge(quiet) if quiet is not None else pending(checkpoint, "it is still being written")
            note = judged(run.run, found) if judged is not None and run is not None and what.record else None
            notes += [] if note is None else [note]
        except CouldNotTellError as error:
            unsure = unsure or not isinstance(error, ChangedWhileReadError)
            check = "checksum-file" if isinstance(error, ChecksumFileError) else "reading"
            found = pending(quiet or checkpoint, error.message, check)
        results.append(relative_to(found, resolved.prefix))
    if run is not None and resolved.checkpoint is None:
        run.forget()  # pointers are compared with the final state
        unsure, unread = unsure or bool(run.listing.unread), run.listing.not_understood
        notes += run.listing.unread_notes
        notes += [] if unread is None else ["; ".join(unread.notes)]
        notes += pointer_notes(run, {c.path: c.outcome for c in results})
    return VerifyReport(
        target=resolved.url,
        kind=resolved.kind,
        checkpoints=tuple(results),
        notes=tuple(dict.fromkeys(notes)),
        could_not_tell=unsure,
        not_understood=unread,
    )


def _judge_of(
    resolved: Target,
    run: RunView | None,
    settings: Settings,
    what: Selection,
    chosen: Sequence[Checkpoint],
    notes: list[str],
    work: Work,
) -> Callable[[Checkpoint], Checked]:
    """Return what judges the checkpoints of a target: by the records of its run, or at first sight."""
    sums = read_check_sums(what.check_sums, settings.storage) if what.check_sums else None
    reference = read_reference(what.reference, settings, work) if what.reference else None
    if run is not None:
        from ckptguard.verification.checkpoint import (
            Verification,  # records, copies and pins: only a run needs them
            judge_in_run,
        )

        return judge_in_run(run, Verification(record=what.record, reference=reference), notes, work)
    if sums is not None and len(chosen) != 1:
        raise SettingsError("a checksum file goes with a file or one checkpoint, not with a run", hint="name one")
    return StrayJudge(resolved, settings, sums, reference, work).judge


def _when_quiet(
    resolved: Target, run: RunView | None, checkpoint: Checkpoint, settle: float, wait: float
) -> Checkpoint | None:
    """Return a checkpoint once nobody writes it; None if that takes longer. What its writer seals is finished by that,
    and not by time."""
    if run is not None and LAYOUTS[checkpoint.layout].sealed_by_writer:
        return checkpoint
    return wait_until_quiet(checkpoint, lambda: relist(resolved, checkpoint), settle=settle, limit=wait)


def read_reference(url: str, settings: Settings, work: Work = PLAIN) -> Manifest:
    """Return the schema of another checkpoint, as a manifest that is never written."""
    target = resolve_target(url, settings)
    if target.checkpoint is None:
        raise SettingsError(f"the reference {url} is a run", hint="name one of its checkpoints")
    scan = scan_checkpoint(target.storage, target.checkpoint, ScanOptions(md5=False), Work(scanner=work.scanner))
    evidence = collect_evidence(target.storage, target.checkpoint, scan)
    if any(f.structure.problems for f in scan.files):
        raise SettingsError(f"the reference {url} is itself damaged", hint=f"ckptguard verify {shlex.quote(url)}")
    return manifest_without_seal(evidence.checkpoint, manifest_files(evidence))


def _chosen(resolved: Target, what: Selection) -> list[Checkpoint]:
    if resolved.checkpoint is not None:
        return [resolved.checkpoint]
    if resolved.view is None:
        if what.step is not None or what.newest is not None:
            raise SettingsError("the snapshots of a hub cache have no steps to choose by", hint="name one of them")
        return list(resolved.snapshots)
    found = [c for c in resolved.view.checkpoints if what.step is None or c.step == what.step]
    if what.step is not None and not found:
        raise NotFoundError(f"there is no checkpoint of step {what.step} in {resolved.url}")
    ordered = sorted(found, key=lambda c: (c.step is None, numbers_of(c.step), c.written_at, c.path))
    if what.newest is None:
        return ordered
    numbered = [c for c in ordered if c.step is not None]
    return numbered[-what.newest :] if what.newest > 0 else []

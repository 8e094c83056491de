"""Verify what a user names: a single file, a checkpoint, or all checkpoints of a run."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable

from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, NotFoundError, SettingsError
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.run import Run
from ckptguard.runs.pointers import pointer_notes
from ckptguard.runs.results import Checked, VerifyReport, pending, relative_to
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
    target: str, settings: Settings, what: Selection = ALL, *, judged: Judged | None = None, work: Work = PLAIN
) -> VerifyReport:
    """Verify a file, a checkpoint or a run. A run's verdicts are recorded; any other target writes nothing.

    `judged` is called with each recorded verdict, and returns a note for the report, or None. NotFoundError if there is
    nothing to verify. What cannot be read is PENDING in the report, never BAD.
    """
    return verify_resolved(resolve_target(target, settings), settings, what, judged=judged, work=work)


def verify_resolved(
    resolved: Target, settings: Settings, what: Selection = ALL, *, judged: Judged | None = None, work: Work = PLAIN
) -> VerifyReport:
    """Do the same with a target that was found already."""
    sums = read_check_sums(what.check_sums, settings.storage) if what.check_sums else None
    reference = read_reference(what.reference, settings, work) if what.reference else None
    chosen = _chosen(resolved, what)
    notes = [
        f"{name} is a link out of the cache and was not followed; to verify it, name its target"
        for name in resolved.unread
    ]
    run = resolved.view if sums is None else None
    if run is not None:
        from ckptguard.verification.checkpoint import (
            judge_in_run,  # records, copies and pins: only a run needs them
        )

        judge = judge_in_run(run, what, reference, notes, work)
    else:
        if sums is not None and len(chosen) != 1:
            raise SettingsError("a checksum file goes with a file or one checkpoint, not with a run", hint="name one")
        judge = StrayJudge(resolved, settings, sums, reference, work).judge
    results, unsure, unread = [], bool(resolved.unread), None
    for checkpoint in chosen:
        quiet: Checkpoint | None = checkpoint
        if run is None or not LAYOUTS[checkpoint.layout].sealed_by_writer:  # these are finished by a seal, not by time
            look = functools.partial(relist, resolved, checkpoint)
            quiet = wait_until_quiet(checkpoint, look, settle=settings.settle, limit=what.wait)
        try:
            found = judge(quiet) if quiet is not None else pending(checkpoint, "it is still being written")
            note = judged(run.run, found) if judged is not None and run is not None and what.record else None
            notes += [] if note is None else [note]
        except CouldNotTellError as error:
            unsure = unsure or not isinstance(error, ChangedWhileReadError)
            found = pending(quiet or checkpoint, error.message)
        results.append(relative_to(found, resolved.prefix))
    if run is not None and resolved.checkpoint is None:
        run.forget()  # pointers are compared with the final state
        notes += run.listing.unread_notes
        unsure = unsure or bool(run.listing.unread)
        unread = run.listing.not_understood
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

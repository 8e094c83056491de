"""Verify what a user points at: a stray file, a checkpoint, or all checkpoints of a run."""

from __future__ import annotations

from ckptguard.errors import (
    ChangedWhileReadError,
    CouldNotTellError,
    DeniedError,
    NotFoundError,
    SettingsError,
    StorageFullError,
)
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.run_settings import allow_nonfinite
from ckptguard.runs.listing import find_checkpoint, list_checkpoints
from ckptguard.runs.pointers import pointer_notes
from ckptguard.runs.results import Checked, Report, pending, relative_to
from ckptguard.runs.settling import wait_until_quiet
from ckptguard.runs.target import Target, resolve_target
from ckptguard.scan import Progress, Scanner, ScanOptions, scan_files
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.verify.checkpoint import verify_checkpoint
from ckptguard.verify.checksum_files import read_check_sums
from ckptguard.verify.collect_evidence import collect_evidence, manifest_files, scan_checkpoint
from ckptguard.verify.stray import verify_strays

DEFAULT_WAIT = 120.0  # seconds to wait for a save that is still being written


def verify_target(
    target: str,
    settings: Settings,
    *,
    step: int | None = None,
    newest: int | None = None,
    record: bool = True,
    check_sums: str | None = None,
    reference: str | None = None,
    wait: float | None = None,
    scanner: Scanner = scan_files,
    progress: Progress | None = None,
) -> Report:
    """Verify a file, a checkpoint or a run. A run's verdicts are recorded; a stray target writes nothing.

    `step` and `newest` choose among a run's checkpoints, `check_sums` is a checksum file, `reference` a checkpoint
    whose keys, shapes and dtypes must match, `wait` the seconds to wait for files that are still being written.
    NotFoundError if there is nothing to verify. What cannot be read is PENDING in the report, never BAD.
    """
    resolved = resolve_target(target, settings)
    sums = read_check_sums(check_sums, settings.storage) if check_sums else None
    schema = read_reference(reference, settings, scanner) if reference else None
    wait = DEFAULT_WAIT if wait is None else wait
    if resolved.run is None or sums is not None:
        strays = _strays(resolved, step, newest, target)
        return verify_strays(
            resolved, strays, settings, sums=sums, reference=schema, wait=wait, scanner=scanner, progress=progress
        )
    chosen = [resolved.checkpoint] if resolved.checkpoint else list_checkpoints(resolved.run)
    if resolved.checkpoint is None:
        chosen = _select(chosen, step, newest, target)
    notes: list[str] = []
    if record and settings.allow_nonfinite:
        try:
            allow_nonfinite(resolved.run, settings.allow_nonfinite)
        except CouldNotTellError as error:
            notes.append(f"the pattern could not be kept in the run's settings: {error.message}")
    results = []
    could_not_tell = unrecorded = False
    for checkpoint in chosen:
        checked, trouble, unsure = _in_run(
            resolved,
            checkpoint,
            settings,
            record=record and not unrecorded,
            reference=schema,
            wait=wait,
            scanner=scanner,
            progress=progress,
        )
        results.append(relative_to(checked, resolved.prefix) if resolved.checkpoint else checked)
        notes += trouble
        could_not_tell = could_not_tell or unsure
        unrecorded = unrecorded or bool(trouble)
    if resolved.checkpoint is None:
        notes += pointer_notes(resolved.run, list_checkpoints(resolved.run), {c.path: c.outcome for c in results})
    return Report(
        target=resolved.url,
        kind=resolved.kind,
        checkpoints=tuple(results),
        notes=tuple(dict.fromkeys(notes)),
        could_not_tell=could_not_tell,
    )


def read_reference(url: str, settings: Settings, scanner: Scanner = scan_files) -> Manifest:
    """The schema of another checkpoint, as a manifest that is never written."""
    target = resolve_target(url, settings)
    if target.checkpoint is None:
        raise SettingsError(f"the reference {url} is a run", hint="name one of its checkpoints")
    scan = scan_checkpoint(target.storage, target.checkpoint, ScanOptions(md5=False), scanner=scanner, progress=None)
    evidence = collect_evidence(target.storage, target.checkpoint, scan)
    if any(f.structure.problems for f in scan.files):
        raise SettingsError(f"the reference {url} is damaged itself", hint=f"ckptguard verify {url}")
    return Manifest(
        series=target.checkpoint.series,
        path=target.checkpoint.path,
        layout=target.checkpoint.layout,
        step=target.checkpoint.step,
        generation=1,
        digest_origin="observer",
        sealed_at="",
        version="",
        nonce="",
        files=manifest_files(evidence),
    )


def _select(found: list[Checkpoint], step: int | None, newest: int | None, target: str) -> list[Checkpoint]:
    if step is not None:
        found = [c for c in found if c.step == step]
        if not found:
            raise NotFoundError(f"there is no checkpoint of step {step} in {target}")
    ordered = sorted(found, key=lambda c: (c.step is None, c.step or 0, c.path))
    if newest is not None:
        numbered = [c for c in ordered if c.step is not None]
        return numbered[-newest:] if newest > 0 else []
    return ordered


def _strays(resolved: Target, step: int | None, newest: int | None, target: str) -> list[Checkpoint]:
    """What to judge at first sight, without records."""
    if resolved.checkpoint is not None:
        return [resolved.checkpoint]
    if resolved.run is not None:
        return _select(list_checkpoints(resolved.run), step, newest, target)
    if step is not None or newest is not None:
        raise SettingsError("the snapshots of a hub cache have no steps to choose by", hint="name one of them")
    return list(resolved.snapshots)


def _in_run(
    target: Target,
    checkpoint: Checkpoint,
    settings: Settings,
    *,
    record: bool,
    reference: Manifest | None,
    wait: float,
    scanner: Scanner,
    progress: Progress | None,
) -> tuple[Checked, list[str], bool]:
    """(result, notes, could not tell)."""
    run = target.run
    assert run is not None
    quiet: Checkpoint | None = checkpoint
    if not LAYOUTS[checkpoint.layout].sealed_by_writer:  # such a layout is finished by its writer's seal, not by time
        quiet = wait_until_quiet(
            checkpoint, lambda: find_checkpoint(run, checkpoint.path), settle=settings.settle, limit=wait
        )
    if quiet is None:
        return pending(checkpoint, "it is still being written"), [], False
    try:
        try:
            checked = verify_checkpoint(
                run, quiet, settings, scanner=scanner, record=record, reference=reference, progress=progress
            )
            return checked, [], False
        except (DeniedError, StorageFullError) as error:
            # Reading works and recording does not: a read-only run, or one on a full disk, still gets its answer.
            checked = verify_checkpoint(
                run, quiet, settings, scanner=scanner, record=False, reference=reference, progress=progress
            )
            return checked, [f"verdicts could not be recorded: {error.message}"], False
    except ChangedWhileReadError as error:
        return pending(quiet, error.message), [], False
    except CouldNotTellError as error:
        return pending(quiet, error.message), [], True

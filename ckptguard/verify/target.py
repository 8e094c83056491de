"""Verify what a user points at: a stray file, a checkpoint, or all checkpoints of a run."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec

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
from ckptguard.runs.pointers import pointer_notes
from ckptguard.runs.results import Checked, Report, pending, relative_to
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import wait_until_quiet
from ckptguard.runs.target import Target, resolve_target
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.verify.checkpoint import Verification, verify_checkpoint
from ckptguard.verify.checksum_files import read_check_sums
from ckptguard.verify.collect_evidence import collect_evidence, manifest_files, scan_checkpoint
from ckptguard.verify.stray import Against, verify_strays

DEFAULT_WAIT = 120.0  # seconds to wait for a save that is still being written


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What of a target is verified, and against what.

    `step` and `newest` choose among a run's checkpoints. `check_sums` is a checksum file. `reference` is a checkpoint
    whose keys, shapes and dtypes must match. `wait` are seconds to wait for files that are still being written.
    `record`: a run's verdicts go into its ledger.
    """

    step: int | None = None
    newest: int | None = None
    record: bool = True
    check_sums: str | None = None
    reference: str | None = None
    wait: float = DEFAULT_WAIT


ALL = Selection()


def verify_target(target: str, settings: Settings, what: Selection = ALL, *, work: Work = PLAIN) -> Report:
    """Verify a file, a checkpoint or a run. A run's verdicts are recorded; a stray target writes nothing.

    NotFoundError if there is nothing to verify. What cannot be read is PENDING in the report, never BAD.
    """
    resolved = resolve_target(target, settings)
    sums = read_check_sums(what.check_sums) if what.check_sums else None
    schema = read_reference(what.reference, settings, work) if what.reference else None
    if resolved.view is None or sums is not None:
        strays = _strays(resolved, what, target)
        against = Against(sums=sums, reference=schema)
        return verify_strays(resolved, strays, settings, against, wait=what.wait, work=work)
    return _verify_in_run(resolved, resolved.view, what, schema, work)


def _verify_in_run(target: Target, view: RunView, what: Selection, schema: Manifest | None, work: Work) -> Report:
    """Verify checkpoints of a run with records: one after the other, through one view."""
    one = target.checkpoint
    chosen = [one] if one is not None else _select(view.checkpoints, what, target.url)
    notes: list[str] = []
    if what.record and view.settings.allow_nonfinite:
        try:
            allow_nonfinite(view.run, view.settings.allow_nonfinite)
        except CouldNotTellError as error:
            notes.append(f"the pattern could not be kept in the run's settings: {error.message}")
    results = []
    could_not_tell = False
    how = Verification(record=what.record, reference=schema)
    for checkpoint in chosen:
        found, trouble, unsure = _in_run(view, checkpoint, how, what.wait, work)
        results.append(relative_to(found, target.prefix) if one is not None else found)
        if trouble:
            notes.append(trouble)
            how = msgspec.structs.replace(how, record=False)  # the next one could not be recorded either
        could_not_tell = could_not_tell or unsure
    if one is None:
        view.forget()  # pointers are held against what is there at the end
        notes += pointer_notes(view, {c.path: c.outcome for c in results})
    return Report(
        target=target.url,
        kind=target.kind,
        checkpoints=tuple(results),
        notes=tuple(dict.fromkeys(notes)),
        could_not_tell=could_not_tell,
    )


def read_reference(url: str, settings: Settings, work: Work = PLAIN) -> Manifest:
    """The schema of another checkpoint, as a manifest that is never written."""
    target = resolve_target(url, settings)
    if target.checkpoint is None:
        raise SettingsError(f"the reference {url} is a run", hint="name one of its checkpoints")
    scan = scan_checkpoint(target.storage, target.checkpoint, ScanOptions(md5=False), Work(scanner=work.scanner))
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


def _select(found: Iterable[Checkpoint], what: Selection, target: str) -> list[Checkpoint]:
    if what.step is not None:
        found = [c for c in found if c.step == what.step]
        if not found:
            raise NotFoundError(f"there is no checkpoint of step {what.step} in {target}")
    ordered = sorted(found, key=lambda c: (c.step is None, c.step or 0, c.path))
    if what.newest is not None:
        numbered = [c for c in ordered if c.step is not None]
        return numbered[-what.newest :] if what.newest > 0 else []
    return ordered


def _strays(resolved: Target, what: Selection, target: str) -> list[Checkpoint]:
    """What to judge at first sight, without records."""
    if resolved.checkpoint is not None:
        return [resolved.checkpoint]
    if resolved.view is not None:
        return _select(resolved.view.checkpoints, what, target)
    if what.step is not None or what.newest is not None:
        raise SettingsError("the snapshots of a hub cache have no steps to choose by", hint="name one of them")
    return list(resolved.snapshots)


def _in_run(
    view: RunView, checkpoint: Checkpoint, how: Verification, wait: float, work: Work
) -> tuple[Checked, str | None, bool]:
    """(result, why it could not be recorded, could not tell)."""
    quiet: Checkpoint | None = checkpoint
    if not LAYOUTS[checkpoint.layout].sealed_by_writer:  # such a layout is finished by its writer's seal, not by time
        look = functools.partial(view.look_again, checkpoint.path)
        quiet = wait_until_quiet(checkpoint, look, settle=view.settings.settle, limit=wait)
    if quiet is None:
        return pending(checkpoint, "it is still being written"), None, False
    try:
        try:
            return verify_checkpoint(view, quiet, how, work=work), None, False
        except (DeniedError, StorageFullError) as error:
            # Reading works and recording does not: a read-only run, or one on a full disk, still gets its answer.
            found = verify_checkpoint(view, quiet, msgspec.structs.replace(how, record=False), work=work)
            return found, f"verdicts could not be recorded: {error.message}", False
    except ChangedWhileReadError as error:
        return pending(quiet, error.message), None, False
    except CouldNotTellError as error:
        return pending(quiet, error.message), None, True

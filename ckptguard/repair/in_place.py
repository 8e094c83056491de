"""Repair a checkpoint in place."""

from __future__ import annotations

from ckptguard.errors import BusyError, CouldNotTellError, ResavingError
from ckptguard.keep.copies import shares_place
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.records.run import Run
from ckptguard.records.scrubs import IN_PLACE
from ckptguard.repair.replace_files import LINKED, Damaged, Source, seen_now
from ckptguard.repair.shared_steps import CHECK, Work, close_incidents, note, put_right
from ckptguard.runs.history import Key, load_history
from ckptguard.runs.listing import find_checkpoint
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.settling import youngest_age
from ckptguard.scan.reread import reread
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Finding, Outcome, Severity
from ckptguard.verify.checkpoint import Resave, verify_checkpoint


def repair_place(work: Work, series: str, key: Key, manifest: Manifest) -> None:
    """Put right what is wrong in place, and verify the whole. BusyError while training writes it."""
    run = work.run
    checkpoint = find_checkpoint(run, manifest.path)
    _refuse_while_written(checkpoint, work.settings)
    wrong = [f for f in manifest.files if reread(run.storage, f.path, f) is not None]
    copy = read_kept(run, series, *key)
    linked = copy is not None and shares_place(run, copy, copy.files)  # then it is no copy any more
    if checkpoint is not None and not _is_still(work, checkpoint, manifest.id, damaged=bool(wrong)):
        return
    if not wrong:
        return
    verdict = load_history(run).verdict(series, key)
    content = sealed_outcome(verdict) if verdict is not None else None
    damaged = [Damaged(file=f, storage=run.storage, key=f.path, seen=seen_now(run.storage, f.path)) for f in wrong]
    if content not in (Outcome.GOOD, Outcome.SUSPECT):
        for one in damaged:
            note(work, series, key, manifest, IN_PLACE, one, None, "what was sealed was not good either")
        return
    sources = sources_of(run, series, key, work.staged)
    none = LINKED if linked else "there is no other copy"
    done = put_right(work, series, key, manifest, IN_PLACE, damaged, sources, none=none)
    if not done:
        return
    present = find_checkpoint(run, manifest.path)
    if present is None:
        raise CouldNotTellError(f"{manifest.path} vanished after it was repaired")
    notes = tuple(
        Finding(check=CHECK, severity=Severity.NOTICE, message=f"put back from the {source}", file=one.file.path)
        for one, source in done
    )
    try:
        checked = verify_checkpoint(run, present, work.settings, scanner=work.scanner, md5=False, notes=notes)
    except ResavingError as error:
        raise BusyError(error.message) from error
    work.checked.append(checked)
    if checked.outcome in (Outcome.GOOD, Outcome.SUSPECT):
        close_incidents(run, {"checkpoint": manifest.id, "series": series, "path": manifest.path}, done)


def _refuse_while_written(checkpoint: Checkpoint | None, settings: Settings) -> None:
    age = youngest_age(checkpoint) if checkpoint is not None else None
    if checkpoint is not None and age is not None and age < settings.settle:
        raise BusyError(
            f"{checkpoint.path} was written {age:.1f} s ago: training may still be writing it",
            hint="try again when it is quiet",
        )


def _is_still(work: Work, checkpoint: Checkpoint, wanted: str, *, damaged: bool) -> bool:
    """Whether what lies in place is the generation that is wanted, damaged or not, and not a new save; its verdict is
    brought up to date. BusyError while it is being saved again."""
    try:
        checked = verify_checkpoint(
            work.run,
            checkpoint,
            work.settings,
            scanner=work.scanner,
            md5=False,
            record=not work.dry_run,
            resave=Resave.WAIT,
        )
    except ResavingError as error:
        raise BusyError(error.message) from error
    same = checked.id == wanted
    if damaged and same and checked.outcome is not Outcome.BAD:
        work.troubles.append(
            f"{checkpoint.path} was damaged when it was read first, and is not now: look after the disk"
        )
    if not damaged or not same or checked.outcome is not Outcome.BAD:
        work.checked.append(checked)
        return same and not damaged
    return True


def sources_of(run: Run, series: str, key: Key, staged: list[Source]) -> list[Source]:
    """Where whole files of a generation may lie beside its place: its kept copy, also one that was set aside."""
    copy = read_kept(run, series, *key) or read_set_aside(run, series, *key)  # its other files may be whole
    kept = [Source(name="kept copy", storage=run.records, prefix=copy.folder + "/")] if copy is not None else []
    return [*staged, *kept]

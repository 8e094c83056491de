"""Repair a checkpoint in place."""

from __future__ import annotations

from ckptguard.errors import BusyError, CouldNotTellError, ResavingError
from ckptguard.keep.copies import shares_place
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.repair.replace_files import LINKED, CopySource, Damaged, seen_now
from ckptguard.repair.shared_steps import CHECK, NO_COPY, Repair, ToRepair, close_incidents, put_right
from ckptguard.runs.results import Checked
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.settling import youngest_age
from ckptguard.scan.reread import reread
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Finding, Outcome, Severity
from ckptguard.verify.checkpoint import Resave, Verification, verify_checkpoint


def repair_place(repair: Repair, target: ToRepair) -> None:
    """Put right what is wrong in place, and verify the whole. BusyError while training writes it."""
    view, run, manifest, id = repair.view, repair.run, target.manifest, target.id
    checkpoint = view.look_again(manifest.path)
    _refuse_while_written(checkpoint, view.settings.settle)
    wrong = [f for f in manifest.files if reread(run.storage, f.path, f) is not None]
    copy = read_kept(run, id)
    linked = copy is not None and shares_place(run, copy, copy.files)  # then it is no copy any more
    if checkpoint is not None and not _is_still(repair, checkpoint, id, damaged=bool(wrong)):
        return
    if not wrong:
        return
    view.refresh(id.series)
    verdict = view.history.verdict(id)
    content = sealed_outcome(verdict) if verdict is not None else None
    damaged = [Damaged(file=f, storage=run.storage, key=f.path, seen=seen_now(run.storage, f.path)) for f in wrong]
    if content not in (Outcome.GOOD, Outcome.SUSPECT):
        for one in damaged:
            repair.note(target, one, None, reason="what was sealed was not good either")
        return
    done = put_right(repair, target, damaged, _sources(repair, id), none=LINKED if linked else NO_COPY)
    if not done:
        return
    present = view.look_again(manifest.path)
    if present is None:
        raise CouldNotTellError(f"{manifest.path} vanished after it was repaired")
    notes = tuple(
        Finding(check=CHECK, severity=Severity.NOTICE, message=f"put back from the {source}", file=one.file.path)
        for one, source in done
    )
    checked = _verify(repair, present, Verification(md5=False, notes=notes))
    repair.checked.append(checked)
    if checked.outcome in (Outcome.GOOD, Outcome.SUSPECT):
        close_incidents(run, {"checkpoint": str(id), "series": id.series, "path": manifest.path}, done)


def _refuse_while_written(checkpoint: Checkpoint | None, settle: float) -> None:
    age = youngest_age(checkpoint) if checkpoint is not None else None
    if checkpoint is not None and age is not None and age < settle:
        raise BusyError(
            f"{checkpoint.path} was written {age:.1f} s ago: training may still be writing it",
            hint="try again when it is quiet",
        )


def _is_still(repair: Repair, checkpoint: Checkpoint, wanted: CheckpointId, *, damaged: bool) -> bool:
    """Whether what lies in place is the generation that is wanted, damaged or not, and not a new save; its verdict is
    brought up to date. BusyError while it is being saved again."""
    checked = _verify(repair, checkpoint, Verification(md5=False, record=not repair.dry_run, resave=Resave.WAIT))
    same = checked.id == wanted
    if damaged and same and checked.outcome is not Outcome.BAD:
        repair.troubles.append(
            f"{checkpoint.path} was damaged when it was read first, and is not now: look after the disk"
        )
    if not damaged or not same or checked.outcome is not Outcome.BAD:
        repair.checked.append(checked)
        return same and not damaged
    return True


def _verify(repair: Repair, checkpoint: Checkpoint, how: Verification) -> Checked:
    try:
        return verify_checkpoint(repair.view, checkpoint, how, work=repair.work)
    except ResavingError as error:
        raise BusyError(error.message) from error


def _sources(repair: Repair, id: CheckpointId) -> list[CopySource]:
    """Where whole files of a generation may lie beside its place: its kept copy, also one that was set aside."""
    copy = read_kept(repair.run, id) or read_set_aside(repair.run, id)  # its other files may be whole
    own = repair.run.records
    return [*repair.staged, *([CopySource(name="kept copy", storage=own, prefix=copy.folder + "/")] if copy else [])]

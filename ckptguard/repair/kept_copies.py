"""Repair a kept copy from its place."""

from __future__ import annotations

import msgspec

from ckptguard.keep.copies import shares_place
from ckptguard.records.kept import read_kept, read_set_aside, reinstate_kept, set_aside
from ckptguard.records.ledger import append_verdict
from ckptguard.records.who_and_when import utc_now
from ckptguard.repair.damaged_copy import CHECK as KEPT_CHECK
from ckptguard.repair.replace_files import CopySource, Damaged, seen_now
from ckptguard.repair.shared_steps import CHECK, Repair, ToRepair, close_incidents, put_right
from ckptguard.runs.run_view import RunView
from ckptguard.scan.reread import reread
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Finding, Severity
from ckptguard.version import __version__


def repair_kept(repair: Repair, target: ToRepair) -> None:
    """Put right what is wrong in the kept copy, which counts again once all of it is whole."""
    run, manifest = repair.run, target.manifest
    aside, marked = read_set_aside(run, target.id), read_kept(run, target.id)
    copy = aside or marked
    if copy is None or (aside is None and shares_place(run, copy, copy.files)):
        return
    wrong = [f for f in manifest.files if reread(run.records, copy.key(f.path), f) is not None]
    damaged = [
        Damaged(file=f, storage=run.records, key=copy.key(f.path), seen=seen_now(run.records, copy.key(f.path)))
        for f in wrong
    ]
    if aside is None and not damaged:
        return
    if not repair.dry_run:
        set_aside(run, copy)
    place = CopySource(name="place", storage=run.storage, prefix="")
    done = put_right(repair, target, damaged, [place])
    if repair.dry_run or len(done) < len(damaged):
        return
    reinstate_kept(run, copy)
    if done:
        _record_kept(repair.view, target.id, done)
    about = {"kept_copy": str(target.id), "series": target.id.series, "path": manifest.path}
    close_incidents(run, about, done)


def _record_kept(view: RunView, id: CheckpointId, done: list[tuple[Damaged, str]]) -> None:
    """The verdict no longer speaks of the copy's damage; where that was all that was wrong, it is what it was."""
    view.refresh(id.series)
    before = view.history.verdict(id)
    if before is None:
        return
    kept = tuple(f for f in before.findings if f.check == KEPT_CHECK)
    others = tuple(f for f in before.findings if f.check != KEPT_CHECK)
    alone = any(f.severity is Severity.ERROR for f in kept) and not any(f.severity is Severity.ERROR for f in others)
    notes = tuple(
        Finding(
            check=CHECK, severity=Severity.NOTICE, message=f"the kept copy's, from the {source}", file=one.file.path
        )
        for one, source in done
    )
    name = append_verdict(
        view.run,
        msgspec.structs.replace(
            before,
            outcome=before.content if alone and before.content is not None else before.outcome,
            findings=(*others, *notes),
            checked_at=utc_now(),
            version=__version__,
            digests=("blake3",),
            seconds=None,
            place_damaged=before.place_damaged and not alone,
            content=None if alone else before.content,
        ),
    )
    view.history.note_verdict(id.series, name)

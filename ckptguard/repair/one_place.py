"""Repair one place of a checkpoint, under its own name or as its kept copy, and record a copy's damage.

The right bytes are staged and read back, then the files are exchanged by rename. Nothing is ever overwritten: the
damaged file goes to quarantine, and the staged one takes its name. Both happen in one step if the file system can
exchange files. Elsewhere the name is free for a moment. If the process is killed then, the next repair finds the
staged file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptguard.errors import (
    BusyError,
    CouldNotTellError,
    ObjectExistsError,
    ObjectMissingError,
    ResavingError,
    StorageError,
)
from ckptguard.keep.copies import put_aside, shares_place
from ckptguard.keep.quarantine import damaged_folder
from ckptguard.layouts import Checkpoint
from ckptguard.records.incidents import Incident, list_incidents, open_incident, update_incident
from ckptguard.records.kept import KeptCopy, read_kept, read_set_aside, reinstate_kept, set_aside
from ckptguard.records.run import Run
from ckptguard.records.scrubs import Where
from ckptguard.records.who_and_when import utc_now
from ckptguard.replicas.replicate import open_replicas
from ckptguard.reporting.open_and_close import leave_report
from ckptguard.runs.file_signatures import all_there
from ckptguard.runs.lock import run_lock
from ckptguard.runs.publish import Place, Staged, copy_within, move_within, publish_file, staging
from ckptguard.runs.removal import remove_record, remove_temporary
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.settling import is_old, youngest_age
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import WrongFile, reread
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local.writes import swap_files
from ckptguard.storage.redaction import plain_url
from ckptguard.values.ids import CheckpointId, is_safe_path
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.temporary_names import REPAIR, REPAIR_OF_COPY
from ckptguard.values.verdict import Finding, Outcome, Severity, Verdict, limit_findings
from ckptguard.verification.checkpoint import Resave, Verification, verify_checkpoint
from ckptguard.version import __version__

_CHECK = "repair"
_KEPT = "kept"
_IN_COPY = "in the kept copy: "
_NO_COPY = "there is no other copy"
_LINKED = "the kept copy is a hard link to the damaged file"
_WHOLE = (Outcome.GOOD, Outcome.SUSPECT)


class CopySource(Place, frozen=True, kw_only=True):
    """Another place with a generation's files. `storage` belongs to this run, its records, or another run."""

    name: str
    near: bool = True  # on the same file system as the damaged file: equal inodes are one file


class Damaged(msgspec.Struct, frozen=True):
    """One file to repair, its place, and its entry when it was checked."""

    file: File
    place: Place
    seen: Entry | None

    @property
    def path(self) -> str:
        """Its path in the run."""
        return self.file.path

    def now(self) -> Entry | None:
        """Return what has its name now."""
        return self.place.entry(self.path)


Done = list[tuple[Damaged, str]]  # what was repaired, and from where


class RepairedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One damaged file, in place or in the kept copy. `source` is where its bytes came from, or would come from in a
    dry run. `reason` says why it could not be repaired."""

    path: str
    id: CheckpointId
    place: str
    file: str
    repaired: bool
    source: str | None
    reason: str = ""


class ToRepair(msgspec.Struct, frozen=True):
    """One place of one checkpoint to repair: its own path, or its kept copy."""

    manifest: Manifest
    place: str

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return self.manifest.id

    @property
    def where(self) -> Where:
        """The id and the place."""
        return self.id, self.place


@dataclass
class Repair:
    """The state of one repair. `retry_after` maps what not to try again to the time until then.

    `staged` holds files that a killed repair had staged.
    """

    view: RunView
    work: Work
    dry_run: bool
    retry_after: dict[Where, float] = field(default_factory=dict)
    staged: list[CopySource] = field(default_factory=list)
    opened: list[CopySource] | None = None
    files: list[RepairedFile] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def run(self) -> Run:
        """The run to repair."""
        return self.view.run

    def replicas(self) -> list[CopySource]:
        """Return the replicas as the farthest sources. They are opened only when nothing else helps."""
        if self.opened is None:
            runs = [view.run for view in open_replicas(self.view)]
            self.opened = [CopySource(run.storage, name=f"replica {plain_url(run.url)}", near=False) for run in runs]
        return self.opened

    def note(self, target: ToRepair, damaged: Damaged, source: str | None, *, reason: str = "") -> None:
        """Record one file: it was repaired from `source`, unless there is a `reason` why not."""
        self.files.append(
            RepairedFile(
                path=target.manifest.path,
                id=target.id,
                place=target.place,
                file=damaged.file.path,
                repaired=source is not None and not self.dry_run,
                source=source,
                reason=reason,
            )
        )


def repair_place(repair: Repair, target: ToRepair) -> None:
    """Repair the files in place, and verify the whole checkpoint. Raises BusyError while training writes it."""
    view, run, manifest, id = repair.view, repair.run, target.manifest, target.id
    checkpoint = view.look_again(manifest.path)
    age = youngest_age(checkpoint) if checkpoint is not None else None
    if age is not None and age < view.settings.settle:
        raise BusyError(
            f"{manifest.path} was written {age:.1f} s ago: training may still be writing it",
            hint="try again when training has finished writing it",
        )
    damaged = _damaged(Place(run.storage), manifest)
    copy = read_kept(run, id)
    linked = copy is not None and shares_place(run, copy, copy.files)  # then it is no independent copy
    if checkpoint is not None and not _is_still(repair, checkpoint, id, damaged=bool(damaged)):
        return
    if not damaged:
        return
    view.refresh(id.series)
    verdict = view.history.verdict(id)
    if verdict is None or sealed_outcome(verdict) not in _WHOLE:
        for one in damaged:
            repair.note(target, one, None, reason="the sealed bytes were not good either")
        return
    beside = read_kept(run, id) or read_set_aside(run, id)  # its other files may be whole
    sources = [*repair.staged, *([CopySource(run.records, beside.folder + "/", name="kept copy")] if beside else [])]
    done = _put_right(repair, target, damaged, sources, none=_LINKED if linked else _NO_COPY)
    if not done:
        return
    present = view.look_again(manifest.path)
    if present is None:
        raise CouldNotTellError(f"{manifest.path} vanished after it was repaired")
    checked = _verify(repair, present, Verification(md5=False, notes=_notes(done, "put back from the")))
    repair.checked.append(checked)
    if checked.outcome in _WHOLE:
        _close_incidents(run, {"checkpoint": str(id), "series": id.series, "path": manifest.path}, done)


def repair_kept(repair: Repair, target: ToRepair) -> None:
    """Repair the kept copy, which counts again once all of it is whole."""
    run, manifest = repair.run, target.manifest
    aside, marked = read_set_aside(run, target.id), read_kept(run, target.id)
    copy = aside or marked
    if copy is None or (aside is None and shares_place(run, copy, copy.files)):
        return
    damaged = _damaged(Place(run.records, copy.folder + "/"), manifest)
    if aside is None and not damaged:
        return
    if not repair.dry_run:
        set_aside(run, copy)
    done = _put_right(repair, target, damaged, [CopySource(run.storage, name="place")])
    if repair.dry_run or len(done) < len(damaged):
        return
    reinstate_kept(run, copy)
    if done:
        _record_kept(repair.view, target.id, done)
    about = {"kept_copy": str(target.id), "series": target.id.series, "path": manifest.path}
    _close_incidents(run, about, done)


def _damaged(place: Place, manifest: Manifest) -> list[Damaged]:
    """Return the files whose bytes on the disk are wrong now."""
    wrong = [file for file in manifest.files if reread(place.storage, place.key(file.path), file) is not None]
    return [Damaged(file, place, place.entry(file.path)) for file in wrong]


def _is_still(repair: Repair, checkpoint: Checkpoint, wanted: CheckpointId, *, damaged: bool) -> bool:
    """True if the wanted generation is in place, and no newer save. Raises BusyError while it is saved again."""
    checked = _verify(repair, checkpoint, Verification(md5=False, record=not repair.dry_run, resave=Resave.WAIT))
    same = checked.id == wanted
    if damaged and same and checked.outcome is Outcome.BAD:
        return True
    if damaged and same:
        repair.troubles.append(
            f"{checkpoint.path} was damaged when read the first time, and right the second time: check the disk"
        )
    repair.checked.append(checked)
    return same and not damaged


def _verify(repair: Repair, checkpoint: Checkpoint, how: Verification) -> Checked:
    try:
        return verify_checkpoint(repair.view, checkpoint, how, work=repair.work)
    except ResavingError as error:
        raise BusyError(error.message) from error


def _put_right(
    repair: Repair, target: ToRepair, damaged: list[Damaged], sources: list[CopySource], *, none: str = _NO_COPY
) -> Done:
    """Stage every file that has a source before any is moved, then exchange them. Returns what was repaired.

    A dry run only searches for sources. `none` says why only replicas can be a source.
    """
    if not damaged:
        return []
    # If the settings want full copies, a repaired file is one, too.
    run, how = repair.run, "copy" if repair.view.settings.keep == "copy" else "clone"
    ready, done = [], []
    storage = damaged[0].place.storage
    kind = REPAIR_OF_COPY if storage is run.records else REPAIR
    with nullcontext(Staged(Place(storage))) if repair.dry_run else staging(storage, kind) as staged:
        for one in damaged:
            source, why = _whole_source(one, sources)
            if source is None:
                source, more = _whole_source(one, repair.replicas())
                why = "; ".join(reason for reason in (why or none, more) if reason)
            if source is not None:
                why = "" if repair.dry_run else _stage(run, one, source, staged.place, how=how) or ""
            if source is None or why:
                repair.note(target, one, None, reason=why)
            elif repair.dry_run:
                repair.note(target, one, source.name)
            else:
                ready.append((one, source.name))
        aside = damaged_folder(target.id)
        for one, name in ready:
            staged.needed = True
            try:
                _exchange(run, one, staged.place, aside)
            except BusyError:
                staged.needed = one.now() is None
                raise
            staged.needed = False
            done.append((one, name))
            repair.note(target, one, name)
    return done


def _whole_source(damaged: Damaged, sources: Sequence[CopySource]) -> tuple[CopySource | None, str]:
    """Return the first source with the right bytes of a file, read now from the disk; else why none has them."""
    reasons = []
    for source in sources:
        entry = source.entry(damaged.path) if source.near else None
        if entry is not None and damaged.seen is not None and entry.inode == damaged.seen.inode is not None:
            reasons.append(_LINKED)
            continue
        try:
            wrong = reread(source.storage, source.key(damaged.path), damaged.file)
        except CouldNotTellError as error:
            reasons.append(f"the {source.name} cannot be read: {error.message}")
            continue
        if wrong is None:
            return source, ""
        reasons.append(f"in the {source.name} {wrong.message}")
    return None, "; ".join(reasons)


def _stage(run: Run, damaged: Damaged, source: CopySource, staged: Place, *, how: str) -> str | None:
    """Copy a file to the staging place, and read it back. Returns what is wrong with it, or None.

    The copy is never a link: changes to one file must not reach the other. StorageFullError leaves nothing there.
    """
    wrong = None
    if source.storage in (run.storage, run.records):
        copy_within(run, source, staged, damaged.path, how=how)
    else:
        wrong = publish_file(source, staged, damaged.file, Pace())
    if wrong is None:
        found = reread(staged.storage, staged.key(damaged.path), damaged.file)
        wrong = None if found is None else found.message
    if wrong is None and staged.storage.root is not None and damaged.file.mtime_ns is not None:
        # With a new time, the next damage to it would look as if training saved it again.
        os.utime(staged.storage.path_of(staged.key(damaged.path)), ns=(damaged.file.mtime_ns,) * 2)
    return None if wrong is None else f"{damaged.path} was not copied correctly: {wrong}"


def _exchange(run: Run, damaged: Damaged, staged: Place, folder: str) -> None:
    """Move the damaged file to a folder in the records, and the staged file to its name.

    Raises BusyError if another process saved a file there meanwhile. That file is not lost.
    """
    seen, now, aside = damaged.seen, damaged.now(), Place(run.records, folder + "/")
    if (now and now.signature) != (seen and seen.signature):
        raise BusyError(f"{damaged.path} changed while it was repaired")
    if _swapped(run, damaged, staged, aside):
        return
    if seen is not None:
        _move_aside(run, damaged, aside)
    try:
        move_within(run, staged, damaged.place, damaged.path)
    except ObjectExistsError:
        raise _saved_again(damaged) from None


def cut_short(run: Run) -> tuple[set[str], list[tuple[Storage, str]]]:
    """Return what killed repairs left: the files in place under repair, and the folders of their staged files.

    The caller holds the run's lock. Without a lock, only old folders count as abandoned.
    """
    files: set[str] = set()
    folders: list[tuple[Storage, str]] = []
    for storage, name in ((run.storage, REPAIR), (run.records, REPAIR_OF_COPY)):
        try:
            names = [e.key for e in storage.list("") if name.fits(e.name, e.kind)]
        except ObjectMissingError:
            continue
        for folder in names:
            staged = storage.list(folder, recursive=True)
            if storage.root is None and not is_old(storage, staged):
                continue
            folders.append((storage, folder))
            if storage is run.storage:
                paths = (entry.key.removeprefix(folder + "/") for entry in staged)
                files.update(path for path in paths if is_safe_path(path))
    return files, folders


def _swapped(run: Run, damaged: Damaged, staged: Place, aside: Place) -> bool:
    """Link the damaged file aside, then exchange it with the staged one in one step. False, without a change, if that
    is impossible."""
    root, seen = damaged.place.storage.root, damaged.seen
    if root is None or seen is None or seen.kind != "file":
        return False
    try:
        copy_within(run, damaged.place, aside, damaged.path, how="link")
    except StorageError:
        return False
    names = staged.key(damaged.path), damaged.place.key(damaged.path)
    if not swap_files(root, *names):
        remove_record(run, aside.key(damaged.path))
        return False
    out = staged.entry(damaged.path)
    if out is None or out.signature != seen.signature:
        swap_files(root, *names)
        remove_record(run, aside.key(damaged.path))
        raise _saved_again(damaged)
    remove_temporary(staged.storage, names[0])
    return True


def _move_aside(run: Run, damaged: Damaged, aside: Place) -> None:
    move_within(run, damaged.place, aside, damaged.path)
    moved = aside.entry(damaged.path)
    changed = (moved and moved.signature) != (damaged.seen and damaged.seen.signature)
    if changed and damaged.place.storage.root is not None:
        move_within(run, aside, damaged.place, damaged.path)  # a trainer saved between the check and the move
        raise _saved_again(damaged)


def _saved_again(damaged: Damaged) -> BusyError:
    return BusyError(f"{damaged.path} was saved again while it was repaired")


def _notes(done: Done, what: str) -> tuple[Finding, ...]:
    return tuple(
        Finding(check=_CHECK, severity=Severity.NOTICE, message=f"{what} {source}", file=one.file.path)
        for one, source in done
    )


def _record_kept(view: RunView, id: CheckpointId, done: Done) -> None:
    """Remove the copy's damage from the verdict. If nothing else was wrong, the old outcome returns."""
    view.refresh(id.series)
    before = view.history.verdict(id)
    if before is None:
        return
    others = tuple(f for f in before.findings if f.check != _KEPT)
    alone = {f.check for f in before.findings if f.severity is Severity.ERROR} == {_KEPT}
    _add_verdict(
        view,
        before,
        outcome=before.content if alone and before.content is not None else before.outcome,
        findings=(*others, *_notes(done, "the kept copy's, from the")),
        place_damaged=before.place_damaged and not alone,
        seen=() if alone else before.seen,
        content=None if alone else before.content,
    )


def _add_verdict(view: RunView, before: Verdict, **changes: Any) -> None:
    """Give a new verdict that differs from the one before only so."""
    now = msgspec.structs.replace(
        before, checked_at=utc_now(), version=__version__, digests=("blake3",), seconds=None, **changes
    )
    view.history.add_verdict(now)


def _close_incidents(run: Run, about: dict[str, str], done: Done) -> None:
    """Close the incidents about this damage: it was repaired."""
    names = ", ".join(sorted({source for _, source in done}))
    for incident in list_incidents(run):
        if incident.state != "closed" and incident.cause == "damage" and about.items() <= incident.evidence.items():
            update_incident(run, incident, state="closed", action=f"restored the right bytes from the {names}")


def record_kept_damage(
    view: RunView, copy: KeptCopy, manifest: Manifest, wrong: Sequence[WrongFile], *, source: str
) -> tuple[tuple[Finding, ...], Incident | None]:
    """Set a damaged copy aside, and record what is wrong with it.

    The findings are warnings if the files in place still hold the generation. Otherwise they are errors, because no
    whole copy is left. Each names a damaged tensor, or the file. Returns the findings, and the incident if it is new.
    """
    run = view.run
    with run_lock(run):
        if read_kept(run, copy.id) != copy:
            return (), None  # released meanwhile
        view.refresh(copy.series)
        alone = not _in_place(view, manifest)
        severity = Severity.ERROR if alone else Severity.WARNING
        findings = limit_findings(
            [
                Finding(check=_KEPT, severity=severity, message=_IN_COPY + one.message, file=one.file, tensor=tensor)
                for one in wrong
                for tensor in one.tensors or (None,)
            ]
        )
        before = view.history.verdict(copy.id)
        if before is not None and not set(findings) <= set(before.findings):
            _add_verdict(
                view,
                before,
                outcome=Outcome.BAD if alone else before.outcome,
                findings=(*(f for f in before.findings if f.check != _KEPT), *findings),
                place_damaged=before.place_damaged or alone,
                content=sealed_outcome(before) if alone else before.content,
            )
        incident = _incident(run, copy, findings, source)  # before a repair can look for it to close it
        put_aside(run, copy)
    return findings, incident


def _in_place(view: RunView, manifest: Manifest) -> bool:
    """True if this generation is in place, as far as records and sizes show."""
    id, history = manifest.id, view.history
    verdict = history.verdict(id)
    if verdict is None or verdict.place_damaged or history.current_if_readable(id.series, id.step, manifest.path) != id:
        return False
    return all_there(view.run.storage, manifest.files)


def _incident(run: Run, copy: KeptCopy, findings: tuple[Finding, ...], source: str) -> Incident | None:
    about = {"kept_copy": str(copy.id), "series": copy.series, "path": copy.path}
    if any(about.items() <= i.evidence.items() and i.state != "closed" for i in list_incidents(run)):
        return None
    first = findings[0]
    where = f"{first.file}: {first.tensor}" if first.tensor else first.file
    incident = open_incident(
        run,
        step=copy.id.number,
        cause="damage",
        reason=f"the kept copy of {copy.path} is damaged: {where}: {first.message}",
        evidence=about,
        source=source,
    )
    leave_report(run, incident)
    return incident

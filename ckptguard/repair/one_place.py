"""Repair one place of a checkpoint, under its own name or as its kept copy, and record a copy's damage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ResavingError
from ckptguard.keep.copies import put_aside, shares_place
from ckptguard.keep.quarantine import damaged_folder
from ckptguard.layouts import Checkpoint
from ckptguard.records.incidents import Incident, list_incidents, open_incident, update_incident
from ckptguard.records.kept import KeptCopy, read_kept, read_set_aside, reinstate_kept, set_aside
from ckptguard.records.run import Run
from ckptguard.records.scrubs import Where
from ckptguard.records.who_and_when import utc_now
from ckptguard.repair.replace_files import LINKED, CopySource, Damaged, exchange, stage, whole_source
from ckptguard.replicas.replicate import open_replicas
from ckptguard.reporting.open_and_close import leave_report
from ckptguard.runs.file_signatures import all_there
from ckptguard.runs.lock import run_lock
from ckptguard.runs.publish import Place, Staged, staging
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import Work
from ckptguard.scan.reread import WrongFile, reread
from ckptguard.storage.redaction import plain_url
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.temporary_names import REPAIR, REPAIR_OF_COPY
from ckptguard.values.verdict import Finding, Outcome, Severity, limit_findings
from ckptguard.verification.checkpoint import Resave, Verification, verify_checkpoint
from ckptguard.version import __version__

_CHECK = "repair"
_KEPT = "kept"
_IN_COPY = "in the kept copy: "
_NO_COPY = "there is no other copy"
_WHOLE = (Outcome.GOOD, Outcome.SUSPECT)
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
    done = _put_right(repair, target, damaged, sources, none=LINKED if linked else _NO_COPY)
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
    storage = damaged[0].storage
    kind = REPAIR_OF_COPY if storage is run.records else REPAIR
    with nullcontext(Staged(Place(storage))) if repair.dry_run else staging(storage, kind) as staged:
        for one in damaged:
            source, why = whole_source(one, sources)
            if source is None:
                source, more = whole_source(one, repair.replicas())
                why = "; ".join(reason for reason in (why or none, more) if reason)
            if source is not None:
                why = "" if repair.dry_run else stage(run, one, source, staged.place, how=how) or ""
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
                exchange(run, one, staged.place, aside)
            except BusyError:
                staged.needed = one.now() is None
                raise
            staged.needed = False
            done.append((one, name))
            repair.note(target, one, name)
    return done


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
    verdict = msgspec.structs.replace(
        before,
        outcome=before.content if alone and before.content is not None else before.outcome,
        findings=(*others, *_notes(done, "the kept copy's, from the")),
        checked_at=utc_now(),
        version=__version__,
        digests=("blake3",),
        seconds=None,
        place_damaged=before.place_damaged and not alone,
        seen=() if alone else before.seen,
        content=None if alone else before.content,
    )
    view.history.add_verdict(verdict)


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
            verdict = msgspec.structs.replace(
                before,
                outcome=Outcome.BAD if alone else before.outcome,
                findings=(*(f for f in before.findings if f.check != _KEPT), *findings),
                checked_at=utc_now(),
                version=__version__,
                digests=("blake3",),
                seconds=None,
                place_damaged=before.place_damaged or alone,
                content=sealed_outcome(before) if alone else before.content,
            )
            view.history.add_verdict(verdict)
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

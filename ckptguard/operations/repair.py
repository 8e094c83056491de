"""Repair: put the right bytes back from a copy that has them, only where they are wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ckptguard.config import Settings
from ckptguard.errors import BusyError, CouldNotTellError, NotFoundError, ResavingError
from ckptguard.layouts import Checkpoint
from ckptguard.manifest import Manifest
from ckptguard.operations.history import History, Key, load_history
from ckptguard.operations.keep import sealed_outcome, shares_place
from ckptguard.operations.kept_damage import CHECK as KEPT_CHECK
from ckptguard.operations.listing import find_checkpoint, list_checkpoints, select_checkpoint
from ckptguard.operations.locking import run_lock
from ckptguard.operations.quiet import youngest_age
from ckptguard.operations.repair_files import (
    LINKED,
    Damaged,
    Source,
    aside_folder,
    cut_short,
    exchange,
    seen_now,
    stage,
    staging,
    whole_source,
)
from ckptguard.operations.report import Checked
from ckptguard.operations.verify import Resave, verify_checkpoint
from ckptguard.records.clock import utc_now
from ckptguard.records.incidents import list_incidents, update_incident
from ckptguard.records.kept import list_set_aside, read_kept, read_set_aside, reinstate_kept, set_aside
from ckptguard.records.ledger import append_verdict
from ckptguard.records.run import Run
from ckptguard.records.scrubs import IN_PLACE, KEPT
from ckptguard.scan import Scanner, scan_files
from ckptguard.scan.reread import reread
from ckptguard.verdict import Finding, Outcome, Severity
from ckptguard.version import __version__

CHECK = "repair"


class RepairedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One damaged file, in place or in the kept copy. `source` is where its bytes came from, or would come from in a
    dry run; `reason` why it could not be repaired."""

    path: str
    series: str
    step: int | None
    id: str
    place: str
    file: str
    repaired: bool
    source: str | None
    reason: str = ""


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """What was damaged and what became of it. `checked`: the verdicts that came of it. `could_not_tell` are sentences
    about what could not be read or written."""

    dry_run: bool
    files: tuple[RepairedFile, ...]
    checked: tuple[Checked, ...]
    could_not_tell: tuple[str, ...] = ()

    @property
    def still_bad(self) -> bool:
        """Whether a checkpoint that was looked at is bad all the same."""
        return any(one.outcome is Outcome.BAD for one in self.checked)


@dataclass
class _Work:
    run: Run
    settings: Settings
    scanner: Scanner
    dry_run: bool
    staged: list[Source] = field(default_factory=list)
    files: list[RepairedFile] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def how(self) -> str:
        """Where copies are to have bytes of their own, a repaired file has them, too."""
        return "copy" if self.settings.keep == "copy" else "clone"


_Target = tuple[str, str, Key, Manifest]  # place, series, key


def repair(
    run: Run, settings: Settings, word: str | None = None, *, dry_run: bool = False, scanner: Scanner = scan_files
) -> Repaired:
    """Repair what is known to be damaged: checkpoints in place and kept copies; or the checkpoint that `word` names (a
    path, id or step), whose bytes are read first, whatever its verdict.

    A file's bytes come from where all of them are right, read right before; they are copied, read back and renamed into
    place, and the damaged ones go to quarantine. The whole checkpoint is verified at the end. What is gone altogether
    is repaired only if it is named. With `dry_run` nothing is written.

    BusyError if another process holds the run, or training writes what is to be repaired. NotFoundError.
    """
    work = _Work(run, settings, scanner, dry_run)
    with contextlib.nullcontext() if dry_run else run_lock(run):
        history = load_history(run)
        if word is not None:
            _repair_all(work, _named(run, history, word), named=True)
        else:
            _repair_damaged(work, _damaged_places(run, history))
    return Repaired(
        dry_run=dry_run,
        files=tuple(work.files),
        checked=tuple(work.checked),
        could_not_tell=tuple(work.troubles),
    )


def mend(run: Run, settings: Settings, *, scanner: Scanner) -> Repaired:
    """What is repaired without being asked for: kept copies, which are ours; repairs that were cut short; and with
    ``repair = true`` what is damaged in place. Trouble is told in the answer."""
    work = _Work(run, settings, scanner, dry_run=False)
    try:
        with run_lock(run):
            _repair_damaged(work, _damaged_places(run, load_history(run)) if settings.repair else [])
    except (BusyError, CouldNotTellError) as error:
        work.troubles.append(f"nothing was repaired: {error.message}")
    return Repaired(
        dry_run=False, files=tuple(work.files), checked=tuple(work.checked), could_not_tell=tuple(work.troubles)
    )


def _repair_damaged(work: _Work, places: list[_Target]) -> None:
    """Places first: it may turn out on the way that their kept copies are damaged, in other files."""
    _repair_all(work, places, named=False)
    if not work.dry_run:
        _finish(work)
    _repair_all(work, _damaged_kept(work.run, load_history(work.run)), named=False)


def _repair_all(work: _Work, targets: list[_Target], *, named: bool) -> None:
    repairs: dict[str, Callable[[_Work, str, Key, Manifest], None]] = {IN_PLACE: _repair_place, KEPT: _repair_kept}
    for place, series, key, manifest in targets:
        try:
            repairs[place](work, series, key, manifest)
        except BusyError:
            if named:
                raise
            work.troubles.append(f"{manifest.path} was not repaired: it is being written")
        except CouldNotTellError as error:
            work.troubles.append(f"{manifest.path} could not be repaired: {error.message}")


def _finish(work: _Work) -> None:
    """Finish repairs that were cut short: what has no bytes under its name gets them after all. What they had staged
    is among the sources, and stays until no name is free."""
    run = work.run
    files, folders = cut_short(run)
    if not folders:
        return
    missing = {file for file in files if seen_now(run.storage, file) is None}
    history = load_history(run)
    targets: list[_Target] = []
    for series in history.names if missing else ():
        for key in history.standings(series):
            manifest = history.manifest(series, key)
            hit = manifest is not None and not missing.isdisjoint(f.path for f in manifest.files)
            if manifest is not None and hit and history.current_if_readable(series, key[0], manifest.path) == key:
                targets.append((IN_PLACE, series, key, manifest))
    work.staged = [
        Source(name="copy that was staged", storage=storage, prefix=folder + "/")
        for storage, folder in folders
        if storage is run.storage
    ]
    _repair_all(work, targets, named=False)
    if all(seen_now(run.storage, file) is not None for _, _, _, manifest in targets for file in _paths(manifest)):
        for storage, folder in folders:
            storage.remove(folder)


def _paths(manifest: Manifest) -> list[str]:
    return [file.path for file in manifest.files]


def _named(run: Run, history: History, word: str) -> list[_Target]:
    """What a user means: in place, or gone, but known."""
    found: list[_Target] = []
    try:
        checkpoint = select_checkpoint(run, word)
        key = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
        manifest = history.manifest(checkpoint.series, key) if key is not None else None
        if key is None or manifest is None:
            raise NotFoundError(f"{checkpoint.path} was never sealed: there is nothing to hold its bytes against")
        series = checkpoint.series
    except NotFoundError:
        name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
        known = [
            (series, key, manifest)
            for series in history.names
            for key in history.standings(series)
            if (manifest := history.manifest(series, key)) is not None
            and name in (manifest.path, manifest.id)
            and history.current_if_readable(series, key[0], manifest.path) == key
        ]
        if len(known) != 1:
            raise
        series, key, manifest = known[0]
    found.append((IN_PLACE, series, key, manifest))
    if read_kept(run, series, *key) is not None or read_set_aside(run, series, *key) is not None:
        found.append((KEPT, series, key, manifest))
    return found


def _damaged_places(run: Run, history: History) -> list[_Target]:
    found: list[_Target] = []
    for checkpoint in list_checkpoints(run):
        bad = {k for k, s in history.standings(checkpoint.series).items() if s.outcome is Outcome.BAD}
        if not any(step == checkpoint.step for step, _ in bad):
            continue
        key = history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)
        verdict = history.verdict(checkpoint.series, key) if key in bad and key is not None else None
        manifest = history.manifest(checkpoint.series, key) if key is not None else None
        if key is not None and manifest is not None and verdict is not None and verdict.place_damaged:
            found.append((IN_PLACE, checkpoint.series, key, manifest))
    return found


def _damaged_kept(run: Run, history: History) -> list[_Target]:
    found: list[_Target] = []
    for series, step, generation in list_set_aside(run):
        key = (step, generation)
        manifest = history.manifest(series, key)
        if manifest is not None and read_set_aside(run, series, *key) is not None:
            found.append((KEPT, series, key, manifest))
    return found


def _repair_place(work: _Work, series: str, key: Key, manifest: Manifest) -> None:
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
            _note(work, series, key, manifest, IN_PLACE, one, None, "what was sealed was not good either")
        return
    sources = _sources(run, series, key, work.staged)
    if linked and not sources:
        for one in damaged:
            _note(work, series, key, manifest, IN_PLACE, one, None, LINKED)
        return
    done = _replace(work, series, key, manifest, IN_PLACE, damaged, sources)
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
        _close_incidents(run, {"checkpoint": manifest.id, "series": series, "path": manifest.path}, done)


def _refuse_while_written(checkpoint: Checkpoint | None, settings: Settings) -> None:
    age = youngest_age(checkpoint) if checkpoint is not None else None
    if checkpoint is not None and age is not None and age < settings.settle:
        raise BusyError(
            f"{checkpoint.path} was written {age:.1f} s ago: training may still be writing it",
            hint="try again when it is quiet",
        )


def _is_still(work: _Work, checkpoint: Checkpoint, wanted: str, *, damaged: bool) -> bool:
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


def _repair_kept(work: _Work, series: str, key: Key, manifest: Manifest) -> None:
    run = work.run
    aside, marked = read_set_aside(run, series, *key), read_kept(run, series, *key)
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
    if not work.dry_run:
        set_aside(run, copy)
    place = Source(name="place", storage=run.storage, prefix="")
    done = _replace(work, series, key, manifest, KEPT, damaged, [place])
    if work.dry_run or len(done) < len(damaged):
        return
    reinstate_kept(run, copy)
    _record_kept(work, series, key, done)
    _close_incidents(run, {"kept_copy": manifest.id, "series": series, "path": manifest.path}, done)


def _record_kept(work: _Work, series: str, key: Key, done: list[tuple[Damaged, str]]) -> None:
    """The verdict no longer speaks of the copy's damage; where that was all that was wrong, it is what it was."""
    before = load_history(work.run).verdict(series, key)
    if before is None or not done:
        return
    kept = tuple(f for f in before.findings if f.check == KEPT_CHECK)
    others = tuple(f for f in before.findings if f.check != KEPT_CHECK)
    alone = any(f.severity is Severity.ERROR for f in kept) and not any(f.severity is Severity.ERROR for f in others)
    notes = tuple(
        Finding(
            check=CHECK,
            severity=Severity.NOTICE,
            message=f"the kept copy's, from the {s}",
            file=d.file.path,
        )
        for d, s in done
    )
    append_verdict(
        work.run,
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


def _replace(
    work: _Work,
    series: str,
    key: Key,
    manifest: Manifest,
    place: str,
    damaged: list[Damaged],
    sources: list[Source],
) -> list[tuple[Damaged, str]]:
    """Stage what has a source, all of it before anything is moved, and exchange it; returns what was put right, and
    from where. In a dry run it is only looked for."""
    run, done = work.run, []
    if not damaged:
        return []
    ready: list[tuple[Damaged, str]] = []
    with staging(run, damaged[0].storage) as staged:
        for one in damaged:
            source, why = whole_source(one, sources)
            if source is not None and not work.dry_run:
                why = stage(run, one, source, staged.prefix, how=work.how) or ""
            if source is None or why:
                _note(work, series, key, manifest, place, one, None, why)
            elif work.dry_run:
                _note(work, series, key, manifest, place, one, source.name, "")
            else:
                ready.append((one, source.name))
        aside = aside_folder(series, key)
        for one, name in ready:
            staged.needed = True
            exchange(run, one, staged.prefix, aside)
            staged.needed = False
            done.append((one, name))
            _note(work, series, key, manifest, place, one, name, "", repaired=True)
    return done


def _sources(run: Run, series: str, key: Key, staged: list[Source]) -> list[Source]:
    """Where whole files of a generation may lie beside its place: its kept copy, also one that was set aside."""
    copy = read_kept(run, series, *key) or read_set_aside(run, series, *key)  # its other files may be whole
    kept = [Source(name="kept copy", storage=run.records, prefix=copy.folder + "/")] if copy is not None else []
    return [*staged, *kept]


def _note(
    work: _Work,
    series: str,
    key: Key,
    manifest: Manifest,
    place: str,
    damaged: Damaged,
    source: str | None,
    reason: str,
    *,
    repaired: bool = False,
) -> None:
    work.files.append(
        RepairedFile(
            path=manifest.path,
            series=series,
            step=key[0],
            id=manifest.id,
            place=place,
            file=damaged.file.path,
            repaired=repaired,
            source=source,
            reason=reason,
        )
    )


def _close_incidents(run: Run, about: dict[str, str], done: list[tuple[Damaged, str]]) -> None:
    names = ", ".join(sorted({source for _, source in done}))
    for incident in list_incidents(run):
        if incident.state != "closed" and incident.cause == "damage" and about.items() <= incident.evidence.items():
            update_incident(run, incident, state="closed", action=f"put the right bytes back from the {names}")

"""Repair: put the right bytes back from a copy that has them, only where they are wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, NotFoundError, RecordsError, SettingsError
from ckptguard.records.kept import list_set_aside, read_kept, read_set_aside
from ckptguard.records.run import Run
from ckptguard.records.scrubs import IN_PLACE, KEPT, Where
from ckptguard.repair.in_place import repair_place
from ckptguard.repair.kept_copies import repair_kept
from ckptguard.repair.replace_files import Source, cut_short, seen_now
from ckptguard.repair.shared_steps import RepairedFile, Work
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.listing import list_checkpoints, select_checkpoint
from ckptguard.runs.lock import run_lock
from ckptguard.runs.results import Checked
from ckptguard.scan import Scanner, scan_files
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

_AGAIN = 86400.0  # seconds until a daemon tries again what could not be repaired


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
    work = Work(run, settings, scanner, dry_run)
    with contextlib.nullcontext() if dry_run else run_lock(run):
        history = load_history(run)
        if word is not None:
            _repair_all(work, _named(run, history, word), named=True)
        else:
            _repair_damaged(work, _damaged_places(run, history))
            work.troubles += _unreadable_manifests(run, load_history(run))
    return Repaired(
        dry_run=dry_run,
        files=tuple(work.files),
        checked=tuple(work.checked),
        could_not_tell=tuple(work.troubles),
    )


def mend(run: Run, settings: Settings, hopeless: dict[Where, float], *, scanner: Scanner) -> Repaired:
    """What is repaired without being asked for: kept copies, which are ours; repairs that were cut short; and with
    ``repair = true`` what is damaged in place. Trouble is told in the answer. What could not be repaired is noted in
    `hopeless`, and is not read over and over."""
    now = time.monotonic()
    for where in [where for where, until in hopeless.items() if now >= until]:
        del hopeless[where]
    work = Work(run, settings, scanner, dry_run=False, hopeless=hopeless)
    try:
        with run_lock(run):
            _repair_damaged(work, _damaged_places(run, load_history(run)) if settings.repair else [])
    except (BusyError, CouldNotTellError) as error:
        work.troubles.append(f"nothing was repaired: {error.message}")
    return Repaired(
        dry_run=False, files=tuple(work.files), checked=tuple(work.checked), could_not_tell=tuple(work.troubles)
    )


def _repair_damaged(work: Work, places: list[_Target]) -> None:
    """Places first: it may turn out on the way that their kept copies are damaged, in other files."""
    _repair_all(work, places, named=False)
    if not work.dry_run:
        _finish(work)
    _repair_all(work, _damaged_kept(work.run, load_history(work.run)), named=False)


def _repair_all(work: Work, targets: list[_Target], *, named: bool) -> None:
    repairs: dict[str, Callable[[Work, str, Key, Manifest], None]] = {IN_PLACE: repair_place, KEPT: repair_kept}
    for place, series, key, manifest in targets:
        where, before = (series, key, place), (len(work.files), len(work.troubles))
        if where in work.hopeless and not work.staged:
            continue
        try:
            repairs[place](work, series, key, manifest)
            if any(not file.repaired for file in work.files[before[0] :]) or len(work.troubles) > before[1]:
                work.hopeless[where] = time.monotonic() + _AGAIN
        except BusyError:
            if named:
                raise
            work.troubles.append(f"{manifest.path} was not repaired: it is being written")
        except (CouldNotTellError, SettingsError) as error:
            work.troubles.append(f"{manifest.path} could not be repaired: {error.message}")
            work.hopeless[where] = time.monotonic() + _AGAIN


def _finish(work: Work) -> None:
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
    work.staged = []
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


def _unreadable_manifests(run: Run, history: History) -> list[str]:
    """What lies in place and cannot be held against anything: no copy can put that right."""
    found = []
    for checkpoint in list_checkpoints(run):
        try:
            history.current(checkpoint.series, checkpoint.step, checkpoint.path)
        except RecordsError as error:
            found.append(error.message + (f" ({error.hint})" if error.hint else ""))
    return found


def _damaged_kept(run: Run, history: History) -> list[_Target]:
    found: list[_Target] = []
    for series, step, generation in list_set_aside(run):
        key = (step, generation)
        manifest = history.manifest(series, key)
        if manifest is not None and read_set_aside(run, series, *key) is not None:
            found.append((KEPT, series, key, manifest))
    return found

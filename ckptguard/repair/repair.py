"""Repair: restore the right bytes from a copy that has them, only where they are wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, NotFoundError, RecordsError, SettingsError
from ckptguard.records.kept import list_set_aside, read_kept, read_set_aside
from ckptguard.records.scrubs import IN_PLACE, KEPT, Where
from ckptguard.repair.one_place import (
    CopySource,
    Repair,
    RepairedFile,
    ToRepair,
    cut_short,
    repair_kept,
    repair_place,
)
from ckptguard.runs.history import History
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal import remove_staged
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView, select_checkpoint
from ckptguard.runs.work import PLAIN, Work
from ckptguard.storage.protocol import find_entry
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome

_AGAIN = 86400.0  # seconds until a daemon tries again what could not be repaired


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a repair: the damaged files, and the new verdicts. `could_not_tell` says what could not be read or
    written."""

    dry_run: bool
    files: tuple[RepairedFile, ...]
    checked: tuple[Checked, ...]
    could_not_tell: tuple[str, ...] = ()

    @property
    def still_bad(self) -> bool:
        """True if a checked checkpoint is still bad."""
        return any(one.outcome is Outcome.BAD for one in self.checked)


def repair(
    view: RunView,
    word: str | None = None,
    *,
    dry_run: bool = False,
    work: Work = PLAIN,
    agree: Callable[[Repaired], None] | None = None,
) -> Repaired:
    """Repair known damage to checkpoints in place and kept copies, or the checkpoint that `word` names (path, id or
    step).

    A named checkpoint is read first, whatever its verdict. Bytes come only from a file that is completely right, read
    just before. They are copied, read back and renamed into place. Damaged files go to quarantine. At the end the whole
    checkpoint is verified. A checkpoint without any file is repaired only by name. With `dry_run` nothing is written.
    `agree` is called with the plan, as a dry run answers it, before anything is written. It may raise.

    Raises:
        BusyError: another process holds the run, or training writes the checkpoint.
        NotFoundError: there is no such checkpoint.
    """
    with contextlib.nullcontext() if dry_run else run_lock(view.run):
        if agree is not None:
            agree(_repaired(Repair(view, work, dry_run=True), word))
        return _repaired(Repair(view, work, dry_run), word)


def _repaired(one: Repair, word: str | None) -> Repaired:
    if word is not None:
        _repair_all(one, _named(one.view, word), named=True)
    else:
        _repair_damaged(one, _damaged_places(one.view))
        one.troubles += _unreadable_manifests(one.view)
    return _result(one)


def repair_automatically(view: RunView, retry_after: dict[Where, float], *, work: Work) -> Repaired:
    """Make the automatic repairs: kept copies, interrupted repairs, and with ``repair = true`` damage in place.

    Problems are part of the result. What could not be repaired is added to `retry_after`, and not read again for a day.
    """
    now = time.monotonic()
    for where in [where for where, until in retry_after.items() if now >= until]:
        del retry_after[where]
    one = Repair(view, work, dry_run=False, retry_after=retry_after)
    try:
        with run_lock(view.run):
            _repair_damaged(one, _damaged_places(view) if view.settings.repair else [])
    except (BusyError, CouldNotTellError) as error:
        one.troubles.append(f"nothing was repaired: {error.message}")
    return _result(one)


def _result(one: Repair) -> Repaired:
    return Repaired(
        dry_run=one.dry_run, files=tuple(one.files), checked=tuple(one.checked), could_not_tell=tuple(one.troubles)
    )


def _repair_damaged(one: Repair, places: Sequence[ToRepair]) -> None:
    """Repair the files in place first: this may show damage in other files of their kept copies."""
    _repair_all(one, places, named=False)
    if not one.dry_run:
        _finish(one)
    _repair_all(one, _damaged_kept(one.view), named=False)


def _repair_all(one: Repair, targets: Sequence[ToRepair], *, named: bool) -> None:
    repairs: dict[str, Callable[[Repair, ToRepair], None]] = {IN_PLACE: repair_place, KEPT: repair_kept}
    for target in targets:
        path, before = target.manifest.path, (len(one.files), len(one.troubles))
        if target.where in one.retry_after and not one.staged:
            continue
        try:
            repairs[target.place](one, target)
            if any(not file.repaired for file in one.files[before[0] :]) or len(one.troubles) > before[1]:
                one.retry_after[target.where] = time.monotonic() + _AGAIN
        except BusyError:
            if named:
                raise
            one.troubles.append(f"{path} was not repaired: it is being written")
        except (CouldNotTellError, SettingsError) as error:
            one.troubles.append(f"{path} could not be repaired: {error.message}")
            one.retry_after[target.where] = time.monotonic() + _AGAIN


def _finish(one: Repair) -> None:
    """Finish interrupted repairs, so that no name stays without a file.

    Their staged files are among the sources, and stay until every name has its file.
    """
    run, history = one.run, one.view.history
    files, folders = cut_short(run)
    if not folders:
        return
    missing = {file for file in files if find_entry(run.storage, file) is None}
    hit = _current(history, lambda manifest: not missing.isdisjoint(_paths(manifest))) if missing else []
    targets = [ToRepair(manifest, IN_PLACE) for manifest in hit]
    beside = [(storage, folder) for storage, folder in folders if storage is run.storage]
    one.staged = [CopySource(storage, folder + "/", name="copy that was staged") for storage, folder in beside]
    _repair_all(one, targets, named=False)
    one.staged = []
    if all(find_entry(run.storage, file) is not None for target in targets for file in _paths(target.manifest)):
        staged = {e.key.removeprefix(f + "/") for s, f in folders for e in s.list(f, recursive=True)}
        sealed = {p for m in _current(history, lambda m: not staged.isdisjoint(_paths(m))) for p in _paths(m)}
        for storage, folder in folders:
            remove_staged(storage, folder, sealed)


def _paths(manifest: Manifest) -> list[str]:
    return [file.path for file in manifest.files]


def _current(history: History, wanted: Callable[[Manifest], bool]) -> list[Manifest]:
    """Return the wanted manifests of what should be in place."""
    manifests = (history.manifest(id) for series in history.names for id in history.current_verdicts(series))
    found = [one for one in manifests if one is not None and wanted(one)]
    return [one for one in found if history.current_if_readable(one.series, one.step, one.path) == one.id]


def _named(view: RunView, word: str) -> list[ToRepair]:
    """Return what a user names: a checkpoint in place, or one that is gone but known."""
    run, history = view.run, view.history
    try:
        checkpoint = select_checkpoint(run, view.checkpoints, word)
        id = view.current(checkpoint)
        manifest = history.manifest(id) if id is not None else None
        if manifest is None:
            raise NotFoundError(f"{checkpoint.path} was never sealed, so its right bytes are unknown")
    except NotFoundError:
        name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
        known = _current(history, lambda manifest: name in (manifest.path, str(manifest.id)))
        if len(known) != 1:
            raise
        manifest = known[0]
    targets = [ToRepair(manifest, IN_PLACE)]
    if read_kept(run, manifest.id) is not None or read_set_aside(run, manifest.id) is not None:
        targets.append(ToRepair(manifest, KEPT))
    return targets


def _damaged_places(view: RunView) -> list[ToRepair]:
    history = view.history
    current_verdicts = [one for series in history.names for one in history.current_verdicts(series).values()]
    bad = {(one.id.series, one.id.step) for one in current_verdicts if one.outcome is Outcome.BAD}
    found: list[ToRepair] = []
    for checkpoint in view.checkpoints:
        if (checkpoint.series, checkpoint.step) not in bad or checkpoint.unread is not None:
            continue
        id = view.current_if_readable(checkpoint)
        verdict = history.verdict(id) if id is not None else None
        manifest = history.manifest(id) if id is not None else None
        if manifest is not None and verdict is not None and verdict.place_damaged:
            found.append(ToRepair(manifest, IN_PLACE))
    return found


def _unreadable_manifests(view: RunView) -> list[str]:
    """Return checkpoints whose manifest is unreadable. No copy can repair that."""
    found = []
    for checkpoint in view.checkpoints:
        try:
            view.current(checkpoint)
        except RecordsError as error:
            found.append(error.message + (f" ({error.hint})" if error.hint else ""))
    return found


def _damaged_kept(view: RunView) -> list[ToRepair]:
    aside = (id for id in list_set_aside(view.run) if read_set_aside(view.run, id) is not None)
    manifests = (view.history.manifest(id) for id in aside)
    return [ToRepair(manifest, KEPT) for manifest in manifests if manifest is not None]

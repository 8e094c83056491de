"""Restore: copy a checkpoint's files to a destination, verified: complete or nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator

import msgspec

from ckptguard.errors import (
    ChangedWhileReadError,
    CkptguardError,
    CouldNotTellError,
    DeniedError,
    NoKnownGoodError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
    SettingsError,
    StorageFullError,
)
from ckptguard.layouts import tops
from ckptguard.records.kept import read_kept
from ckptguard.records.pins import InUse
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run
from ckptguard.records.trash import list_trashed, trash_folder
from ckptguard.recover.fetch_files import fetch_files
from ckptguard.replicas.find_replicas import has_newest, known_bad, open_replicas
from ckptguard.runs.find_known_good import known_good_candidates, none_found
from ckptguard.runs.free_space import need_room
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.listing import find_checkpoint, list_checkpoints
from ckptguard.scan import Progress, Scanner, scan_files
from ckptguard.storage import Storage, open_storage
from ckptguard.values.ids import checkpoint_id, record_name, series_folder
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import verify_checkpoint
from ckptguard.verify.compare_copy import copy_differs

_log = logging.getLogger("ckptguard")


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A restored checkpoint. `path` is absolute; `kept`: it came from the kept copy; `source` is the URL of the run or
    replica that it came from."""

    path: str
    id: str
    series: str
    step: int | None
    bytes: int
    kept: bool
    outcome: Outcome
    source: str


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files of a manifest may be read."""

    storage_is_run: bool
    prefix: str
    kept: bool


def restore(
    run: Run,
    settings: Settings,
    dest: str,
    *,
    step: int | None = None,
    force: bool = False,
    scanner: Scanner = scan_files,
    progress: Progress | None = None,
) -> Restored:
    """Copy the known-good checkpoint (or that of `step`) to ``DEST/<original name>``, and read it back.

    DEST must be absent or empty (SettingsError). A checkpoint without a verdict is verified first. One that is not
    GOOD, or whose bytes are no longer those that were sealed, is RefusedError without `force`. Whatever fails, DEST
    is left as it was; where too little space is free (StorageFullError) nothing is written. The nearest whole copy is
    taken: in place, kept, then in the settings' replicas. Without `step` an older good one stands in for what turns out
    damaged or unreadable, and a warning says so. Damage in place is recorded.
    """
    if "://" in dest:
        raise SettingsError("DEST must be a local folder")
    dest = os.path.abspath(os.path.expanduser(dest))
    root = run.storage.root
    if root is not None and os.path.commonpath([os.path.realpath(dest), os.path.realpath(root)]) == os.path.realpath(
        root
    ):
        raise SettingsError(f"{dest} lies inside the run", hint="restore elsewhere, or use ckptguard rollback")
    _refuse_unless_empty(dest)
    return _restore(run, settings, dest, step, force=force, scanner=scanner, progress=progress)


def _restore(
    run: Run,
    settings: Settings,
    dest: str,
    step: int | None,
    *,
    force: bool,
    scanner: Scanner,
    progress: Progress | None,
) -> Restored:
    wrong = "no whole copy of it is there"
    name, unsure = "", None
    for choice in _choices_anywhere(run, settings, step, force=force, scanner=scanner):
        if name:
            _log.warning("%s could not be restored: %s; trying %s", name, wrong, _name(choice))
        name, tried = _name(choice), set[_Source]()
        with InUse(choice.run, "restore") as in_use:
            in_use.pin(choice.series, choice.key)
            room = open_storage(dest, must_exist=False)
            need_room(room, choice.manifest.bytes, f"step {choice.key[0]}", wait=settings.on_full == "wait")
            # Where it lies is looked up after it was pinned, and again: what moved it meanwhile moves it no more.
            while source := next((s for s in _sources(choice, force=force) if s not in tried), None):
                tried.add(source)
                try:
                    restored, wrong = _restore_from(
                        choice, source, dest, force=force, scanner=scanner, progress=progress
                    )
                except CouldNotTellError as error:
                    if isinstance(error, StorageFullError) or getattr(error, "key", "").startswith(dest):
                        raise
                    restored, wrong, unsure = None, error.message, error
                if restored is not None:
                    return restored
                if source.storage_is_run:
                    _record_damage(choice, settings, scanner)
    if unsure is not None:
        raise unsure
    raise RefusedError(
        f"{name} is damaged: {wrong}",
        outcome=Outcome.BAD.value,
        hint="restore another step, or use --force for the damaged bytes",
    )


def _name(choice: _Choice) -> str:
    return f"{checkpoint_id(*choice.key)} of {choice.series} in {choice.run.url}"


def _record_damage(choice: _Choice, settings: Settings, scanner: Scanner) -> None:
    """What lies in place was not what was sealed: it is read once more, and gets its verdict."""
    with contextlib.suppress(CouldNotTellError):
        checkpoint = find_checkpoint(choice.run, choice.manifest.path)
        if checkpoint is not None:
            verify_checkpoint(choice.run, checkpoint, settings, scanner=scanner, md5=False)


def _restore_from(
    choice: _Choice, source: _Source, dest: str, *, force: bool, scanner: Scanner, progress: Progress | None
) -> tuple[Restored | None, str]:
    """One copy, or what is wrong with it."""
    storage = choice.run.storage if source.storage_is_run else choice.run.records
    try:
        with _staging(dest) as temporary:
            _copy(storage, source.prefix, choice.manifest, temporary, progress)
            difference = copy_differs(open_storage(temporary), "", choice.manifest, scanner=scanner)
            if difference is not None and not force:
                return None, difference
            return Restored(
                path=_publish(temporary, dest, choice.manifest, choice.run),
                id=checkpoint_id(*choice.key),
                series=choice.series,
                step=choice.key[0],
                bytes=choice.manifest.bytes,
                kept=source.kept,
                outcome=choice.outcome,
                source=choice.run.url,
            ), ""
    except (ObjectMissingError, ChangedWhileReadError) as error:
        return None, error.message


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that may be restored, and the run or replica that holds it."""

    run: Run
    series: str
    key: Key
    manifest: Manifest
    outcome: Outcome


def _choices_anywhere(
    run: Run, settings: Settings, step: int | None, *, force: bool, scanner: Scanner
) -> Iterator[_Choice]:
    """What to try, newest first, and each in the run before its replicas; those are asked only when they are needed."""
    own, failed = _unless_none(run, settings, step, force=force, scanner=scanner)
    history = load_history(run)
    if own and (step is not None or not settings.replicas or has_newest(history, own[0].series, own[0].key)):
        yield own.pop(0)
    elsewhere: list[_Choice] = []
    for replica in open_replicas(run, settings):
        found, _ = _unless_none(replica, settings, step, force=False, scanner=scanner)
        elsewhere += [c for c in found if c.outcome is Outcome.GOOD and not known_bad(history, c.series, c.key)]
    if failed is not None and not elsewhere:
        raise failed
    yield from sorted([*own, *elsewhere], key=lambda c: (c.key[0] or 0, c.key[1]), reverse=True)


def _unless_none(
    run: Run, settings: Settings, step: int | None, *, force: bool, scanner: Scanner
) -> tuple[list[_Choice], CkptguardError | None]:
    try:
        return _choices(run, settings, step, force=force, scanner=scanner), None
    except (NoKnownGoodError, NotFoundError, RefusedError, CouldNotTellError) as error:
        return [], error


def _choices(run: Run, settings: Settings, step: int | None, *, force: bool, scanner: Scanner) -> list[_Choice]:
    """What to try, in order: without `step` every known-good checkpoint, newest first, for the newest may have been
    damaged since its verdict."""
    history = load_history(run)
    good = [
        _choice(history, c.answer.series, c.key, c.manifest, Outcome.GOOD)
        for c in known_good_candidates(run, history)
        if step is None or c.key[0] == step
    ]
    if step is None and not good:
        raise none_found(run, None)
    if good:
        return good
    for checkpoint in list_checkpoints(run):
        known = history.current_if_readable(checkpoint.series, step, checkpoint.path)
        if checkpoint.step == step and (known is None or history.verdict(checkpoint.series, known) is None):
            verify_checkpoint(run, checkpoint, settings, scanner=scanner)
    history = load_history(run)
    options = []
    for series in history.names:
        for key in history.standings(series):
            verdict = history.verdict(series, key) if key[0] == step else None
            if verdict is not None:
                options.append((verdict.outcome is Outcome.GOOD, key[1], series, verdict))
    for _, generation, series, verdict in sorted(options, key=lambda o: (o[0], o[1]), reverse=True):
        key = (step, generation)
        manifest = history.manifest(series, key)
        if manifest is None:
            continue
        if verdict.outcome is not Outcome.GOOD and not force:
            reason = verdict.findings[0].message if verdict.findings else "its verdict says so"
            raise RefusedError(
                f"{checkpoint_id(*key)} of {series} is {verdict.outcome.value}: {reason}",
                outcome=verdict.outcome.value,
                hint="restore another step, or use --force",
            )
        return [_choice(history, series, key, manifest, verdict.outcome)]
    raise NotFoundError(f"{run.url} has no checkpoint of step {step} that could be restored")


def _choice(history: History, series: str, key: Key, manifest: Manifest, outcome: Outcome) -> _Choice:
    return _Choice(run=history.run, series=series, key=key, manifest=manifest, outcome=outcome)


def _sources(choice: _Choice, *, force: bool) -> list[_Source]:
    """Where it lies now."""
    run, series, key = choice.run, choice.series, choice.key
    history, sources = load_history(run), []
    in_place = history.current_if_readable(series, key[0], choice.manifest.path) == key
    if in_place and find_checkpoint(run, choice.manifest.path) is not None:
        sources.append(_Source(storage_is_run=True, prefix="", kept=False))
    copy = read_kept(run, series, *key)
    if copy is not None:
        sources.append(_Source(storage_is_run=False, prefix=copy.folder + "/", kept=True))
    if key in history.quarantined.get(series, ()):
        folder = f"{QUARANTINE}/{series_folder(series)}/{record_name(*key)}/"
        sources.append(_Source(storage_is_run=False, prefix=folder, kept=False))
    if (series, *key) in list_trashed(run):
        sources.append(_Source(storage_is_run=False, prefix=trash_folder(series, *key) + "/", kept=False))
    # With force the damaged bytes themselves may be what is wanted, but a whole copy comes first.
    return sources if not force else sorted(sources, key=lambda s: not s.kept)


def _refuse_unless_empty(dest: str) -> None:
    try:
        with os.scandir(dest) as entries:
            if any(entries):
                raise SettingsError(f"{dest} is not empty", hint="name an absent or empty folder")
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise SettingsError(f"{dest} is not a folder") from error
    except PermissionError as error:
        raise DeniedError(f"{dest} cannot be read", key=dest) from error


@contextlib.contextmanager
def _staging(dest: str) -> Iterator[str]:
    """A temporary folder inside DEST, so that publishing is one rename; on failure DEST is as it was before."""
    made: list[str] = []
    folder = dest
    while folder and not os.path.isdir(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    temporary = os.path.join(dest, f".tmp-restore-{uuid.uuid4().hex[:8]}")
    try:
        os.makedirs(temporary)
    except OSError as error:
        raise DeniedError(f"{dest} cannot be made: {error.strerror}", key=dest) from error
    done = False
    try:
        yield temporary
        done = True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not done or not os.listdir(dest):
            for empty in made:
                with contextlib.suppress(OSError):
                    os.rmdir(empty)


def _copy(storage: Storage, prefix: str, manifest: Manifest, temporary: str, progress: Progress | None) -> None:
    wanted = [(prefix + file.path, os.path.join(temporary, *file.path.split("/"))) for file in manifest.files]
    fetch_files(storage, wanted, progress)


def _publish(temporary: str, dest: str, manifest: Manifest, run: Run) -> str:
    """Give the copied checkpoint its own name in DEST. Model files of a run's root get the run's name."""
    if manifest.path == ".":
        final = os.path.join(dest, run.url.rstrip("/").rpartition("/")[2] or "final")
        inner = os.path.join(temporary, ".")
    else:
        final = os.path.join(dest, manifest.path.rpartition("/")[2])
        inner = os.path.join(temporary, *manifest.path.split("/"))
    if os.path.lexists(final):
        raise SettingsError(f"{final} appeared meanwhile")
    for key in tops(manifest.path, [f.path for f in manifest.files])[1:] if manifest.path != "." else ():
        os.rename(os.path.join(temporary, *key.split("/")), os.path.join(dest, key.rpartition("/")[2]))
    if manifest.path == ".":
        os.makedirs(final)
        for name in os.listdir(inner):
            os.rename(os.path.join(inner, name), os.path.join(final, name))
    else:
        os.rename(inner, final)
    handle = os.open(dest, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return final

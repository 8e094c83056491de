"""Remove files. Outside of the records and the storages, this is the only module that does.

Each function says whose files it removes, and checks what can be checked. A name alone is proof only for a temporary
that the caller itself has just made, and inside of the records. What another process may have made is removed only if
its name is exactly one of ours, if it is of the kind that has such a name, and if it is old. Users choose names beside
checkpoints, too: there, what it holds must also be ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable

from ckptguard.errors import ObjectMissingError
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.keys import RECORDS, WHOSE_KEY, records_in
from ckptguard.records.leases import Claim, holds
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import was_left
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local.removal import begin_again
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import is_safe_path
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.temporary_names import EVERY, LEFT_IN_RECORDS, TemporaryName

# What a save of ours writes: one file for each part, or the shards of torch.distributed.checkpoint with their index.
_OF_SAVE = re.compile(r"(model|optimizer)\.safetensors|state\.json|(__\d+_\d+\.distcp|(__\d+)?\.metadata)(\.tmp)?")


def remove_temporary(storage: Storage, key: str) -> None:
    """Remove a temporary that the caller made: a file or folder with one of our names, or something in such a folder.

    Raises:
        ValueError: nothing in the key is a name that we make. Nothing is removed.
    """
    if not any(name.fits(part) for part in key.split("/") for name in EVERY):
        raise ValueError(f"{key} is no temporary of ours")
    storage.remove(key)


def remove_folder_of_ours(path: str, kind: TemporaryName) -> None:
    """Remove a local temporary folder that the caller made, as far as that is possible. A link stays.

    Raises:
        ValueError: this is not such a name. Nothing is removed.
    """
    if not kind.fits(os.path.basename(path)):
        raise ValueError(f"{path} is no temporary of ours")
    shutil.rmtree(path, ignore_errors=True)


def remove_leftover(
    storage: Storage, entry: Entry, kinds: Iterable[TemporaryName], *, holds: Callable[[], bool] = lambda: True
) -> bool:
    """Remove what a killed process of ours left. False if it may be somebody else's, or if it is not old.

    `holds`: asked only about something old with one of these names. True if what it holds can only be ours.
    """
    fitting = any(kind.fits(entry.name, entry.kind) for kind in kinds)
    if not fitting or not was_left(storage, entry) or not holds():
        return False
    storage.remove(entry.key)
    return True


def holds_checkpoints(view: RunView, folder: str) -> bool:
    """True if a folder in the run has nothing but files of this run's checkpoints, under their own paths."""
    inside = _paths_below(view.run.storage, folder)
    return not inside or inside <= _paths_of_checkpoints(view)


def holds_a_save(storage: Storage, folder: str) -> bool:
    """True if a folder has nothing but files with the names that a save of ours writes."""
    return all(_OF_SAVE.fullmatch(path) for path in _paths_below(storage, folder))


def _paths_below(storage: Storage, folder: str) -> set[str]:
    entries = storage.list(folder, recursive=True)
    return {entry.key.removeprefix(f"{folder}/") for entry in entries if entry.kind != "folder"}


def _paths_of_checkpoints(view: RunView) -> frozenset[str]:
    """Return the paths in the run of all files that are on record."""
    history = view.history
    sealed = (history.manifest(id) for series in history.names for id in history.sealed(series))
    copies = (read_kept(view.run, id) for id in list_kept(view.run))
    found = {file.path for manifest in sealed if manifest is not None for file in manifest.files}
    return frozenset(found.union(*(copy.files for copy in copies if copy is not None)))


def remove_staged(storage: Storage, folder: str, paths: Collection[str]) -> None:
    """Remove these files, whose paths are relative to a folder in which they were staged, and folders left empty."""
    with contextlib.suppress(ObjectMissingError):
        for entry in storage.list(folder, recursive=True):
            if entry.kind == "file" and entry.key.removeprefix(folder + "/") in paths:
                storage.remove(entry.key)
    remove_empty_folders(storage, folder)


def remove_empty_folders(storage: Storage, folder: str) -> None:
    """Remove a folder and those in it if there is nothing else in them."""
    if storage.root is None:
        with contextlib.suppress(ObjectMissingError):
            if not storage.list(folder, recursive=True):
                storage.remove(folder)
        return
    for place, _, _ in os.walk(storage.path_of(folder), topdown=False):
        with contextlib.suppress(OSError):  # it holds something
            os.rmdir(place)


def remove_record(run: Run, key: str) -> None:
    """Remove a record, or a folder of the records: there is nothing in them that we did not write.

    Raises:
        ValueError: the key leads out of the records. Nothing is removed.
    """
    if not is_safe_path(key):
        raise ValueError(f"{key} is no key of a record")
    run.records.remove(key)


def remove_unchanged(run: Run, key: str, signature: tuple[object, ...]) -> None:
    """Remove a file of a checkpoint that a policy gave up, if it still is the file that was marked for it."""
    entry = find_entry(run.storage.now(), key)
    if entry is not None and entry.signature == signature:
        run.storage.remove(key)


def remove_irregular(run: Run, key: str) -> None:
    """Remove a link, socket or device of a checkpoint that a policy gave up. A file or folder stays."""
    entry = find_entry(run.storage, key)
    if entry is not None and entry.kind not in ("file", "folder"):
        run.storage.remove(key)


def remove_unsealed(run: Run, claim: Claim, files: Iterable[str]) -> bool:
    """Remove what a save of ours wrote under its claim. False if the path is claimed by another process now."""
    if not holds(run, claim):
        return False
    for file in files:
        run.storage.remove(f"{claim.path}/{file}" if file else claim.path)
    return True


def remove_half_save(run: Run, path: str, *, inode: int | None = None) -> None:
    """Remove the rest of a save of this process that failed. Its name was free before, as the caller has checked.

    `inode`: only if it still has this one.
    """
    if run.storage.root is not None:
        place = run.storage.path_of(path)
        if inode is not None and os.stat(place).st_ino != inode:
            return
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        else:
            os.unlink(place)
        return
    run.storage.remove(path)


def remove_wrong_copy(storage: Storage, key: str) -> None:
    """Remove a file of a replica, or of a copy, that was read back and is not what was sent."""
    storage.remove(key)


def remove_made_folders(folders: Iterable[str]) -> None:
    """Remove local folders that the caller made, if they are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def remove_records(run: Run) -> None:
    """Remove all records of a run, `format.json` first, so that other processes stop writing. Then remove the folder
    of the records and that of the run, if they are local and empty.

    Records elsewhere may be in a folder with other files, also in folders of the same names. So only keys of records
    go there, and last the record that says whose they are.
    """
    if run.records.root is not None:
        begin_again(run.records.root)
    run.records.remove(FORMAT_KEY)
    with contextlib.suppress(ObjectMissingError):
        if run.records_inside:
            for entry in run.records.list(""):
                if entry.name in RECORDS or any(kind.fits(entry.name) for kind in LEFT_IN_RECORDS):
                    run.records.remove(entry.key)
        else:
            _remove_records_elsewhere(run)
    for folder in (run.records.root, run.storage.root):
        if folder is not None:
            with contextlib.suppress(OSError):  # something else is in it
                os.rmdir(folder)


def _remove_records_elsewhere(run: Run) -> None:
    keys = records_in(run.records)
    for key in sorted(keys, key=lambda key: key == WHOSE_KEY):
        run.records.remove(key)
    for top in sorted({key.partition("/")[0] for key in keys if "/" in key}):
        remove_empty_folders(run.records, top)

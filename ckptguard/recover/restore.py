"""Restore: copy a checkpoint's files to a destination, verified, completely or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ckptguard.decisions.known_good import IN_PLACE, KEPT
from ckptguard.errors import (
    ChangedWhileReadError,
    CkptguardError,
    CouldNotTellError,
    DeniedError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StorageError,
    StorageFullError,
)
from ckptguard.formats.table import name_of, suffixes_of
from ckptguard.layouts import tops
from ckptguard.records.run import Run
from ckptguard.recover.restorable import ReadablePlace, Restorable
from ckptguard.runs.candidates import Taken, first_of
from ckptguard.runs.find_known_good import SavePart
from ckptguard.runs.free_space import need_room
from ckptguard.runs.good_checkpoint import alone
from ckptguard.runs.publish import FILES_AT_ONCE, Place, for_each, give_names, publish_file, staging
from ckptguard.runs.removal import remove_made_folders
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import Progress
from ckptguard.scan.paced_reader import REMOTE_BLOCK, Pace
from ckptguard.storage import Storage, open_storage
from ckptguard.storage.read_ahead import IN_FLIGHT
from ckptguard.values.ids import CheckpointId, Step, name_of_run, step_text
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.own_log import log as _log
from ckptguard.values.temporary_names import RESTORE
from ckptguard.values.verdict import Outcome, worst
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import copy_differs


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A restored save. `path`, absolute, is the checkpoint that known-good names; `kept`: it came from the kept copy;
    `source`: the URL of the run or replica. `save` are all checkpoints of the save, itself first, with their new paths
    and the places that they came from. `bytes` and `outcome` are of all."""

    path: str
    id: CheckpointId
    bytes: int
    kept: bool
    outcome: Outcome
    source: str
    save: tuple[SavePart, ...]

    @property
    def series(self) -> str:
        """The series of the checkpoint."""
        return self.id.series

    @property
    def step(self) -> Step:
        """The step that its name states."""
        return self.id.step


class Restoring(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of `restore`: the checkpoint at `path` of `source` (URL of a run or replica) becomes `made`.

    `beside` are the paths of the checkpoints that were saved with it. `files` and `bytes` are of all.
    """

    path: str
    source: str
    made: str
    files: int
    bytes: int
    beside: tuple[str, ...] = ()


Tell = Callable[[Restoring], None]


def restore(
    view: RunView,
    dest: str,
    *,
    step: int | None = None,
    force: bool = False,
    work: Work = PLAIN,
    tell: Tell = lambda _: None,
) -> Restored:
    """Copy the known-good save, or that of `step`, to ``DEST/<original name>``, and read it back.

    What is made is one whole save. If that is several checkpoints, each has the path in DEST that it has in the run.
    If DEST is not a folder, and is named like a checkpoint file (``back.pt``), it is the file to make. Only a save of
    one file can become a file. `tell` is called before bytes are copied.

    A checkpoint without a verdict is verified first. Of each the nearest whole copy is used: in place, kept, then
    replicas. Without `step`, an older good save replaces one of which a part is damaged or unreadable, with a warning.
    Damage in place is recorded. After any failure DEST is as it was.

    Raises:
        SettingsError: DEST is neither absent nor empty, is inside the run, or is no name for this save.
        RefusedError: a part is not GOOD, or its bytes are not the sealed ones; never with `force`.
        StorageFullError: there is too little free space. Nothing was written.
        NoKnownGoodError: nothing is good.
        NotFoundError: this step does not exist.
        CouldNotTellError: the remaining places could not be read.
    """
    if "://" in dest:
        raise SettingsError("DEST must be a local file or folder")
    goal = _goal(dest)
    root = view.run.storage.root
    if root is not None and Path(os.path.realpath(goal.path)).is_relative_to(os.path.realpath(root)):
        raise SettingsError(f"{goal.path} lies inside the run", hint="restore elsewhere, or use ckptguard rollback")
    _refuse_unless_free(goal)
    with contextlib.ExitStack() as held:
        offers = Restorable(view, step, force=force, work=work, held=held)
        restoring = _Attempts(goal, offers, force, view.settings.on_full == "wait", work, tell)
        taken: Taken[ReadablePlace, Restored | CkptguardError] = first_of(
            offers, restoring.attempt, otherwise=offers.none_left
        )
    if isinstance(taken.result, CkptguardError):
        raise taken.result
    return taken.result


@dataclass(frozen=True)
class _Goal:
    """What DEST means: the file to make, or the folder to make the save in under its own names."""

    path: str
    is_file: bool

    @property
    def folder(self) -> str:
        """The folder that gets the save."""
        return os.path.dirname(self.path) if self.is_file else self.path

    def made(self, manifest: Manifest, run: Run, *, beside: Sequence[str]) -> str:
        """The path of a restored checkpoint. Those of a save of several lie as in the run. Alone, model files of a
        run's root get the run's name. SettingsError if a file was named that this save cannot be."""
        own = manifest.path.rpartition("/")[2]
        if not self.is_file:
            name = (name_of_run(run.url) or "final") if manifest.path == "." else own
            return _path_in(self.path, manifest) if beside else os.path.join(self.path, name)
        if beside:
            what = f"{', '.join((own, *beside))} are one save"
        elif [f.path for f in manifest.files] != [manifest.path]:
            what = f"{own} is not one file"
        elif os.path.splitext(own)[1].lower() != os.path.splitext(self.path)[1].lower():
            what = f"{own} is a file of another kind"
        else:
            return self.path
        raise SettingsError(
            f"{self.path} is the name of a file, and {what}",
            hint=f"to name a folder, end it with a slash: {self.path}/",
        )


def _path_in(folder: str, manifest: Manifest) -> str:
    return os.path.normpath(os.path.join(folder, manifest.path))


def _goal(dest: str) -> _Goal:
    path = os.path.abspath(os.path.expanduser(dest))
    named = name_of(path).endswith(suffixes_of("tensors", "arrays", "objects"))
    return _Goal(path, is_file=named and not dest.endswith("/") and not os.path.isdir(path))


class _NotWholeError(Exception):
    """A checkpoint has no whole copy at the places that were tried."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


_Wrong = _NotWholeError | CouldNotTellError


@dataclass
class _Attempts:
    """Try one place after the other. `wait`: wait for free space in DEST."""

    goal: _Goal
    offers: Restorable
    force: bool
    wait: bool
    work: Work
    tell: Tell
    _failed: tuple[str, str] | None = None  # what was tried last, and what was wrong with it
    _lost: dict[CheckpointId, _Wrong] = field(default_factory=dict)  # parts without a whole copy
    _names: Iterator[int] = field(default_factory=itertools.count)  # of folders in the temporary place

    def attempt(self, place: ReadablePlace) -> Restored | CkptguardError | str:
        """Return the restored save, or what is wrong with this place of its weights or with another part. A problem
        with DEST is an error, and ends it all."""
        try:
            return self._restore(place)
        except _NotWholeError as wrong:
            return wrong.message
        except CouldNotTellError as error:
            if _is_of_dest(error, self.goal):
                return error
            raise

    def _restore(self, first: ReadablePlace) -> Restored:
        save = self._places_of_save(first)
        if self._failed is not None and self._failed[0] != first.name:
            _log.warning("%s could not be restored: %s; trying %s", *self._failed, first.name)
        manifests, folder, run = [places[0].manifest for _, places in save], self.goal.folder, first.view.run
        beside, size = tuple(m.path for m in manifests[1:]), sum(m.bytes for m in manifests)
        made, count = self.goal.made(first.manifest, run, beside=beside), sum(len(m.files) for m in manifests)
        path = first.manifest.path
        self.tell(Restoring(path=path, source=run.url, made=made, files=count, bytes=size, beside=beside))
        need_room(open_storage(folder, must_exist=False), size, path, wait=self.wait)
        with _made(folder) as dest, staging(dest, RESTORE) as staged:
            taken = [self._copy(staged.place, places, is_first=places is save[0][1]) for _, places in save]
            _publish(staged.place, taken, made)
        paths = [made, *(_path_in(folder, place.manifest) for place in taken[1:])]
        return Restored(
            path=made,
            id=first.id,
            bytes=size,
            kept=first.where == KEPT,
            outcome=worst(place.outcome for place in taken),
            source=run.url,
            save=tuple(
                msgspec.structs.replace(part, path=path, place=place.where)
                for (part, _), place, path in zip(save, taken, paths, strict=True)
            ),
        )

    def _places_of_save(self, first: ReadablePlace) -> list[tuple[SavePart, list[ReadablePlace]]]:
        """Return the checkpoints of a save, its weights first, and the places of each in the order to try them."""
        parts = {part.id: part for part in self.offers.save}
        own = parts.pop(first.id, None) or alone(first.manifest.path, first.id, first.where)
        save = [(own, [first])]
        for id, part in parts.items():
            places = [place for _, place in self.offers.places(id)]
            if id not in self._lost and not places:
                self._lost[id] = _NotWholeError(f"{_part_name(part)} is saved with it, and gone")
            if id in self._lost:
                raise self._lost[id]
            save.append((part, places))
        return save

    def _copy(self, staged: Place, places: Sequence[ReadablePlace], *, is_first: bool) -> ReadablePlace:
        """Copy a checkpoint from its first whole place, and return where the copy is. Raises what is wrong with the
        last place if none is whole."""
        wrong: _Wrong = _NotWholeError("it is gone")
        for place in places:
            target = Place(staged.storage, f"{staged.prefix}{next(self._names)}/")
            try:
                copy_files(place, target, place.manifest.files, self.work.progress)
                differs = copy_differs(target.storage, target.prefix, place.manifest, scanner=self.work.scanner)
                if differs is None or self.force:
                    return msgspec.structs.replace(place, storage=target.storage, prefix=target.prefix)
                wrong = _NotWholeError(differs)
            except (ObjectMissingError, ChangedWhileReadError) as error:
                wrong = _NotWholeError(error.message)
            except CouldNotTellError as error:
                if _is_of_dest(error, self.goal):
                    raise
                wrong = error
            self._note(place, wrong.message)
        if not is_first:
            self._lost[places[0].id] = wrong
        raise wrong

    def _note(self, place: ReadablePlace, wrong: str) -> None:
        """The files in place were not the sealed ones. Read them once more, and record the verdict."""
        self._failed = (place.name, wrong)
        if place.where == IN_PLACE:
            with contextlib.suppress(CouldNotTellError):
                checkpoint = place.view.look_again(place.manifest.path)
                if checkpoint is not None:
                    how, work = Verification(md5=False), Work(scanner=self.work.scanner)
                    verify_checkpoint(place.view, checkpoint, how, work=work)


def _part_name(part: SavePart) -> str:
    return f"{part.series}{part.id.nth_save}" if part.step is None else f"step {step_text(part.step)} of {part.series}"


def _is_of_dest(error: CouldNotTellError, goal: _Goal) -> bool:
    key = getattr(error, "key", "")
    if isinstance(error, StorageFullError):
        return True
    return key.startswith(goal.folder) or RESTORE.fits(key.split("/")[0])


def _refuse_unless_free(goal: _Goal) -> None:
    dest = goal.path
    if goal.is_file:
        if os.path.lexists(dest):
            raise SettingsError(f"{dest} exists already", hint="name a file that is not there yet, or a folder")
        return
    try:
        with os.scandir(dest) as entries:
            if any(entries):
                raise SettingsError(f"{dest} is not empty", hint="name an absent or empty folder")
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise SettingsError(f"{dest} is not a folder", hint="name an absent or empty folder") from error
    except PermissionError as error:
        raise DeniedError(f"{dest} cannot be read", key=dest) from error


@contextlib.contextmanager
def _made(folder: str) -> Iterator[Storage]:
    """Make DEST. After a failure it is as before."""
    made, above = [], folder
    while above and not os.path.isdir(above):
        made.append(above)
        above = os.path.dirname(above)
    try:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise DeniedError(f"{folder} cannot be made: {error.strerror}", key=folder) from error
        yield open_storage(folder)
    finally:
        remove_made_folders(made)  # if they are empty


def copy_files(source: Place, target: Place, files: Sequence[File], progress: Progress | None = None) -> None:
    """Copy files as they are, whatever their bytes. Of a remote source several are read at once, within 64 MiB."""
    over = threading.Event()
    pace = Pace(progress=progress).until(over)
    large = sum(file.size > REMOTE_BLOCK for file in files)
    ahead = 2 * IN_FLIGHT // max(min(large, FILES_AT_ONCE), 1)

    def copy(file: File) -> None:
        publish_file(source, target, file, pace, compare=False, ahead=ahead)

    if source.storage.root is None:
        for_each(files, copy, over)
    else:
        for file in files:
            copy(file)


def _publish(staged: Place, taken: Sequence[ReadablePlace], made: str) -> None:
    """Give the copied save its names in DEST, all or none."""
    folder, name = os.path.split(made)
    if len(taken) == 1:
        source, manifest = Place(staged.storage, taken[0].prefix), taken[0].manifest
        files = [""] if manifest.path == "." else tops(manifest.path, [f.path for f in manifest.files])
        own = ("", manifest.path)
        names = [(top, name if top in own else top.rpartition("/")[2]) for top in reversed(files)]
    else:
        folder = staged.storage.path_of("")
        source = Place(staged.storage, f"{staged.prefix}save/")
        files = _put_together(source, taken)
        names = [(top, top) for top in sorted({file.split("/")[0] for file in files})]
    try:
        give_names(source, names)
    except ObjectExistsError as error:
        raise SettingsError(f"{folder}/{error.key} appeared meanwhile") from error
    except StorageError as error:
        raise DeniedError(f"{made} cannot be made: {error.message}", key=made) from error


def _put_together(whole: Place, taken: Iterable[ReadablePlace]) -> list[str]:
    """Move all parts of a save to one place, where they lie as in the run. Of a file beside several the first stays."""
    moved: dict[str, ReadablePlace] = {}
    for place in taken:
        for top in tops(place.manifest.path, [f.path for f in place.manifest.files]):
            moved.setdefault(top, place)
    for top in sorted(moved):  # a folder before what is in it
        whole.storage.move(moved[top].key(top), whole.key(top))
    return list(moved)

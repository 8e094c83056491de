"""Restore: copy a checkpoint's files to a destination, verified, completely or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from ckptguard.formats.suffixes import name_of, suffixes_of
from ckptguard.layouts import tops
from ckptguard.records.run import Run
from ckptguard.recover.restorable import ReadablePlace, Restorable
from ckptguard.runs.candidates import Taken, first_of
from ckptguard.runs.free_space import need_room
from ckptguard.runs.publish import FILES_AT_ONCE, Place, for_each, give_names, publish_file, staging
from ckptguard.runs.removal import remove_made_folders
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import Progress
from ckptguard.scan.paced_reader import REMOTE_BLOCK, Pace
from ckptguard.storage import Storage, open_storage
from ckptguard.storage.read_ahead import IN_FLIGHT
from ckptguard.values.ids import CheckpointId, Step, name_of_run
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.temporary_names import RESTORE
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import copy_differs

_log = logging.getLogger("ckptguard")


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A restored checkpoint. `path` is absolute; `kept`: from the kept copy; `source`: the URL of the run or
    replica."""

    path: str
    id: CheckpointId
    bytes: int
    kept: bool
    outcome: Outcome
    source: str

    @property
    def series(self) -> str:
        """The series of the checkpoint."""
        return self.id.series

    @property
    def step(self) -> Step:
        """The step that its name states."""
        return self.id.step


class Restoring(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of `restore`: the checkpoint at `path` of `source` (URL of a run or replica) becomes `made`."""

    path: str
    source: str
    made: str
    files: int
    bytes: int


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
    """Copy the known-good checkpoint, or that of `step`, to ``DEST/<original name>``, and read it back.

    If DEST is not a folder, and is named like a checkpoint file (``back.pt``), it is the file to make. Only a
    checkpoint of one file can become a file. `tell` is called before bytes are copied.

    A checkpoint without a verdict is verified first. The nearest whole copy is used: in place, kept, then replicas.
    Without `step`, an older good checkpoint replaces a damaged or unreadable one, with a warning. Damage in place is
    recorded. After any failure DEST is as it was.

    Raises:
        SettingsError: DEST is neither absent nor empty, is inside the run, or is no name for this checkpoint.
        RefusedError: the checkpoint is not GOOD, or its bytes are not the sealed ones; never with `force`.
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
        restoring = _Attempts(goal, force, view.settings.on_full == "wait", work, tell)
        taken: Taken[ReadablePlace, Restored | CkptguardError] = first_of(
            offers, restoring.attempt, otherwise=offers.none_left
        )
    if isinstance(taken.result, CkptguardError):
        raise taken.result
    return taken.result


@dataclass(frozen=True)
class _Goal:
    """What DEST means: the file to make, or the folder to make the checkpoint in under its own name."""

    path: str
    is_file: bool

    @property
    def folder(self) -> str:
        """The folder that gets the checkpoint."""
        return os.path.dirname(self.path) if self.is_file else self.path

    def made(self, manifest: Manifest, run: Run) -> str:
        """The path of the restored checkpoint. Model files of a run's root get the run's name. SettingsError if a file
        was named that this checkpoint cannot be."""
        own = manifest.path.rpartition("/")[2]
        if not self.is_file:
            name = (name_of_run(run.url) or "final") if manifest.path == "." else own
            return os.path.join(self.path, name)
        if [f.path for f in manifest.files] != [manifest.path]:
            what = f"{own} is not one file"
        elif os.path.splitext(own)[1].lower() != os.path.splitext(self.path)[1].lower():
            what = f"{own} is a file of another kind"
        else:
            return self.path
        raise SettingsError(
            f"{self.path} is the name of a file, and {what}",
            hint=f"to name a folder, end it with a slash: {self.path}/",
        )


def _goal(dest: str) -> _Goal:
    path = os.path.abspath(os.path.expanduser(dest))
    named = name_of(path).endswith(suffixes_of("tensors", "arrays", "objects"))
    return _Goal(path, is_file=named and not dest.endswith("/") and not os.path.isdir(path))


@dataclass
class _Attempts:
    """Try one place after the other. `wait`: wait for free space in DEST."""

    goal: _Goal
    force: bool
    wait: bool
    work: Work
    tell: Tell
    _failed: tuple[str, str] | None = None  # what was tried last, and what was wrong with it

    def attempt(self, place: ReadablePlace) -> Restored | CkptguardError | str:
        """Return the restored checkpoint, or what is wrong with this place. A problem with DEST is an error, and ends
        it all."""
        if self._failed is not None and self._failed[0] != place.name:
            _log.warning("%s could not be restored: %s; trying %s", *self._failed, place.name)
        manifest, run = place.manifest, place.view.run
        made = self.goal.made(manifest, run)
        self.tell(
            Restoring(path=manifest.path, source=run.url, made=made, files=len(manifest.files), bytes=manifest.bytes)
        )
        try:
            need_room(open_storage(self.goal.folder, must_exist=False), manifest.bytes, manifest.path, wait=self.wait)
            done = self._restore_from(place, made)
        except CouldNotTellError as error:
            if isinstance(error, StorageFullError) or _is_of_dest(getattr(error, "key", ""), self.goal):
                return error
            self._note(place, error.message)
            raise
        if isinstance(done, str):
            self._note(place, done)
        return done

    def _restore_from(self, place: ReadablePlace, made: str) -> Restored | str:
        try:
            with _made(self.goal.folder) as dest, staging(dest, RESTORE) as staged:
                temporary, manifest = staged.place, place.manifest
                copy_files(place, temporary, manifest.files, self.work.progress)
                wrong = copy_differs(dest, temporary.prefix, manifest, scanner=self.work.scanner)
                if wrong is not None and not self.force:
                    return wrong
                _publish(temporary, made, manifest)
            url, kept = place.view.run.url, place.where == KEPT
            return Restored(path=made, id=place.id, bytes=manifest.bytes, kept=kept, outcome=place.outcome, source=url)
        except (ObjectMissingError, ChangedWhileReadError) as error:
            return error.message

    def _note(self, place: ReadablePlace, wrong: str) -> None:
        """The files in place were not the sealed ones. Read them once more, and record the verdict."""
        self._failed = (place.name, wrong)
        if place.where == IN_PLACE:
            with contextlib.suppress(CouldNotTellError):
                checkpoint = place.view.look_again(place.manifest.path)
                if checkpoint is not None:
                    how, work = Verification(md5=False), Work(scanner=self.work.scanner)
                    verify_checkpoint(place.view, checkpoint, how, work=work)


def _is_of_dest(key: str, goal: _Goal) -> bool:
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


def _publish(staged: Place, made: str, manifest: Manifest) -> None:
    """Give the copied checkpoint its name, and its files beside it theirs."""
    folder, name = os.path.split(made)
    files = [""] if manifest.path == "." else tops(manifest.path, [f.path for f in manifest.files])
    own = ("", manifest.path)
    try:
        give_names(staged, [(top, name if top in own else top.rpartition("/")[2]) for top in reversed(files)])
    except ObjectExistsError as error:
        raise SettingsError(f"{folder}/{error.key} appeared meanwhile") from error
    except StorageError as error:
        raise DeniedError(f"{made} cannot be made: {error.message}", key=made) from error

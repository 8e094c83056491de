"""The verbs of the command line as functions. Each opens what it is told, does one thing, and returns what it found.

An answer prints what the command of its name prints. A notebook shows the same (see `answers`).

What they import is loaded when they are called: importing ckptguard costs a training next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptguard.errors import SettingsError

if TYPE_CHECKING:
    from ckptguard.api.answers import DiffAnswer, IncidentAnswer, KnownGoodAnswer, RestoreAnswer, RollbackAnswer
    from ckptguard.api.report import Report
    from ckptguard.inspect.list_states import CheckpointState
    from ckptguard.records.incidents import Incident
    from ckptguard.runs.find_known_good import Candidate, Wanted
    from ckptguard.runs.run_view import RunView
    from ckptguard.runs.work import Work
    from ckptguard.values.settings import Settings

PathOrUrl = str | os.PathLike[str]
Given = Mapping[str, Any] | None
"""Settings by their names, as in ``ckptguard.toml``. They count before those of the file and the environment."""


def verify(
    target: PathOrUrl,
    *,
    sums: PathOrUrl | None = None,
    reference: PathOrUrl | None = None,
    step: int | None = None,
    newest: int | None = None,
    record: bool = True,
    settings: Given = None,
) -> Report:
    """Read a run, a checkpoint or a file back, compare it with what is recorded, and judge it.

    Damage is no exception: look at `ok` or `outcome` of the report. ``print(report)`` shows what the command line
    shows. Files that are still being written are waited for, up to two minutes, and then reported as pending.

    Args:
        target: A run (a folder of checkpoints), one checkpoint, or one file. A path, or a URL that fsspec opens.
        sums: A checksum file that the files must agree with. Without it one beside a stray target's files is used,
            such as SHA256SUMS.
        reference: Another checkpoint, whose tensors, shapes and dtypes it must have.
        step: Of a run, only the checkpoint of this step.
        newest: Of a run, only this many of the newest checkpoints.
        record: Whether a run's verdicts are recorded, and a bad save is an incident. Of a stray file nothing is.
        settings: Settings for this call, such as ``{"allow_nonfinite": ["*.mask"]}``.

    Raises:
        NotFoundError: There is nothing to verify.
        SettingsError: A setting, `sums` or `reference` cannot be used.
    """
    from ckptguard.api.report import as_report, incidents_of
    from ckptguard.scan import scanner_of
    from ckptguard.verification.target import Selection, verify_target

    check_sums, other = (None if given is None else place_of(given) for given in (sums, reference))
    what = Selection(
        step=_count(step, "step"),
        newest=_count(newest, "newest", least=1),
        record=record,
        check_sums=check_sums,
        reference=other,
    )
    chosen = settings_of(settings, target)
    with incidents_of(chosen) as incidents:
        work = _work(scanner=scanner_of(chosen))
        return as_report(verify_target(place_of(target), chosen, what, judged=incidents.judged, work=work), incidents)


def known_good(
    run: PathOrUrl,
    *,
    before_step: int | None = None,
    series: str | None = None,
    read: bool = False,
    settings: Given = None,
) -> KnownGoodAnswer:
    """The checkpoint of a run to go back to: the newest one that was verified good and is still there.

    Open its `path`. The answer comes from the records. A checkpoint whose files changed since they were read is read
    first, and so is a protected copy.

    Args:
        run: The run's folder or URL.
        before_step: Only checkpoints of lower steps.
        series: Only checkpoints of this series, such as ``"checkpoint-#"``.
        read: Read all bytes of the answer again before it is given.
        settings: Settings for this call.

    Raises:
        NoKnownGoodError: No checkpoint that was verified good is present. `verify` the run first.
        NotFoundError: There is no such run.
        CouldNotTellError: What may be good could not be read.
    """
    from ckptguard.api.answers import KnownGoodAnswer, answer
    from ckptguard.replicas.replicate import find_known_good_anywhere
    from ckptguard.runs.find_known_good import Wanted, openable
    from ckptguard.scan import scanner_of
    from ckptguard.verification.read_known_good import read_known_good

    view = opened(run, settings)
    wanted = Wanted(before_step=_count(before_step, "before_step"), series=series, thinned=True)
    work = _work(scanner=scanner_of(view.settings))

    def choose(view: RunView, wanted: Wanted) -> Candidate | None:
        return read_known_good(view, wanted, work, everything=read)

    return answer(KnownGoodAnswer, openable(find_known_good_anywhere(view, wanted, choose)))


def restore(
    run: PathOrUrl, to: PathOrUrl, *, step: int | None = None, force: bool = False, settings: Given = None
) -> RestoreAnswer:
    """Copy a run's known-good checkpoint into the folder `to`, under its own name. `path` of the answer says where.

    What was saved with it comes with it, under the paths that it has in the run: `save` of the answer lists all. The
    copy is complete and verified, or there is none. The nearest whole copy is taken: in place, protected, or in
    one of the settings' replicas.

    Args:
        run: The run's folder or URL.
        to: A folder that does not exist yet, or is empty.
        step: The checkpoint of this step, instead of the known-good one.
        force: Hand out a bad or suspect checkpoint too.
        settings: Settings for this call.

    Raises:
        SettingsError: `to` is not empty, or lies in the run.
        NoKnownGoodError: There is nothing good.
        NotFoundError: There is no such run, or nothing of this step.
        RefusedError: It is not good; never with `force`.
        StorageFullError: Too little space is free. Nothing was written.
        CouldNotTellError: What may be good could not be read.
    """
    from ckptguard.api.answers import RestoreAnswer, answer
    from ckptguard.recover.restore import restore as restore_checkpoint

    view, to = opened(run, settings), place_of(to)
    return answer(RestoreAnswer, restore_checkpoint(view, to, step=_count(step, "step"), force=force, work=_work()))


def checkpoints(run: PathOrUrl, *, settings: Given = None) -> tuple[CheckpointState, ...]:
    """Every checkpoint that a run holds or its records know, from the records. Nothing is read back.

    Each has its `path`, `step`, `id`, `outcome` and `bytes`, where it lies (`in_place`, `kept`, `quarantined`,
    `trashed`), and in `reason` what is wrong with it. NotFoundError if there is no such run.
    """
    from ckptguard.inspect.list_states import survey
    from ckptguard.runs.target import open_named_run

    return survey(open_named_run(place_of(run), settings_of(settings, run)))


def rollback(
    run: PathOrUrl,
    *,
    to: PathOrUrl | None = None,
    step: int | None = None,
    dry_run: bool = False,
    force: bool = False,
    settings: Given = None,
) -> RollbackAnswer:
    """Make the known-good checkpoint the newest one that a trainer finds.

    What is newer is moved to quarantine, and names that a trainer resumes from (``last.pt``, ``latest``, links) get
    the good content. Call it while no training writes.

    Args:
        run: The run's folder or URL.
        to: Go back to this checkpoint: a path in the run, or an id.
        step: Go back to the known-good checkpoint of this step.
        dry_run: Say what would be done, and do nothing.
        force: Even while files of the run are being written.
        settings: Settings for this call.

    Raises:
        BusyError: Training is still writing, or another process holds the run.
        NoKnownGoodError: Nothing good is left.
        NotFoundError: There is no such run or checkpoint.
        CouldNotTellError: What may be good could not be read.
    """
    from ckptguard.api.answers import RollbackAnswer, answer
    from ckptguard.recover.roll_back import GoBack, known_good_of, roll_back
    from ckptguard.reporting.open_and_close import close_after_rollback

    if to is not None and step is not None:
        raise SettingsError("rollback takes to= or step=, not both")
    view = opened(run, settings)
    named = None if to is None else place_of(to)
    id = None if named is None and step is None else known_good_of(view, named, _count(step, "step"))
    back = GoBack(reason="rolled back from Python", to_id=id, dry_run=dry_run, force=force)
    done = roll_back(view, back, work=_work())
    close_after_rollback(view.run, done)
    return answer(RollbackAnswer, done)


def diff(a: PathOrUrl, b: PathOrUrl, *, settings: Given = None) -> DiffAnswer:
    """Compare checkpoint `b` with checkpoint `a`, tensor by tensor.

    `same` counts the equal tensors. `changes` has the others: what became NaN or infinite first, then the largest
    relative change. `counts` has how many there are of each kind. The two may be files or folders of other formats.

    Raises:
        NotFoundError: One of them is no checkpoint.
        RefusedError: One of them is too damaged to be read.
        CouldNotTellError: One of them could not be read.
    """
    from ckptguard.api.answers import DiffAnswer, answer
    from ckptguard.inspect.diff import diff as compare

    return answer(DiffAnswer, compare(place_of(a), place_of(b), settings_of(settings, a, b), work=_work()))


def incidents(run: PathOrUrl, *, settings: Given = None) -> tuple[Incident, ...]:
    """The incidents of a run, oldest first: when training or a save turned sick, and what was done.

    Each has its `id`, `opened_at`, `step`, `cause`, `reason`, `state` and `actions`. `incident` gives the whole report
    of one. NotFoundError if there is no such run.
    """
    from ckptguard.records.incidents import list_incidents
    from ckptguard.records.run import open_run

    return tuple(list_incidents(open_run(place_of(run), settings_of(settings, run))))


def incident(run: PathOrUrl, id: str | None = None, *, read: bool = False, settings: Given = None) -> IncidentAnswer:
    """The report of one incident of a run: when it began, what went wrong, its likely causes, and what to do.

    ``print(incident(run))`` shows what the command line shows.

    Args:
        run: The run's folder or URL.
        id: That of `incidents`, or the start of it. Without one it is the newest incident.
        read: Read the last good and the first bad checkpoint again.
        settings: Settings for this call.

    Raises:
        NotFoundError: There is no such run or incident.
        CouldNotTellError: The records could not be read.
    """
    from ckptguard.api.answers import IncidentAnswer, answer
    from ckptguard.reporting.build_report import choose_incident, report_of
    from ckptguard.runs.run_view import open_view

    view = open_view(place_of(run), settings_of(settings, run))
    return answer(IncidentAnswer, report_of(view, choose_incident(view.run, id), read=read, work=_work()))


def seal(
    path: PathOrUrl, *, run: PathOrUrl | None = None, metrics: Mapping[str, Any] | None = None, settings: Given = None
) -> Report:
    """Seal a checkpoint that you have just saved: read it back, judge it, and record its digests in its run.

    From then on every change to its bytes is seen, and `known_good` may answer with it. Call it when all files are
    written, on one rank. Nothing needs to be set up before::

        torch.save(state, "runs/exp1/step-500.pt")
        ckptguard.seal("runs/exp1/step-500.pt")

    Args:
        path: The checkpoint: a file or a folder.
        run: The run's folder, if `path` does not lie directly in it.
        metrics: Named numbers, by which ``ckptguard prune --keep-best`` chooses.
        settings: Settings for this call.

    Raises:
        RefusedError: It is damaged, incomplete or holds NaN. Its `outcome` says which, and the verdict is recorded.
        NotFoundError: There is no checkpoint at `path`.
        CouldNotTellError: It could not be read, or changed meanwhile.
    """
    from ckptguard.api.seal import seal_saved

    place, outside = place_of(path), None if run is None else place_of(run)
    return seal_saved(place, outside, metrics, settings_of(settings, path, *(() if run is None else (run,))))


def load(
    target: PathOrUrl,
    *,
    map_location: Any = "cpu",
    step: int | None = None,
    allow_suspect: bool = False,
    settings: Given = None,
) -> Any:
    """Load a checkpoint that is verified while it is loaded: the safe replacement for ``torch.load``.

    The bytes that are loaded are the bytes that were judged. They are read once, into memory, and a file that is
    swapped meanwhile changes nothing. No code in a file is ever run.

    A file gives what ``torch.load`` would give, of safetensors a dict of tensors. Of a run the newest known-good
    checkpoint is loaded, from wherever it lies whole. A folder gives a dict of its parts, by the names of their files
    without suffixes: ``"model"`` (shards are put together), ``"optimizer"``, ``"scheduler"``, ``"trainer_state"``.
    What a `TrainingGuard` saved gives ``"model"``, ``"optimizer"``, ``"step"`` and the rest as their state dicts. Of
    torch.distributed.checkpoint the tensors are whole again.

    The files take their size in memory once more while they are loaded.

    Args:
        target: A run, a checkpoint or a file; a path, or a URL that fsspec opens.
        map_location: The device on which tensors are put.
        step: Of a run, the known-good checkpoint of this step.
        allow_suspect: Load a checkpoint too that is whole but sick, such as one that holds NaN.
        settings: Settings for this call, such as ``{"trust_globals": ["my.Class"]}``.

    Raises:
        RefusedError: It is bad, incomplete or suspect; `outcome` says which. Bad ones are never loaded.
        NoKnownGoodError: The run holds no checkpoint that was verified good and still is. `verify` the run first.
        NotFoundError: There is nothing at `target`.
        CouldNotTellError: It could not be read, or is still being written.
        StateError: It is good, but not torch's, or it names what torch does not load without running code.
    """
    from ckptguard.api.load import load_verified

    where = place_of(target)
    return load_verified(where, _count(step, "step"), map_location, allow_suspect, settings_of(settings, target))


def place_of(given: object) -> str:
    """The text of a path or URL. SettingsError for what is neither, and for an empty one: it would mean this folder."""
    place = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(place, str) or not place:
        raise SettingsError(f"{given!r:.80} is no path or URL", hint="give the path of a run, a checkpoint or a file")
    return place


def settings_of(given: Given, *targets: PathOrUrl) -> Settings:
    """The settings of a call about `targets`: those given, else ``CKPTGUARD_*``, else ``./ckptguard.toml``, else the
    defaults."""
    from ckptguard.runs.settings_file import given_settings, load_settings

    return given_settings(given, lambda: load_settings(None, os.environ, [place_of(target) for target in targets]))


def opened(run: PathOrUrl, given: Given) -> RunView:
    """The run; one that is gone is looked for in the replicas, if there are any."""
    from ckptguard.runs.run_view import open_view

    settings = settings_of(given, run)
    return open_view(place_of(run), settings, must_exist=not settings.replicas)


def _work(**how: Any) -> Work:
    from ckptguard.runs.work import Work

    return Work(**how)


def _count(given: int | None, name: str, *, least: int = 0) -> int | None:
    """A step or a number of checkpoints. SettingsError for what is none."""
    if given is None:
        return None
    try:
        number = given.__index__()
    except AttributeError:
        number = least - 1
    if isinstance(given, bool) or number < least:
        raise SettingsError(f"{name} must be a whole number of at least {least}, not {given!r:.80}")
    return number

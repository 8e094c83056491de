"""Roll back: quarantine what is newer than known-good, and have the known-good in place under its own name."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from ckptguard.decisions.known_good import choose_known_good
from ckptguard.errors import BusyError, CouldNotTellError, NoKnownGoodError, SettingsError
from ckptguard.keep.quarantine import mark_suspect, move_aside, quarantine_checkpoint
from ckptguard.layouts import LAYOUTS, Checkpoint, tops
from ckptguard.records.kept import KeptCopy, list_kept, read_kept
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run
from ckptguard.runs.find_known_good import (
    ANY,
    Candidate,
    KnownGood,
    Wanted,
    first_whole,
    known_good_candidates,
    newest_candidate,
)
from ckptguard.runs.lock import run_lock
from ckptguard.runs.pointers import point_back
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import PLAIN, Work
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId, numbers_of, single_number
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import Verification, verify_checkpoint
from ckptguard.verify.collect_evidence import copy_differs, unfinished_because
from ckptguard.verify.read_known_good import wrong_in_copy
from ckptguard.verify.seal import seal_written


@dataclass(frozen=True, kw_only=True)
class GoBack:
    """How far to go back, and with what care: to the newest known-good checkpoint before `before_step`, or to `to_id`
    alone, in one `series` or any. `dry_run` changes nothing. `check_writing` refuses while training writes, which
    `force` overrides. Without `read_back` what lies in place is taken at its verdict: for a caller that compares its
    bytes next."""

    reason: str
    before_step: int | None = None
    to_id: CheckpointId | None = None
    series: str | None = None
    dry_run: bool = False
    force: bool = False
    check_writing: bool = True
    read_back: bool = True

    @property
    def wanted(self) -> Wanted:
        """Which checkpoints may be gone back to."""
        return Wanted(before_step=self.before_step, series=self.series, only=self.to_id)


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollback did, or would do. `known_good` is in place afterwards; `quarantined` are paths in the run."""

    known_good: KnownGood
    quarantined: tuple[str, ...]
    put_back: bool
    dry_run: bool
    unverified: tuple[str, ...] = ()  # with dry_run: newer checkpoints that would be verified first


def roll_back(view: RunView, back: GoBack, *, in_use: InUse | None = None, work: Work = PLAIN) -> RolledBack:
    """Go back to the newest known-good checkpoint, which is read and verified first.

    Newer checkpoints without a verdict are verified before that, newest first, until one is GOOD. A checkpoint that
    fails is recorded BAD, and the next older one is taken. Newer checkpoints of the series are quarantined, the GOOD
    ones as SUSPECT. The known-good is put back from its kept copy, with fresh times, where it is not in place. It is
    pinned by `in_use`, if given beyond the end of this. The view is fresh afterwards.

    Raises:
        BusyError: training is still writing, or another process holds the run.
        NoKnownGoodError: nothing good is left.
        CouldNotTellError: what was left could not be read, and may be good.
    """
    run = view.run
    with contextlib.ExitStack() as held:
        if in_use is None:
            in_use = held.enter_context(InUse(run, "a rollback"))
        held.enter_context(run_lock(run))
        view.forget()  # another process may have held the lock until now
        if back.check_writing and not back.force:
            _refuse_while_writing(view)
        before = replace(back.wanted, only=None)
        unverified = verify_pending(view, before, dry_run=back.dry_run or back.to_id is not None, work=work)
        chosen = _choose(view, back, in_use, work)
        view.forget()  # reading took long, and saves in flight may have ended meanwhile
        newer = _newer(view, chosen)
        answer = chosen.answer
        if not back.dry_run:
            # The copy is staged and read back first: if that fails (a full disk), nothing was moved.
            with _staged(run, chosen, work) as publish:
                for checkpoint in newer:
                    if checkpoint.path == chosen.manifest.path and view.current_if_readable(checkpoint) == chosen.id:
                        move_aside(run, checkpoint, chosen.id)
                    else:
                        quarantine_checkpoint(view, checkpoint, reason=back.reason)
                _suspect_copies(view, back, chosen)
                publish()
            view.forget()  # files were moved
            point_back(run, chosen.manifest.path, {c.path for c in view.checkpoints})
            if not chosen.in_place:
                answer = _arrived(view, chosen, work)
                in_use.pin(answer.id)
        gone, left, put_back = tuple(c.path for c in newer), tuple(unverified), not chosen.in_place
        return RolledBack(known_good=answer, quarantined=gone, put_back=put_back, dry_run=back.dry_run, unverified=left)


def verify_pending(view: RunView, wanted: Wanted = ANY, *, dry_run: bool = False, work: Work = PLAIN) -> list[str]:
    """Verify checkpoints without a verdict, newer than the known-good one, newest first, until one is GOOD. Returns the
    paths that still have none (with `dry_run`: all of them). Raises nothing about their bytes."""
    floors: dict[str, tuple[tuple[int, ...], int]] = {}
    left = []
    found = [c for c in view.checkpoints if wanted.series in (None, c.series)]
    for checkpoint in sorted(found, key=lambda c: numbers_of(c.step), reverse=True):
        series, number = checkpoint.series, single_number(checkpoint.step)
        if series not in floors:
            known = newest_candidate(view, msgspec.structs.replace(wanted, series=series))
            floors[series] = known.id.order if known else ((-1,), 0)
        if numbers_of(checkpoint.step) < floors[series][0]:
            continue
        id = view.current_if_readable(checkpoint) or view.history.next_id(series, checkpoint.step)
        too_late = wanted.before_step is not None and number is not None and number >= wanted.before_step
        if id.order <= floors[series] or too_late or view.history.has_verdict(id):
            continue
        left.append(checkpoint.path)
        try:
            if dry_run or unfinished_because(view.run.storage, checkpoint, scanner=work.scanner) is not None:
                continue
            checked = verify_checkpoint(view, checkpoint, work=work)
            if checked.outcome is Outcome.GOOD and checked.id is not None:
                floors[series] = checked.id.order
            left.pop()
        except CouldNotTellError:
            continue
    return left


def _choose(view: RunView, back: GoBack, in_use: InUse, work: Work) -> Candidate:
    """The best candidate whose bytes are right now. Damage found on the way is recorded."""

    def attempt(candidate: Candidate) -> Candidate | str:
        if not back.dry_run:
            in_use.pin(candidate.id)
        if candidate.in_place:
            wrong = _wrong_in_place(view, candidate, back, work)
        else:
            wrong = wrong_in_copy(view, candidate, work, record=not back.dry_run)
        return candidate if wrong is None else wrong

    def verify_older(refused: frozenset[CheckpointId]) -> None:
        # Older ones were left unverified because of what was refused now.
        if back.to_id is None and not back.dry_run:
            verify_pending(view, replace(back.wanted, exclude=refused), work=work)

    try:
        return first_whole(view, attempt, back.wanted, when_refused=verify_older).offered
    except NoKnownGoodError as error:
        if back.to_id is None:
            raise
        message = f"{view.run.url} has no known-good checkpoint {back.to_id} to go back to"
        raise NoKnownGoodError(message) from error


def _wrong_in_place(view: RunView, candidate: Candidate, back: GoBack, work: Work) -> str | None:
    path = candidate.manifest.path
    checkpoint = view.look_again(path)
    if checkpoint is None:
        return f"{path} is not there any more"
    if not back.read_back:
        return None
    checked = verify_checkpoint(view, checkpoint, Verification(md5=False, record=not back.dry_run), work=work)
    if checked.outcome is Outcome.GOOD and checked.id == candidate.id:
        return None
    return f"{path} is {checked.outcome.value} now"


def _newer(view: RunView, chosen: Candidate) -> list[Checkpoint]:
    """What must go: higher steps of the series, and whatever else lies where the known-good belongs."""
    numbers = numbers_of(chosen.id.step)
    newer = []
    for checkpoint in view.checkpoints:
        if checkpoint.series != chosen.id.series:
            continue
        in_the_way = checkpoint.path == chosen.manifest.path and not chosen.in_place
        if numbers_of(checkpoint.step) > numbers or in_the_way:
            newer.append(checkpoint)
    return sorted(newer, key=lambda c: numbers_of(c.step), reverse=True)


def _suspect_copies(view: RunView, back: GoBack, chosen: Candidate) -> None:
    """What is newer and was rotated away has no place to be moved from; its kept copy is as suspect. So is what a
    replica may hold of what was saved from `before_step` on."""
    series = chosen.id.series
    present = (candidate.id for candidate in known_good_candidates(view, Wanted(series=series)))
    suspects = set(itertools.takewhile(lambda id: id.order > chosen.id.order, present))
    if back.before_step is not None:
        on_record = choose_known_good({series: view.history.names.get(series, ())})
        suspects |= {s.id for s in on_record if (s.id.number or 0) >= back.before_step}
    for id in sorted(suspects, key=lambda id: id.order):
        if view.is_good(id):
            mark_suspect(view, id, back.reason)


def _arrived(view: RunView, chosen: Candidate, work: Work) -> KnownGood:
    """The known-good, verified in its place. Where another generation lay there it is a new one with the old bytes."""
    path = chosen.manifest.path
    checkpoint = view.checkpoint(path)
    if checkpoint is None:
        raise CouldNotTellError(f"{path} vanished after it was put back")
    _seal_again(view, chosen, checkpoint)
    checked = verify_checkpoint(view, checkpoint, Verification(md5=False), work=work)
    if checked.outcome is not Outcome.GOOD or checked.id is None:
        raise CouldNotTellError(f"{path} is {checked.outcome.value} after it was put back")
    return replace(chosen.answer, path=view.run.usable(path), kept=False, id=checked.id)


def _seal_again(view: RunView, chosen: Candidate, checkpoint: Checkpoint) -> None:
    """What was put back in the place of a quarantined checkpoint is a generation of its own. Where only the writer
    seals, nobody else would ever seal it: it gets the manifest against which its bytes were just held."""
    run, manifest, step = view.run, chosen.manifest, chosen.manifest.step
    if not LAYOUTS[manifest.layout].sealed_by_writer or step is None or view.current(checkpoint) is not None:
        return
    stored = [(file, run.storage.stat(file.path)) for file in manifest.files]
    files = tuple(replace(file, mtime_ns=e.mtime_ns, inode=e.inode, etag=e.etag) for file, e in stored)
    metrics = manifest.given_metrics()
    seal_written(run, path=manifest.path, layout=manifest.layout, step=step, files=files, metrics=metrics)
    view.refresh(manifest.series)


@contextlib.contextmanager
def _staged(run: Run, chosen: Candidate, work: Work) -> Iterator[Callable[[], None]]:
    """Have the checkpoint to go back to staged and read back; nothing is to be done where it is in place."""
    if chosen.in_place or chosen.copy is None:
        yield lambda: None
        return
    with _copied_back(run, chosen.copy) as (temporary, publish):
        wrong = copy_differs(run.storage, temporary + "/", chosen.manifest, scanner=work.scanner)
        if wrong:
            raise CouldNotTellError(f"the kept copy could not be put back: {wrong}")
        yield publish


@contextlib.contextmanager
def _copied_back(run: Run, copy: KeptCopy) -> Iterator[tuple[str, Callable[[], None]]]:
    """Copy kept files to a temporary folder of the run, which is given; the call given gives them their own names.
    Never a link: what the trainer does to the file must not reach the kept copy."""
    storage, run_prefix, records_prefix = run.shared()
    temporary = f"tmp-rollback-{uuid.uuid4().hex[:8]}"

    def publish() -> None:
        for top in tops(copy.path, copy.files):
            storage.move(f"{run_prefix}{temporary}/{top}", run_prefix + top)

    try:
        for file in copy.files:
            storage.copy(f"{records_prefix}{copy.key(file)}", f"{run_prefix}{temporary}/{file}", how="clone")
        yield temporary, publish
    finally:
        run.storage.remove(temporary)


def restore_pending_copies(view: RunView, *, series: str) -> list[str]:
    """Copy kept copies without a verdict back to their places, where those are empty, to be pending there; returns the
    places. A trainer's rotation may have left nothing else."""
    run = view.run
    try:
        run.shared()
    except SettingsError:
        return []
    places = []
    with run_lock(run):
        view.refresh(series)
        for id in list_kept(run):
            wanted = id.series == series and not view.history.has_verdict(id)
            copy = read_kept(run, id) if wanted else None
            if copy is None or copy.path == "." or any(find_entry(run.storage, t) for t in tops(copy.path, copy.files)):
                continue
            with _copied_back(run, copy) as (_, publish):
                publish()
                places.append(copy.path)
    for path in places:
        view.look_again(path)
    return places


def _refuse_while_writing(view: RunView) -> None:
    settings = view.settings
    for checkpoint in view.checkpoints:
        age = youngest_age(checkpoint)
        if age is not None and age < settings.settle:
            raise BusyError(
                f"{checkpoint.path} was written {age:.1f} s ago: training may still be running",
                hint="stop training first, or use --force",
            )
        recent = age is None or age < settings.unfinished_limit
        why = unfinished_because(view.run.storage, checkpoint) if recent else None
        if why is not None:
            raise BusyError(f"{checkpoint.path} is unfinished ({why})", hint="stop training first, or use --force")

"""Roll back: quarantine what is newer than known-good, and make every name that a resume reads hold known-good content.

A rollback starts with a plan. Everything to put in place is staged and read back before anything is moved.
"""

from __future__ import annotations

import contextlib
import glob
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from ckptguard.decisions.rollback_plan import Mention, Pointed, RollbackPlan, is_needed, plan_rollback
from ckptguard.errors import FORCE, BusyError, CouldNotTellError, NoKnownGoodError, NotFoundError, NotGivenBackError
from ckptguard.keep.quarantine import mark_suspect, move_aside, quarantine_checkpoint
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.pins import InUse
from ckptguard.records.rewrites import last_rewrites, mark_undone, record_rewrites
from ckptguard.records.run import Run
from ckptguard.recover.rollback_scope import NO_FRESH_START, FreshStart, RollbackScope, training_in
from ckptguard.recover.verify_pending import verify_pending
from ckptguard.runs.candidates import first_whole, whole_save
from ckptguard.runs.find_known_good import (
    Candidate,
    KnownGood,
    Wanted,
    known_good_candidates,
    newest_candidate,
    ranked_candidates,
)
from ckptguard.runs.lock import run_lock
from ckptguard.runs.pointers import mentions_of, put_back_pointers, rewritten, write_pointers
from ckptguard.runs.publish import Place, copy_files_within, give_names_of, staging
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import PLAIN, Work
from ckptguard.runs.writers import pause_between_files, writer_of
from ckptguard.values.ids import CheckpointId, escape, folder_of, name_of_run
from ckptguard.values.manifest import Manifest
from ckptguard.values.patterns import Saves
from ckptguard.values.temporary_names import ROLLBACK
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import copy_differs, unfinished_because
from ckptguard.verification.read_known_good import wrong_in_copy
from ckptguard.verification.seal import as_stored, seal_written


@dataclass(frozen=True, kw_only=True)
class GoBack:
    """How far to roll back, and how carefully: to the newest known-good checkpoint before `before_step`, or to `to_id`.

    - `series`: change nothing else, for a caller that resumes from this series itself. Without it, all names of the
      training are corrected.
    - `folders`: the known-good checkpoint is in one of them.
    - `dry_run`: change nothing.
    - `check_writing`: refuse while training writes, unless `force` is set.
    - `read_back`: read the files in place. Without it their verdict is trusted, for a caller that compares the bytes
      next.
    - `exclude`: never go back to these.
    - `anew`: never go back to what a training has written that began from scratch, and move it aside whatever its
      number.
    - `only`: change nothing but these series.
    - `joined`: these series are of the known-good save, whatever their names say.
    - `thinned`: with `to_id`, that one may be thinned.
    - `if_needed`: move nothing while everything that would be moved is good, or if a better one could not be read.
    - `agree`: is called with the plan, as a dry run answers it, just before it is carried out. It may raise.
    """

    reason: str
    before_step: int | None = None
    to_id: CheckpointId | None = None
    series: str | None = None
    folders: frozenset[str] | None = None
    dry_run: bool = False
    force: bool = False
    check_writing: bool = True
    read_back: bool = True
    exclude: frozenset[CheckpointId] = frozenset()
    anew: FreshStart = NO_FRESH_START
    only: frozenset[str] | None = None
    joined: tuple[str, ...] = ()
    thinned: bool = False
    if_needed: bool = False
    agree: Callable[[RolledBack], None] | None = None

    @property
    def wanted(self) -> Wanted:
        """The checkpoints that may be the target."""
        return Wanted(
            before_step=self.before_step,
            series=self.series,
            folders=self.folders,
            among=self.only,
            only=self.to_id,
            exclude=self.exclude | self.anew.ids,
            thinned=self.thinned,
        )


class GivenBack(msgspec.Struct, frozen=True, kw_only=True):
    """A path that holds content again, and the path and id of its verdict."""

    path: str
    source: str
    id: CheckpointId


class NewerAlone(msgspec.Struct, frozen=True, kw_only=True):
    """A good content of one series that is newer than the one of the save that is gone back to."""

    series: str
    path: str
    id: CheckpointId


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollback did, or would do. `known_good` is in place afterwards. `quarantined` are paths in the run.

    `given` lists other names with their new content, `pointed` the rewritten pointers. `left_bad` are paths of other
    trainings in the run whose content is BAD. `newer_alone` is what going back to a whole save gives up.
    """

    known_good: KnownGood
    quarantined: tuple[str, ...]
    put_back: bool
    dry_run: bool
    unverified: tuple[str, ...] = ()  # with dry_run: newer checkpoints that would be verified first
    given: tuple[GivenBack, ...] = ()
    pointed: tuple[Pointed, ...] = ()
    left_bad: tuple[str, ...] = ()
    mentions: tuple[Mention, ...] = ()  # texts that name what was moved and are no pointers: they stay as they are
    source: CheckpointId  # the same content before it was put back
    training_step: int | None = None  # as far as the checkpoint says
    newer_alone: tuple[NewerAlone, ...] = ()
    repeats: tuple[int, int] | None = None  # the first and the last step that training makes again
    repeats_seconds: float | None = None  # how long these took, by the times of the saves
    whole_again: str = ""  # the path of a thinned one that came back from the trash, because nothing else was good

    @property
    def copied(self) -> str:
        """Say which copy was used, and why; "" if the known-good checkpoint was in place."""
        if self.whole_again:
            return f"{self.whole_again} was thinned, and came back whole from the trash: nothing else was good"
        if not self.put_back:
            return ""
        name = name_of_run(self.known_good.path)
        damaged = any(self.known_good.path.endswith(f"/{path}") for path in self.quarantined)
        kept = "its kept copy would be used" if self.dry_run else "its kept copy was used"
        return f"{name} was {'damaged' if damaged else 'gone'}: {kept}"


def roll_back(view: RunView, back: GoBack, *, in_use: InUse | None = None, work: Work = PLAIN) -> RolledBack:
    """Roll back to the newest known-good checkpoint, which is read and verified first.

    Newer checkpoints without a verdict are verified before, newest first, until one is GOOD. One that fails is recorded
    BAD, and the next older one is used. Everything newer is quarantined, GOOD ones as SUSPECT.

    If the known-good checkpoint is not in place, it is put back from its kept copy with fresh times. So are fixed names
    of its training with newer content or nothing good, in any folder. Pointers are rewritten. `in_use` pins the
    known-good checkpoint, also after this call if given. The view is fresh afterwards.

    Raises:
        BusyError: training is still writing, or another process holds the run.
        NoKnownGoodError: nothing good is left.
        NotGivenBackError: nothing good fits a name that training may resume from. Nothing was moved.
        CouldNotTellError: the remaining checkpoints could not be read, and may be good.
    """
    with contextlib.ExitStack() as held:
        in_use = _begin(view, back, in_use, held)
        unverified = _verify_newer(view, back, work)
        whole_again = ""
        try:
            chosen, unfit = _choose(view, back, in_use, work)
        except NoKnownGoodError as error:
            whole_again = _make_whole_again(view, back, work)
            if back.dry_run and whole_again:
                hint = f"without --dry-run {escape(whole_again)} comes back whole from the trash"
                raise NoKnownGoodError(error.message, hint=hint) from error
            if back.dry_run or not whole_again:
                raise
            chosen, unfit = _choose(view, back, in_use, work)
        view.forget()  # reading took long, and saves in flight may have ended meanwhile
        refused = _wrong_names(view, back, chosen, work)
        while True:
            scope = RollbackScope(
                view, chosen, alone=back.series is not None, only=back.only, refused=refused, anew=back.anew
            )
            plan = _plan(view, back, scope, chosen, unfit)
            planned = replace(_planned(view, back, scope, plan, chosen, unverified), whole_again=whole_again)
            if back.dry_run:
                return planned
            if back.agree is not None:
                back.agree(planned)
            wrong = _carry_out(view, back, scope, plan, in_use, work)
            if wrong is None:
                break
            if wrong == chosen.id:
                raise CouldNotTellError(
                    f"{chosen.manifest.path} could not be put back: its bytes changed between two readings"
                )
            refused |= {wrong}
        view.forget()  # files were moved
        _rewrite_pointers(view.run, scope, plan)
        answer = _verify_given(view, scope, plan, planned, in_use, work)
        return replace(planned, known_good=answer, dry_run=False)


def _make_whole_again(view: RunView, back: GoBack, work: Work) -> str:
    from ckptguard.recover.whole_again import make_whole_again, whole_in_trash  # only where nothing else is good

    if back.dry_run:
        return next((mark.path for mark, _ in whole_in_trash(view, back.wanted)), "")
    return make_whole_again(view, back.wanted, work)


class Undone(msgspec.Struct, frozen=True, kw_only=True):
    """The pointers that were put back, and those that were changed since the rollback, which stay."""

    pointers: tuple[str, ...]
    left: tuple[str, ...]


def undo_pointers(view: RunView) -> Undone:
    """Put back exactly the pointers and links that the last rollback rewrote. A second call goes one rollback further
    back.

    Raises NotFoundError if there is nothing to undo.
    """
    run = view.run
    with run_lock(run):
        rewrites = last_rewrites(run)
        if rewrites is None:
            raise NotFoundError(f"no rollback of {run.url} rewrote a pointer, or all were undone")
        done, left = put_back_pointers(run, rewrites.pointers)
        mark_undone(run, rewrites)
    view.forget()
    return Undone(pointers=tuple(done), left=tuple(left))


def _begin(view: RunView, back: GoBack, in_use: InUse | None, held: contextlib.ExitStack) -> InUse:
    """Lock the run and read it again, unless training is still writing. Returns what pins checkpoints."""
    if in_use is None:
        in_use = held.enter_context(InUse(view.run, "a rollback"))
    if not back.dry_run:
        held.enter_context(run_lock(view.run))
    view.forget()  # another process may have held the lock until now
    if back.joined:
        held.enter_context(_joined(view, back))
    if back.check_writing and not back.force:
        _refuse_while_writing(view)
    return in_use


@contextlib.contextmanager
def _joined(view: RunView, back: GoBack) -> Iterator[None]:
    """Count series as saved together with the known-good checkpoint, for one rollback."""
    run, best = view.run, newest_candidate(view, replace(back.wanted, only=None))
    names = (*back.joined, *(part.id.series for part in best.save)) if best is not None else back.joined
    view.run = replace(run, saves=(Saves(together=tuple(map(glob.escape, names))), *run.saves))
    view.forget()
    try:
        yield
    finally:
        view.run = run
        view.forget()


def _verify_newer(view: RunView, back: GoBack, work: Work) -> tuple[str, ...]:
    """Verify what is newer and has no verdict. Returns what still has none; for a plan, what had none before."""
    wanted, only_named = replace(back.wanted, only=None), back.dry_run or back.to_id is not None
    asks = only_named or back.agree is not None
    unverified = verify_pending(view, wanted, dry_run=asks, sure=back.if_needed, work=work)
    if asks and not only_named:
        verify_pending(view, wanted, sure=back.if_needed, work=work)
    return tuple(unverified)


def _plan(
    view: RunView, back: GoBack, scope: RollbackScope, chosen: Candidate, unfit: frozenset[CheckpointId]
) -> RollbackPlan:
    """Return what to move, to give and to rewrite. Raises NotGivenBackError if that would be wrong or a guess."""
    plan = plan_rollback(scope.known_good, scope.series, scope.pointers)
    if back.if_needed and not is_needed(plan, scope.series, scope.pointers, unfit):
        plan = RollbackPlan()
    if plan.refused:
        raise NotGivenBackError(
            (
                f"{', '.join(plan.refused)} cannot be put back: there is no good content for it that is not newer than"
                f" {chosen.manifest.path}. Nothing was moved"
            ),
            hint=(
                f"move {plan.refused[0]} away if training does not need it, or go further back: ckptguard rollback"
                f" {view.run.url} --step N"
            ),
        )
    if back.only is None and back.series is None:
        _refuse_to_guess(view, scope, plan, chosen)
    return plan


def _refuse_to_guess(view: RunView, scope: RollbackScope, plan: RollbackPlan, chosen: Candidate) -> None:
    """Raise NotGivenBackError if the plan changes what may be another training in the same folder."""
    own = {part.id.series for part in chosen.save}
    changed = {content.id.series for content in plan.moved if not content.anew}
    changed |= {given.content.id.series for given in plan.given}
    for pair in scope.twins():
        other = next((name for name in pair if name not in own), None)
        if other in changed and len(own.intersection(pair)) == 1:
            run, mine = shlex.quote(view.run.url), next(name for name in pair if name in own)
            raise NotGivenBackError(
                f"{escape(mine)} and {escape(other)} may belong together, or be two trainings. Nothing was moved",
                hint=(
                    f"ckptguard rollback {run} --with {shlex.quote(other)} if they are saved together,"
                    f" --only SERIES if not; [[saves]] in ckptguard.toml says it for good"
                ),
            )


def _planned(
    view: RunView, back: GoBack, scope: RollbackScope, plan: RollbackPlan, chosen: Candidate, left: tuple[str, ...]
) -> RolledBack:
    """Return what a plan would do. `left` has no verdict."""
    gone = {c.path for c in plan.moved} - {g.path for g in plan.given}
    return RolledBack(
        known_good=replace(chosen.answer, path=view.run.usable(chosen.manifest.path)),  # its path afterwards
        quarantined=tuple(c.path for c in plan.moved),
        put_back=not chosen.in_place,
        dry_run=True,
        unverified=left,
        given=tuple(
            GivenBack(path=g.path, source=g.content.path, id=g.content.id)
            for g in plan.given
            if g.content.id != chosen.id or g.path != chosen.manifest.path
        ),
        pointed=plan.pointed,
        left_bad=_left_bad(view, scope.folders) if back.series is None else (),
        mentions=mentions_of(view, scope.folders, gone, scope.pointers),
        source=chosen.id,
        training_step=chosen.manifest.training_step,
        repeats=_repeats(chosen.id, [c.id for c in plan.moved]),
        repeats_seconds=_took(view, chosen, [c.path for c in plan.moved if c.id.series == chosen.id.series]),
        newer_alone=tuple(_newer_alone(view, back, chosen)) if len(chosen.save) > 1 else (),
    )


def _newer_alone(view: RunView, back: GoBack, chosen: Candidate) -> Iterator[NewerAlone]:
    for part in chosen.save:
        newest = newest_candidate(view, replace(back.wanted, series=part.id.series, only=None))
        if newest is not None and newest.id.order > part.id.order:
            yield NewerAlone(series=newest.id.series, path=newest.manifest.path, id=newest.id)


def _repeats(known_good: CheckpointId, moved: Iterable[CheckpointId]) -> tuple[int, int] | None:
    """From the known-good one to the newest that was moved; what no numbers in names of one series tell is None."""
    if known_good.number is None:
        return None
    last = max((id.number for id in moved if id.series == known_good.series and id.number is not None), default=0)
    return (known_good.number + 1, last) if last > known_good.number else None


def _took(view: RunView, chosen: Candidate, moved: Iterable[str]) -> float | None:
    """From when the known-good one was saved to when the newest that is moved was."""
    saved_ns, there = chosen.manifest.saved_at, filter(None, map(view.checkpoint, moved))
    last_ns = max((checkpoint.written_at for checkpoint in there), default=0)
    return (last_ns - saved_ns) / 1e9 if saved_ns is not None and last_ns > saved_ns else None


def _left_bad(view: RunView, folders: frozenset[str]) -> tuple[str, ...]:
    there = ((c, view.current_if_readable(c)) for c in view.checkpoints if folder_of(c.path) not in folders)
    judged = ((c.path, view.history.current_verdict(id)) for c, id in there if id is not None)
    return tuple(path for path, found in judged if found is not None and found.outcome is Outcome.BAD)


def _wrong_names(view: RunView, back: GoBack, chosen: Candidate, work: Work) -> frozenset[CheckpointId]:
    """Return the contents of the training's fixed names that differ from their verdicts when read."""
    wrong: set[CheckpointId] = set()
    if back.series is not None or back.dry_run or not back.read_back:
        return frozenset()
    folders = training_in(view, folder_of(chosen.id.series))
    for checkpoint in view.checkpoints:
        beside = checkpoint.step is None and folder_of(checkpoint.path) in folders
        id = view.current_if_readable(checkpoint) if beside else None
        if id is None or id == chosen.id or not view.is_good(id):
            continue
        try:
            if verify_checkpoint(view, checkpoint, Verification(md5=False), work=work).id != id:
                view.forget()
        except CouldNotTellError:
            wrong.add(id)
    return frozenset(wrong)


def _carry_out(
    view: RunView, back: GoBack, scope: RollbackScope, plan: RollbackPlan, in_use: InUse, work: Work
) -> CheckpointId | None:
    """Carry out the plan. If some content is not as sealed when read back, change nothing and return its id."""
    run = view.run
    with contextlib.ExitStack() as held:
        # Stage and read back everything first. If that fails, for example on a full disk, nothing was moved.
        ready: list[tuple[Place, Manifest, str]] = []
        for given in plan.given:
            source = scope.candidates[given.content.id]
            in_use.pin(source.id)
            staged, manifest = held.enter_context(staging(run.storage, ROLLBACK)).place, source.manifest
            copy = None if given.content.in_place else source.copy
            place = Place(run.storage) if copy is None else Place(run.records, copy.folder + "/")
            copy_files_within(run, place, staged, [file.path for file in manifest.files])
            if copy_differs(run.storage, staged.prefix, manifest, scanner=work.scanner) is not None:
                return source.id
            ready.append((staged, manifest, given.path))
        _move_aside(view, plan, back.reason)
        _suspect_copies(view, back, scope)
        for staged, manifest, path in ready:
            give_names_of(staged, manifest.path, [file.path for file in manifest.files], path)
    return None


def _move_aside(view: RunView, plan: RollbackPlan, reason: str) -> None:
    """Quarantine what is newer, and move damaged files aside whose content is given again. All of it, or nothing if a
    part could not be read."""
    giving = {(g.path, g.content.id) for g in plan.given}
    # Looked up before the first is moved: names of ranks are read by the names beside them.
    there = {content.path: view.checkpoint(content.path) for content in plan.moved}
    for content in plan.moved:
        closed = there[content.path]
        if closed is not None and closed.unread is not None and (content.path, content.id) not in giving:
            what = f"{closed.path} may be good, but could not be read: {closed.unread}"
            raise CouldNotTellError(f"{what}. Nothing was moved", hint="make it readable, and try again")
    for content in plan.moved:
        checkpoint = there[content.path]
        if checkpoint is None:
            continue  # it was deleted meanwhile
        if (content.path, content.id) in giving:
            move_aside(view.run, checkpoint, content.id)
        else:
            quarantine_checkpoint(view, checkpoint, reason=reason)


def known_good_of(view: RunView, path_or_id: str | None, step: int | None) -> CheckpointId:
    """Return the known-good checkpoint that a user names by path, id or step. Raises NoKnownGoodError."""
    word = None if path_or_id is None else path_or_id.rstrip("/").removeprefix(view.run.url.rstrip("/") + "/")
    hint = f"run ckptguard list {shlex.quote(view.run.url)} to see what there is"
    for candidate in known_good_candidates(view, Wanted(step=step, thinned=True)):
        if word in (None, candidate.manifest.path, str(candidate.id), candidate.id.record_path):
            if not candidate.answer.thinned:
                return candidate.id
            hint = (
                f"{candidate.manifest.path} is thinned: a resume would restart: {', '.join(candidate.answer.thinned)}"
            )
            break
    what = f"checkpoint {word}" if word is not None else f"checkpoint of step {step}"
    raise NoKnownGoodError(f"{view.run.url} has no known-good {what}", hint=hint)


def _choose(view: RunView, back: GoBack, in_use: InUse, work: Work) -> tuple[Candidate, frozenset[CheckpointId]]:
    """Return the best candidate whose bytes are right now, and those that are none. Damage found is recorded."""

    def attempt(candidate: Candidate) -> Candidate | str:
        if not back.dry_run:
            for part in candidate.save:
                in_use.pin(part.id)
        return whole_save(view.run, candidate, wrong_at)

    def wrong_at(candidate: Candidate) -> str | None:
        if candidate.in_place:
            return _wrong_in_place(view, candidate, back, work)
        return wrong_in_copy(view, candidate, work, record=not back.dry_run)

    def verify_older(refused: frozenset[CheckpointId]) -> None:
        # Older ones were not verified, because the one refused now seemed good.
        if back.to_id is None and not back.dry_run:
            verify_pending(view, replace(back.wanted, exclude=refused), work=work)

    try:
        taken = first_whole(view, attempt, back.wanted, when_refused=verify_older)
    except NoKnownGoodError as error:
        if back.to_id is None:
            raise
        raise NoKnownGoodError(f"{view.run.url} has no known-good checkpoint {back.to_id} to go back to") from error
    chosen = taken.result
    unread = next((s for s in taken.skipped if s.unsure and s.choice.id != chosen.id), None)
    if back.if_needed and unread is not None:
        known = view.history.manifest(unread.choice.id)
        path = known.path if known is not None else str(unread.choice.id)
        raise CouldNotTellError(f"{path} may be good, but could not be read: {unread.why}", hint="try again")
    return chosen, back.exclude.union(s.choice.id for s in taken.skipped)


def _wrong_in_place(view: RunView, candidate: Candidate, back: GoBack, work: Work) -> str | None:
    path = candidate.manifest.path
    checkpoint = view.look_again(path)
    if checkpoint is None:
        return f"{path} is no longer there"
    if not back.read_back:
        return None
    checked = verify_checkpoint(view, checkpoint, Verification(md5=False, record=not back.dry_run), work=work)
    if checked.outcome is Outcome.GOOD and checked.id == candidate.id:
        return None
    return f"{path} is {checked.outcome.value} now"


def _suspect_copies(view: RunView, back: GoBack, scope: RollbackScope) -> None:
    """Mark as suspect the newer kept copies whose originals were deleted, what is newer in replicas, and what began
    from scratch."""
    suspects = {c.id for series in scope.series for c in series.good if scope.is_newer(c)} | back.anew.ids
    if back.before_step is not None:
        own = scope.known_good.id.series
        on_record = ranked_candidates(view.history, Wanted(series=own))
        suspects |= {id for id in on_record if (id.number or 0) >= back.before_step}
    for id in sorted(suspects, key=lambda id: (id.series, id.order)):
        if view.is_good(id):
            mark_suspect(view, id, back.reason)


def _rewrite_pointers(run: Run, scope: RollbackScope, plan: RollbackPlan) -> None:
    rewrites = rewritten(run, plan.pointed, scope.pointers)
    if rewrites:
        record_rewrites(run, rewrites)  # so that they can be undone
        write_pointers(run, rewrites)


def _verify_given(
    view: RunView, scope: RollbackScope, plan: RollbackPlan, planned: RolledBack, in_use: InUse, work: Work
) -> KnownGood:
    """Verify what was put back, and pin it. Returns the known-good checkpoint as it is in place now."""
    answer, chosen = planned.known_good, scope.candidates[planned.source]
    for given in plan.given:
        arrived = _arrived(view, scope.candidates[given.content.id], given.path, work)
        in_use.pin(arrived)
        if given.content.id == chosen.id and given.path == chosen.manifest.path:
            answer = replace(answer, path=view.run.usable(given.path), kept=False, id=arrived)
    return answer


def _arrived(view: RunView, source: Candidate, path: str, work: Work) -> CheckpointId:
    """Verify what was put back. If another generation was at this path, it is a new one with the old bytes."""
    checkpoint = view.checkpoint(path)
    if checkpoint is None:
        raise CouldNotTellError(f"{path} vanished after it was put back")
    _seal_again(view, source, checkpoint)
    checked = verify_checkpoint(view, checkpoint, Verification(md5=False), work=work)
    if checked.outcome is not Outcome.GOOD or checked.id is None:
        raise CouldNotTellError(f"{path} is {checked.outcome.value} after it was put back")
    return checked.id


def _seal_again(view: RunView, chosen: Candidate, checkpoint: Checkpoint) -> None:
    """Seal content that was put back in place of a quarantined checkpoint, as a new generation. Only for layouts that
    their writer seals, because nobody else would. Its bytes were just compared with that manifest."""
    run, manifest, step = view.run, chosen.manifest, chosen.manifest.step
    if not LAYOUTS[manifest.layout].sealed_by_writer or step is None or view.current(checkpoint) is not None:
        return
    files = tuple(as_stored(run, file) for file in manifest.files)
    seal_written(
        run,
        path=manifest.path,
        layout=manifest.layout,
        step=step,
        files=files,
        metrics=manifest.given_metrics(),
        left_out=[path for path, *_ in manifest.thinned],
    )
    view.refresh(manifest.series)


def _refuse_while_writing(view: RunView) -> None:
    settings = view.settings
    for checkpoint in view.checkpoints:
        age = youngest_age(checkpoint)
        if age is not None and age < settings.settle:
            raise BusyError(
                f"{checkpoint.path} was written {age:.1f} s ago: training may still be running",
                hint=f"stop training first, or use {FORCE}",
            )
        recent = age is None or age < settings.unfinished_limit
        why = unfinished_because(view.run.storage, checkpoint) if recent else None
        quiet = pause_between_files(checkpoint, settings.settle)
        writer = writer_of(view.run, checkpoint, quiet) if why is not None else None
        if writer is not None:
            left = settings.unfinished_limit - (age or 0.0)
            raise BusyError(
                f"{checkpoint.path} is unfinished ({why}), and may still be written: {writer}",
                hint=f"stop training first. After {left:.0f} s without a change it is given up; {FORCE} does not wait",
            )

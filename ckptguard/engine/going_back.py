"""Go back in a whole run: each training of it to its known-good save, so that a plain resume takes what is good.

After a crash as after NaN the same law holds: no name that a resume reads is left without good content, as long as its
training has any. Such a name is refused, and nothing more is moved.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ckptguard.decisions.known_good import (
    COUNTERS,
    NAMED,
    NUMBER_IN_NAME,
    OPTIMIZER_STEP,
    SAVED_LAST,
    finest_common,
    may_be_newer,
    series_head_of,
)
from ckptguard.decisions.rollback_plan import Content, is_below
from ckptguard.decisions.rollback_policy import before_repeat
from ckptguard.engine.sick_saves import SickSave, find_fresh_start
from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, NotFoundError, NotGivenBackError
from ckptguard.keep.quarantine import quarantine
from ckptguard.layouts import Checkpoint
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run, open_run
from ckptguard.recover.roll_back import GoBack, RolledBack, roll_back
from ckptguard.recover.rollback_scope import NO_FRESH_START, FreshStart, content_lying, content_of, training_in
from ckptguard.runs.find_known_good import Wanted, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan import Scanner
from ckptguard.upkeep.reconcile import current_verdict_of
from ckptguard.values.ids import MAX_STEP, CheckpointId, folder_of
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import unfinished_because

Tell = Callable[[str], None]  # receives a sentence for people
Folders = frozenset[str]  # of one training
Signature = tuple[tuple[object, ...], ...]  # of a checkpoint
_NAMED = 5  # paths in a sentence
_UNITS = {"iter_num": "iteration", "iteration": "iteration", "num_updates": "update", OPTIMIZER_STEP: OPTIMIZER_STEP}


class WentBack(msgspec.Struct, frozen=True, kw_only=True):
    """What each training went back to, in words too, and what was moved aside. Without `to` the command starts from its
    beginning."""

    to: tuple[str, ...] = ()
    ids: tuple[CheckpointId, ...] = ()
    quarantined: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """What was done, for people."""
        moved = (f"quarantined {', '.join(self.quarantined)}",) if self.quarantined else ()
        return (*moved, *(self.to or ("there is nothing to go back to",)))


class GoingBack:
    """What of a run to go back in, and how far. `tell` gets what could not be told, once."""

    def __init__(self, url: str, settings: Settings, scanner: Scanner, tell: Tell) -> None:
        self._url, self._settings, self._scanner, self._tell = url, settings, scanner, tell
        self.before: frozenset[Signature] = frozenset()  # what existed at the very beginning
        self.lying: frozenset[Signature] = frozenset()  # and at the start of the command
        self.known: frozenset[CheckpointId] = frozenset()  # what was on record then
        self._series: set[str] = set()  # ever had saves in place: to go back in them even if nothing is left
        self._targets: dict[str, int] = {}  # folder -> the step that it last went back to because of sickness
        self._to_compare: list[Content] = []  # what was gone back to, until the first save after it
        self._pinned: InUse | None = None  # the pins of the same

    def open(self) -> Run:
        """Open the run again."""
        return open_run(self._url, self._settings)

    def look(self) -> RunView:
        """Return a fresh view of the run for one piece of work."""
        return RunView(self.open(), self._settings)

    def take_over(self, series: Iterable[str], targets: Mapping[str, int]) -> None:
        """Continue after a killed supervise: the series that had saves, and the steps that it went back to."""
        self._series |= set(series)
        self._targets.update(targets)

    @property
    def to_take_over(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Return the arguments for `take_over` if we are killed. May be called from another thread."""
        return tuple(sorted(self._series.copy())), self._targets.copy()

    def note_series(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Go back in the series of these, too, even if nothing is left in them."""
        self._series |= {c.series for c in checkpoints}

    def fresh_start(self, view: RunView) -> list[SickSave]:
        """Return the first save of a training that began from scratch instead of continuing."""
        for known_good in tuple(self._to_compare):
            reported, anew = find_fresh_start(view, known_good, self.lying)
            if anew is not None:
                return [anew]
            if reported:
                self._to_compare.remove(known_good)
        if not self._to_compare:
            self._unpin()
        return []

    def go_back(self, sick: list[SickSave], reason: str) -> WentBack:
        """Quarantine what is newer than known-good, and make all names that a resume reads hold known-good content.

        This concerns the trainings of the sick saves, or after a crash all trainings. Raises the errors of a rollback.
        After a crash a training that never had anything good is no error.
        """
        view = self.look()
        done: list[RolledBack] = []
        moved: list[str] = []
        words: list[str] = []
        self.note_series(view.checkpoints)
        folders = [s.folder for s in sick] or [folder_of(series) for series in sorted(self._series)]
        for training in dict.fromkeys(training_in(view, folder) for folder in folders):
            own = [s for s in sick if s.folder in training]
            inside = [c for c in view.checkpoints if folder_of(c.path) in training]
            furthest = [content_lying(view, c) for c in inside]
            try:
                if any(s.anew for s in own):
                    anew = self._fresh_start(view, training)
                    went = self._roll_back(view, training, reason, None, anew)
                elif own:
                    went = self._go_back_in(view, training, own, reason)
                else:
                    went = self._after_crash(view, training, reason)
            except NotGivenBackError:
                raise
            except NoKnownGoodError:
                if own or self._was_good(view, training):
                    raise
                view.forget()
            else:
                done.append(went)
                words.append("; ".join(filter(None, (_words(view, went, furthest), went.whole_again and went.copied))))
            if not sick:
                # Some series have nothing good. Files that the dead command left half-written would only stop the next
                # start.
                moved += self._aside(view, self._of_no_use(view, training), reason)
        moved += [path for one in done for path in one.quarantined]
        self._compare_with(view, done)
        ids = tuple(one.known_good.id for one in done)
        return WentBack(to=tuple(words), ids=ids, quarantined=tuple(dict.fromkeys(moved)))

    def what_a_resume_takes(self) -> str | None:
        """Return what is wrong with what a plain resume would take, by the records, or None if that is good."""
        try:
            view = self.look()
            series = dict.fromkeys(c.series for c in view.checkpoints)
            wrong: list[str] = []
            refused: list[CkptguardError] = []
            rollback = f"run ckptguard rollback {shlex.quote(self._url)}"
            then = ""
            for training in dict.fromkeys(training_in(view, folder_of(name)) for name in series):
                inside = [c for c in view.checkpoints if folder_of(c.path) in training]
                try:
                    found = self._wrong_in(view, training, inside)
                    then = then or (rollback if found else "")
                except NoKnownGoodError as error:  # a rollback would end like this
                    found = [c.path for c in inside]
                    refused.append(error)
                wrong += found
        except NotFoundError:
            return None  # there is nothing to resume from
        except Exception as error:
            why = error.message if isinstance(error, CkptguardError) else f"{type(error).__name__}: {error}"
            return f"it is unknown whether a resume would take what is good: {why}"
        if not wrong:
            return None
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        then = then or refused[0].hint or refused[0].message
        return f"what a resume would take is not known to be good: {', '.join(wrong[:_NAMED])}{more}; {then}"

    def _wrong_in(self, view: RunView, training: Folders, inside: Sequence[Checkpoint]) -> list[str]:
        """Return the names of a training that a rollback would change, and those without a verdict on what they hold
        now. Raises NoKnownGoodError as a rollback does."""
        back = GoBack(reason="", folders=training, dry_run=True, if_needed=True, check_writing=False, read_back=False)
        plan = roll_back(view, back, work=Work(scanner=self._scanner))
        newer = (c for c in inside if may_be_newer(c.series, c.step, plan.known_good.id))
        unjudged = [c.path for c in newer if current_verdict_of(view, c) is None]
        return list(
            dict.fromkeys((*plan.quarantined, *(g.path for g in plan.given), *(p.key for p in plan.pointed), *unjudged))
        )

    def _after_crash(self, view: RunView, training: Folders, reason: str) -> RolledBack:
        """Roll back one training whose command died. Raises NotGivenBackError, before anything is moved, if that would
        leave a name that a resume reads without content."""
        if newest_candidate(view, Wanted(folders=training)) is not None:
            names = [c.path for c in self._of_no_use(view, training) if self._is_resume_name(view, c)]
            if names:
                raise NotGivenBackError(
                    f"{', '.join(names)} cannot be put back: the command died while it was saved, and no good content"
                    " for it exists. Nothing was moved",
                    hint=f"move {names[0]} away if training does not need it, and start the command again",
                )
        return self._roll_back(view, training, reason, None)

    def _is_resume_name(self, view: RunView, checkpoint: Checkpoint) -> bool:
        """True if a resume may read a fixed name whose content nobody could judge: it says so, or was there when the
        command was started. A rollback judges names by what was sealed under them."""
        if checkpoint.step is not None or view.history.sealed(checkpoint.series):
            return False
        path, lay = checkpoint.path, (str(key) for signature in self.lying for key, *_ in signature)
        return any(word in path.lower() for word in SAVED_LAST) or any(
            key == path or is_below(key, path) for key in lay
        )

    def _was_good(self, view: RunView, training: Folders) -> bool:
        """True if anything of a training was ever good: a start from scratch would not be its beginning."""
        history = view.history
        own = [series for series in history.names if folder_of(series) in training]
        return any(history.was_good(id) for series in own for id in history.current_verdicts(series))

    def _fresh_start(self, view: RunView, training: Folders) -> FreshStart:
        """Return what the command has written in a training since its start.

        What was on record then, and was saved again byte for byte, is still what it was, and no mark may make it
        suspect.
        """
        paths: set[str] = set()
        again: set[str] = set()
        known = set(self.known)
        for checkpoint in [c for c in view.checkpoints if folder_of(c.path) in training]:
            id = view.current_if_readable(checkpoint)
            if checkpoint.signature in self.lying:
                known |= {id} if id is not None else set()
            elif self._is_as_known(view, checkpoint):
                again.add(checkpoint.path)
            else:
                paths.add(checkpoint.path)
        own = [series for series in view.history.series if folder_of(series) in training]
        ids = {id for series in own for id in view.history.sealed(series)}
        return FreshStart(paths=frozenset(paths), again=frozenset(again), ids=frozenset(ids - known))

    def _is_as_known(self, view: RunView, checkpoint: Checkpoint) -> bool:
        """True if the bytes of a new file, which are read for this, were on record when the command was started, and
        are good."""
        try:
            checked = verify_checkpoint(view, checkpoint, Verification(md5=False), work=Work(scanner=self._scanner))
        except CouldNotTellError:
            return False
        return checked.id in self.known and checked.outcome is Outcome.GOOD

    def _aside(self, view: RunView, checkpoints: Iterable[Checkpoint], reason: str) -> list[str]:
        moved = []
        for checkpoint in checkpoints:
            quarantine(view, checkpoint.path, reason=reason)
            moved.append(checkpoint.path)
        return moved

    def _compare_with(self, view: RunView, done: Sequence[RolledBack]) -> None:
        """Pin what was gone back to until the next start has saved something, to compare the two.

        This is done for each folder of a training, because any of them may get the first save.
        """
        self._unpin()
        self._pinned = InUse(view.run, "supervise")
        for id in (id for one in done for id in (one.known_good.id, one.source)):
            self._pinned.pin(id)
        view.forget()
        folders = sorted({f for one in done for f in training_in(view, folder_of(one.known_good.series))})
        newest = [newest_candidate(view, Wanted(folders=frozenset((folder,)))) for folder in folders]
        self._to_compare = [content_of(candidate) for candidate in newest if candidate is not None]
        for content in self._to_compare:
            self._pinned.pin(content.id)

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.__exit__()
            self._pinned = None

    def _go_back_in(self, view: RunView, training: Folders, sick: list[SickSave], reason: str) -> RolledBack:
        """Roll back one training. If the sickness returned from the last target, go one checkpoint further, if there is
        one."""

        def good_before(step: int) -> int | None:
            found = newest_candidate(view, Wanted(before_step=step, folders=self._to_choose_in(view, training, step)))
            return None if found is None else found.manifest.training_step

        since = min((s.since for s in sick if s.since is not None), default=None)
        limit = MAX_STEP + 1 if since is None else since
        last = next((self._targets[folder] for folder in sorted(training) if folder in self._targets), None)
        before = before_repeat(good_before, limit, last=last)
        why = f"{reason}: {'; '.join(s.reason for s in sick)}"
        done = self._roll_back(view, training, why, since if before == limit else before)
        if done.training_step is not None:
            self._targets |= dict.fromkeys(training, done.training_step)
        return done

    def _roll_back(
        self,
        view: RunView,
        training: Folders,
        reason: str,
        before_step: int | None,
        anew: FreshStart = NO_FRESH_START,
    ) -> RolledBack:
        # Skip the check for a writing training: we have just stopped it.
        folders = self._to_choose_in(view, training, before_step, anew)
        back = GoBack(reason=reason, folders=folders, before_step=before_step, anew=anew, check_writing=False)
        return roll_back(view, back, work=Work(scanner=self._scanner))

    def _to_choose_in(
        self, view: RunView, training: Folders, before_step: int | None, anew: FreshStart = NO_FRESH_START
    ) -> Folders:
        """Return the folders of a training to search for its known-good checkpoint: those where the command saves.

        If another folder allows a better resume, all folders are searched. An earlier stage in another folder may count
        higher.
        """
        saved = training & {folder_of(c.path) for c in view.checkpoints if c.signature not in self.before}
        wanted = Wanted(before_step=before_step, exclude=anew.ids)
        own, best = (newest_candidate(view, msgspec.structs.replace(wanted, folders=f)) for f in (saved, training))
        if own is None or best is None or content_of(own).has_optimizer < content_of(best).has_optimizer:
            return training
        return saved

    def _of_no_use(self, view: RunView, training: Folders) -> list[Checkpoint]:
        """Return new files of series without anything good that are judged not good, or unfinished.

        Unreadable ones may be whole, and stay.
        """
        found = []
        for checkpoint in view.checkpoints:
            if folder_of(checkpoint.path) not in training or checkpoint.signature in self.before:
                continue
            if newest_candidate(view, Wanted(series=checkpoint.series)) is not None:
                continue
            try:
                id = view.current_if_readable(checkpoint)
                judged = id is not None and view.history.has_verdict(id)
                if judged or unfinished_because(view.run.storage, checkpoint, scanner=self._scanner) is not None:
                    found.append(checkpoint)
            except CouldNotTellError as error:
                self._tell(error.message)
        return found


def _words(view: RunView, went: RolledBack, lay: Sequence[Content]) -> str:
    """Say where a training went back to, and how much of it is made again, as far as the saves count that."""
    path = went.known_good.path
    name = path.removeprefix(f"{view.run.url.rstrip('/')}/")
    manifest = view.history.manifest(went.source) or view.history.manifest(went.known_good.id)
    counters = {} if manifest is None else series_head_of(manifest).counters
    common = [finest_common(counters, content.counters) for content in lay]
    kind = next((kind for kind in (*COUNTERS, *NAMED) if kind in (common or counters)), None)
    if kind is None:
        return f"back to {name}"
    furthest = max((content.counters.get(kind, 0) for content in lay), default=0)
    again = furthest - counters[kind]
    if kind == NUMBER_IN_NAME:
        return f"back to {name}" + (f": what followed, up to {furthest}, is made again" if again > 0 else "")
    unit = _UNITS.get(kind, "epoch" if "epoch" in kind else "step")
    many = f"{again} {unit}s are" if again > 1 else f"1 {unit} is"
    return f"back to {name} of {unit} {counters[kind]}" + (f": {many} made again" if again > 0 else "")

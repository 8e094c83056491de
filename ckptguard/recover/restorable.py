"""Find which checkpoints may be restored, and where each of them is, in the run and in its replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ckptguard.decisions.known_good import IN_PLACE, KEPT
from ckptguard.errors import FORCE, CkptguardError, CouldNotTellError, NoKnownGoodError, NotFoundError, RefusedError
from ckptguard.records.kept import read_kept
from ckptguard.records.pins import InUse
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.trash import list_trashed, read_trashed, trash_folder
from ckptguard.replicas.replicate import has_newest, known_bad, open_replicas
from ckptguard.runs.candidates import Choice, Refused, Skipped
from ckptguard.runs.find_known_good import (
    ANY,
    SavePart,
    Wanted,
    candidate_of,
    known_good_candidates,
    none_found,
)
from ckptguard.runs.publish import Place
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RecordedSaves, save_of
from ckptguard.runs.work import Work
from ckptguard.storage import Storage
from ckptguard.values.ids import CheckpointId, step_text
from ckptguard.values.manifest import Manifest
from ckptguard.values.own_log import log as _log
from ckptguard.values.verdict import Outcome, worst
from ckptguard.verification.checkpoint import verify_checkpoint

_QUARANTINED, _TRASHED = "quarantine", "trash"
_NONE_HERE = (NoKnownGoodError, NotFoundError, RefusedError, CouldNotTellError)


class ReadablePlace(Place, frozen=True, kw_only=True):
    """Where the files of a manifest can be read, and what they are."""

    view: RunView
    id: CheckpointId
    manifest: Manifest
    outcome: Outcome
    where: str

    @property
    def name(self) -> str:
        """The checkpoint's name in messages."""
        return f"{self.manifest.path}{self.id.nth_save} of {self.view.run.url}"


class Restorable:
    """What may be restored of a run: its known-good saves, or that of one step; newest first.

    A save has the id of its weights. The run's own places come before replicas, which are opened only when needed.
    Checkpoints stay pinned until `held` ends.
    """

    def __init__(self, view: RunView, step: int | None, *, force: bool, work: Work, held: contextlib.ExitStack) -> None:
        self._view, self._step, self._work, self._held = view, step, work, held
        self._own = _Places(view, step, force, work, held)
        self._opened: list[_ReplicaPlaces] | None = None
        self.save: tuple[SavePart, ...] = ()  # all parts of the latest result of `best`, if it has several

    def best(self, refused: Refused) -> CheckpointId | None:
        """Return the newest save that is not refused."""
        own = self._own.best(refused)
        if own is not None and not refused:
            no_newer = self._step is not None or not self._view.settings.replicas
            if no_newer or has_newest(self._view.history, own):
                self.save = self._own.saves.get(own, ())
                return own
        others = {replica.best(refused): replica for replica in reversed(self._replicas())}
        # Of several that are equally new, such as those of two series at one step, the run's own comes first.
        found: dict[CheckpointId | None, _Places] = {own: self._own} | others | {own: self._own}
        newest = max((id for id in found if id is not None), key=lambda id: id.order, default=None)
        self.save = () if newest is None else found[newest].saves.get(newest, ())
        return newest

    def places(self, id: CheckpointId) -> Iterator[tuple[Choice, ReadablePlace]]:
        """Yield its current places."""
        yield from self._own.places(id)
        for replica in self._replicas():
            yield from replica.places(id)

    def none_left(self, refused: Refused, skipped: Sequence[Skipped]) -> CkptguardError:
        """Return the error for a restore without success, given that all places could be read."""
        failed = self._own.failed
        if isinstance(failed, CouldNotTellError) or not refused:
            return failed or none_found(self._view.run, None)
        url, wrong = self._view.run.url, "no whole copy of it is there"
        last = min(refused, key=lambda id: id.order)
        if skipped:
            choice, wrong = skipped[-1].choice, skipped[-1].why
            last, url = choice.id, choice.source or url
        return RefusedError(
            f"{_name(last, url)} is damaged: {wrong}",
            outcome=Outcome.BAD.value,
            hint=f"restore another step, or use {FORCE} for the damaged bytes",
        )

    def _replicas(self) -> list[_ReplicaPlaces]:
        if self._opened is None:
            replicas = open_replicas(self._view)
            self._opened = [_ReplicaPlaces(r, self._step, self._work, self._held, self._view) for r in replicas]
        return self._opened


class _Places:
    """A run or a replica as a source of checkpoints. `failed` says why nothing may be restored from it."""

    def __init__(self, view: RunView, step: int | None, force: bool, work: Work, held: contextlib.ExitStack) -> None:
        self._view, self._step, self._force, self._work = view, step, force, work
        self._in_use = held.enter_context(InUse(view.run, "restore"))
        self._source = ""
        self._outcomes: dict[CheckpointId, Outcome | None] = {}  # of the ids asked for; None: must not be restored
        self._of_step: list[CheckpointId] | None = None
        self.saves: dict[CheckpointId, tuple[SavePart, ...]] = {}  # of what `best` found: all parts, if it has several
        self.failed: CkptguardError | None = None

    def best(self, refused: Refused) -> CheckpointId | None:
        """Return the newest one that may be restored from here."""
        try:
            return next((id for id in self._ids(refused) if self._may_be(id)), None)
        except _NONE_HERE as error:
            self.failed = error
        return None

    def places(self, id: CheckpointId) -> Iterator[tuple[Choice, ReadablePlace]]:
        """Yield its places here."""
        view = self._view
        outcome = self._outcome(id) if self.failed is None else None
        if outcome is None:
            return
        self._in_use.pin(id)
        view.refresh(id.series)  # the pin stops later moves; see what moved before
        manifest = view.history.manifest(id)
        if manifest is None:
            return
        for where, storage, prefix in self._lies(id, manifest):
            choice = Choice(id=id, place=where, source=self._source)
            place = ReadablePlace(storage, prefix, view=view, id=id, manifest=manifest, outcome=outcome, where=where)
            yield choice, place

    def _ids(self, refused: Refused) -> Iterator[CheckpointId]:
        """Yield the saves that may be restored, newest first. Without a step that is everything known-good."""
        if self._step is not None:
            yield from (id for id in self._named() if id not in refused)
        else:
            yield from self._good(Wanted(exclude=refused, thinned=True))

    def _good(self, wanted: Wanted) -> Iterator[CheckpointId]:
        for candidate in known_good_candidates(self._view, wanted):
            self.saves[candidate.id] = candidate.answer.save
            self._outcomes |= {part.id: Outcome.GOOD for part in candidate.save}
            yield candidate.id

    def _may_be(self, id: CheckpointId) -> bool:
        return all(self._outcome(one) is not None for one in _ids_of(id, self.saves.get(id, ())))

    def _outcome(self, id: CheckpointId) -> Outcome | None:
        if id not in self._outcomes:
            self._outcomes[id] = None if candidate_of(self._view.history, id) is None else Outcome.GOOD
        return self._outcomes[id]

    def _named(self) -> list[CheckpointId]:
        """Return what may be restored of the one step, best first."""
        if self._of_step is None:
            good = list(self._good(Wanted(step=self._step, thinned=True)))
            self._of_step = [*self._whole_in_trash(good), *good] or [self._not_good()]
        return self._of_step

    def _whole_in_trash(self, good: Sequence[CheckpointId]) -> list[CheckpointId]:
        """Return the whole checkpoints of the step in the trash, if all that was sealed since is what thinning left.

        That may be gone.
        """
        run, history = self._view.run, self._view.history
        if not all((m := history.manifest(id)) is None or m.thinned for id in good):
            return []
        marks = (read_trashed(run, id) for id in list_trashed(run) if id.step == self._step)
        found = [
            mark.id
            for mark in marks
            if mark is not None
            and mark.becomes
            and all(
                (m := history.manifest(id)) is not None and m.thinned
                for id in history.generations(mark.series, mark.step)
                if id.generation > mark.generation
            )
            and history.is_good(mark.id)
        ]
        self._outcomes |= dict.fromkeys(found, Outcome.GOOD)
        return found

    def _not_good(self) -> CheckpointId:
        """Return the best save of a step that has no known-good one. Those without a verdict get one."""
        view, step = self._view, self._step
        for checkpoint in view.checkpoints:
            if checkpoint.step == step:
                id = view.current_if_readable(checkpoint)
                if id is None or view.history.verdict(id) is None:
                    verify_checkpoint(view, checkpoint, work=Work(scanner=self._work.scanner))
        history = view.history
        source = RecordedSaves(history, ANY, every_copy=True)
        of_step = [id for series in history.names for id in history.current_verdicts(series) if id.step == step]
        found = [(id, save_of(source, id)) for id in of_step if history.manifest(id) is not None]
        whole = [(id, save) for id, save in found if save is not None]
        if not whole:
            raise self._of_no_save([id for id, _ in found])
        id, save = max(whole, key=lambda one: (self._judged(*one) is Outcome.GOOD, one[0].generation))
        outcome = self._judged(id, save)
        if outcome is not Outcome.GOOD and not self._force:
            raise self._refused(next(one for one in _ids_of(id, save) if self._outcomes[one] is outcome), outcome)
        first = _ids_of(id, save)[0]
        self.saves[first] = save
        return first

    def _judged(self, id: CheckpointId, save: tuple[SavePart, ...]) -> Outcome:
        """Return the worst outcome of a save, and remember that of each part."""
        verdicts = {one: self._view.history.verdict(one) for one in _ids_of(id, save)}
        own = {one: Outcome.PENDING if v is None else v.outcome for one, v in verdicts.items()}
        doubted = (one for one in own if own[one] is Outcome.GOOD and not self._view.history.is_good(one))
        own |= dict.fromkeys(list(doubted), Outcome.SUSPECT)  # what thinning left of it is
        self._outcomes |= own
        return worst(own.values())

    def _refused(self, id: CheckpointId, outcome: Outcome) -> RefusedError:
        manifest, verdict = self._view.history.manifest(id), self._view.history.verdict(id)
        path = id.series if manifest is None else manifest.path
        reason = verdict.findings[0].message if verdict is not None and verdict.findings else "its verdict says so"
        return RefusedError(
            f"{path}{id.nth_save} is {outcome.value}: {reason}",
            outcome=outcome.value,
            hint=f"restore another step, or use {FORCE}",
        )

    def _of_no_save(self, ids: list[CheckpointId]) -> CkptguardError:
        """Return the error for a step of which there is nothing, or only a part of a save."""
        url, step = self._view.run.url, self._step
        paths = sorted(one.path for id in ids if (one := self._view.history.manifest(id)) is not None)
        if not paths:
            return NotFoundError(f"{url} has no checkpoint of step {step} that could be restored")
        return NotFoundError(
            f"{url} has no whole save of step {step}, only {', '.join(paths)}",
            hint="`ckptguard list RUN --saves` shows which files are saved together",
        )

    def _lies(self, id: CheckpointId, manifest: Manifest) -> list[tuple[str, Storage, str]]:
        """Return its current places: the place's name, its storage, and the prefix of the files' paths."""
        run, history = self._view.run, self._view.history
        found: list[tuple[str, Storage, str]] = []
        in_place = history.current_if_readable(id.series, id.step, manifest.path) == id
        if in_place and self._view.look_again(manifest.path) is not None:
            found.append((IN_PLACE, run.storage, ""))
        copy = read_kept(run, id)
        if copy is not None:
            found.append((KEPT, run.records, copy.folder + "/"))
        if history.is_quarantined(id):
            found.append((_QUARANTINED, run.records, f"{QUARANTINE}/{id.record_path}/"))
        if id in list_trashed(run):
            found.append((_TRASHED, run.records, trash_folder(id) + "/"))
        # With force you may want the damaged bytes themselves, but a whole copy comes first.
        return sorted(found, key=lambda one: one[0] != KEPT) if self._force else found


class _ReplicaPlaces(_Places):
    """The checkpoints that are good in a replica, and not known to be bad in the run."""

    def __init__(
        self, replica: RunView, step: int | None, work: Work, held: contextlib.ExitStack, own: RunView
    ) -> None:
        super().__init__(replica, step, False, work, held)
        self._source, self._run = replica.run.url, own

    def places(self, id: CheckpointId) -> Iterator[tuple[Choice, ReadablePlace]]:
        """Yield its places here; none if they cannot be read."""
        try:
            found = list(super().places(id))
        except _NONE_HERE as error:
            _log.warning("the replica %s cannot be used: %s", self._source, error.message)
            return
        yield from found

    def _outcome(self, id: CheckpointId) -> Outcome | None:
        outcome = super()._outcome(id)
        return outcome if outcome is Outcome.GOOD and not known_bad(self._run.history, id) else None


def _name(id: CheckpointId, url: str) -> str:
    if id.step is None:
        return f"{id.series}{id.nth_save} of {url}"
    return f"step {step_text(id.step)} of {id.series} in {url}{id.nth_save}"


def _ids_of(id: CheckpointId, save: tuple[SavePart, ...]) -> list[CheckpointId]:
    """Return the ids of all parts of a save, its weights first."""
    return [part.id for part in save] or [id]

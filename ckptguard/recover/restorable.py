"""Find which checkpoints may be restored, and where each of them is, in the run and in its replicas."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ckptguard.decisions.candidates import Choice, Search
from ckptguard.decisions.known_good import IN_PLACE, KEPT
from ckptguard.errors import FORCE, CkptguardError, CouldNotTellError, NoKnownGoodError, NotFoundError, RefusedError
from ckptguard.records.kept import read_kept
from ckptguard.records.pins import InUse
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.trash import list_trashed, trash_folder
from ckptguard.replicas.replicate import has_newest, known_bad, open_replicas
from ckptguard.runs.find_known_good import Wanted, candidate_of, known_good_candidates, none_found
from ckptguard.runs.publish import Place
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage import Storage
from ckptguard.values.ids import CheckpointId, step_text
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint

_log = logging.getLogger("ckptguard")
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
    """What may be restored of a run: its known-good checkpoints, or one step; newest first.

    The run's own places come before replicas, which are opened only when needed. Checkpoints stay pinned until `held`
    ends.
    """

    def __init__(self, view: RunView, step: int | None, *, force: bool, work: Work, held: contextlib.ExitStack) -> None:
        self._view, self._step, self._work, self._held = view, step, work, held
        self._own = _Places(view, step, force, work, held)
        self._opened: list[_ReplicaPlaces] | None = None

    def best(self, refused: frozenset[CheckpointId]) -> CheckpointId | None:
        """Return the newest checkpoint that is not refused."""
        own = self._own.best(refused)
        if own is not None and not refused:
            no_newer = self._step is not None or not self._view.settings.replicas
            if no_newer or has_newest(self._view.history, own):
                return own
        found = [own, *(replica.best(refused) for replica in self._replicas())]
        return max((id for id in found if id is not None), key=lambda id: id.order, default=None)

    def places(self, id: CheckpointId) -> Iterator[tuple[Choice, ReadablePlace]]:
        """Yield its current places."""
        yield from self._own.places(id)
        for replica in self._replicas():
            yield from replica.places(id)

    def none_left(self, search: Search) -> CkptguardError:
        """Return the error for a restore without success, given that all places could be read."""
        failed = self._own.failed
        if isinstance(failed, CouldNotTellError) or not search.refused:
            return failed or none_found(self._view.run, None)
        url, wrong = self._view.run.url, "no whole copy of it is there"
        last = min(search.refused, key=lambda id: id.order)
        if search.skipped:
            choice, wrong = search.skipped[-1].choice, search.skipped[-1].why
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
        self._of_step: dict[CheckpointId, Outcome] | None = None
        self.failed: CkptguardError | None = None

    def best(self, refused: frozenset[CheckpointId]) -> CheckpointId | None:
        """Return the newest one that may be restored from here."""
        try:
            return next((id for id in self._ids(refused) if self._outcome(id) is not None), None)
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

    def _ids(self, refused: frozenset[CheckpointId]) -> Iterator[CheckpointId]:
        """Yield the ids that may be restored, newest first. Without a step that is everything known-good."""
        if self._step is not None:
            yield from (id for id in self._named() if id not in refused)
            return
        for candidate in known_good_candidates(self._view, Wanted(exclude=refused)):
            self._outcomes[candidate.id] = Outcome.GOOD
            yield candidate.id

    def _outcome(self, id: CheckpointId) -> Outcome | None:
        if id not in self._outcomes:
            if self._step is not None:
                self._outcomes[id] = self._named().get(id)
            else:
                self._outcomes[id] = None if candidate_of(self._view.history, id) is None else Outcome.GOOD
        return self._outcomes[id]

    def _named(self) -> dict[CheckpointId, Outcome]:
        """Return what may be restored of the one step, best first, with its outcome."""
        if self._of_step is None:
            good = known_good_candidates(self._view, Wanted(step=self._step))
            self._of_step = {candidate.id: Outcome.GOOD for candidate in good} or self._not_good()
        return self._of_step

    def _not_good(self) -> dict[CheckpointId, Outcome]:
        """Return the best checkpoint of a step that has no known-good one. Those without a verdict get one."""
        view, step = self._view, self._step
        for checkpoint in view.checkpoints:
            if checkpoint.step == step:
                id = view.current_if_readable(checkpoint)
                if id is None or view.history.verdict(id) is None:
                    verify_checkpoint(view, checkpoint, work=Work(scanner=self._work.scanner))
        history = view.history
        ids = (id for series in history.names for id in history.standings(series) if id.step == step)
        found = [(verdict.outcome is Outcome.GOOD, id, verdict) for id in ids if (verdict := history.verdict(id))]
        for good, id, verdict in sorted(found, key=lambda one: (one[0], one[1].generation), reverse=True):
            manifest = history.manifest(id)
            if manifest is None:
                continue
            if not good and not self._force:
                reason = verdict.findings[0].message if verdict.findings else "its verdict says so"
                raise RefusedError(
                    f"{manifest.path}{id.nth_save} is {verdict.outcome.value}: {reason}",
                    outcome=verdict.outcome.value,
                    hint=f"restore another step, or use {FORCE}",
                )
            return {id: verdict.outcome}
        raise NotFoundError(f"{view.run.url} has no checkpoint of step {step} that could be restored")

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

"""TrainingGuard: the training side in one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec.structs import replace

from ckptguard.decisions.health import Diagnosis, overdue
from ckptguard.decisions.rollback_policy import RateCut, RollbackPolicy, policy_of
from ckptguard.errors import CkptguardError, SettingsError, SickTrainingError
from ckptguard.training.announce import announce_resume
from ckptguard.training.options import Deadlines, Guarded, Saving, asks_daemon, checked_option
from ckptguard.training.ranks import Ranks, agree, each, ranks_of_training
from ckptguard.values.ids import MAX_STEP
from ckptguard.values.own_log import log as _log

if TYPE_CHECKING:
    from ckptguard.records.run import Run
    from ckptguard.runs.settings_file import GivenSettings
    from ckptguard.training.content.training_parts import TrainingParts
    from ckptguard.training.rollback.load_known_good import Probe
    from ckptguard.training.rollback.replaying import Replaying
    from ckptguard.training.rollback.rollbacks import Rollback
    from ckptguard.training.saving.stores import Store, UserFiles
    from ckptguard.values.incident import Replay
    from ckptguard.values.settings import Settings

Batch = TypeVar("Batch")
_EXIT_SECONDS = 60.0  # for a save in flight, when the guard is closed
_UNOBSERVED = 100  # updates without any observation, after which the log says so
_OBSERVE = "call guard.observe(loss=..., grad_norm=...) after each update, else only weights are checked"
_SAVING, _DEADLINES = Saving(), Deadlines()


class TrainingGuard:
    """Saves training, notices when it turns sick, and takes it back to the last known-good checkpoint.

    ::

        guard = ckptguard.TrainingGuard("runs/exp1", model=model, optimizer=optimizer)
        for step, batch in guard.steps(loader, total=10_000, save_every=500):
            loss, norm = train_step(batch)
            guard.observe(loss=loss, grad_norm=norm)

    `steps` resumes at known-good, saves, and after an incident rewinds model, data and step between two iterations. Of
    several ranks, all make a guard. A `save` and `load` of the user's own are called on all of them.

    Args:
        run: A folder, or a URL that fsspec opens. Each training has one of its own.
        model: The model, as training uses it: compiled, or in its wrapper.
        optimizer: The optimizer. Several go into one object that has both methods.
        scheduler: The scheduler of the learning rate.
        scaler: The loss scaler. It shows which updates were skipped, and with which loss scale.
        save: Your function that writes a checkpoint to exactly this path, called with path and step.
        load: Your function that puts back what `save` wrote, called with the path.
        name: With `save`: how its files are named.
        strict: Refuse a checkpoint whose names do not all fit. If it is off, they are a warning.
        policy: When training counts as sick, and how it goes back.
        settings: Settings such as ``{"keep_good": 3}``. They count before ``ckptguard.toml`` and the environment.
        daemon: "auto" starts a daemon for the run where none answers. With "off" or None checkpoints are verified when
            they are needed.
        saving: How the automatic saves are made. One that fails is logged and recorded as an incident.
        deadlines: How long it waits for the daemon, and one rank for the others.

    Raises:
        SettingsError: An option cannot be.
        StateError: Some state could not be saved and put back exactly.
        CouldNotTellError: The run cannot be used (StorageError, RecordsError).
        RanksError: A rank failed, or did not answer in time. Any method that ranks call together may raise it.
    """

    framework = "plain"  # what reports call the training loop

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        model: Guarded,
        optimizer: Guarded | None = None,
        scheduler: Guarded | None = None,
        scaler: Guarded | None = None,
        save: Callable[[str, int], object] | None = None,
        load: Callable[[str], object] | None = None,
        name: str = "step-{step}.pt",
        strict: bool = True,
        policy: RollbackPolicy | None = None,
        settings: GivenSettings = None,
        daemon: str | None = "auto",
        saving: Saving = _SAVING,
        deadlines: Deadlines = _DEADLINES,
    ) -> None:
        self._policy, asks = policy_of(policy), asks_daemon(daemon)
        checked_option("saving", saving, Saving)
        checked_option("deadlines", deadlines, Deadlines)
        # What a guard is made of is loaded when one is made: its name costs training next to nothing.
        from ckptguard.records.run import begin_run
        from ckptguard.runs.settings_file import given_settings, training_settings, with_replicas
        from ckptguard.training.client import ensure_daemon
        from ckptguard.training.content.training_parts import TrainingParts
        from ckptguard.training.rollback.rollbacks import Rollbacks
        from ckptguard.training.saving.saving import SaveQueue
        from ckptguard.training.saving.stores import UserFiles, cannot_copy
        from ckptguard.training.signals.curve_recorder import CurveRecorder
        from ckptguard.training.signals.monitor import TrainingMonitor
        from ckptguard.training.single_guard import SingleGuard
        from ckptguard.training.state.progress import Progress

        if (save is None) != (load is None):
            raise SettingsError("save= and load= go together: what one writes the other reads")
        files = UserFiles(save=save, load=load, name=name) if save is not None and load is not None else None
        if files is not None and not saving.blocking:
            raise cannot_copy()
        if files is not None and saving.optimizer_every > 1:
            raise SettingsError("optimizer_every needs our own layout: a save= of your own decides what it writes")
        self._how, self._deadline = saving, deadlines.daemon
        self._ranks = ranks_of_training(deadlines.ranks)
        leads, several = self._ranks.rank == 0, self._ranks.size > 1
        settings = with_replicas(given_settings(settings, lambda: training_settings(run)), saving.replicas)
        self._run = begin_run(run, settings)
        self._parts = TrainingParts(model, optimizer, scheduler, scaler, strict=strict, framework=self.framework)
        self._store = _store_for(self._run, settings, self._parts, self._ranks, files)
        self._only = SingleGuard(self._run, self._store.series, self._ranks)
        self._progress = Progress(self._parts, self._ranks.size)
        self._monitor = TrainingMonitor(self._parts, self._policy, allow=settings.allow_nonfinite)
        self._monitor.recent.curve = self._curve = CurveRecorder(self._run if leads else None)
        self._saving = SaveQueue(self._store, self._tell_failed_save, self._ranks)
        daemon_seconds = deadlines.daemon if asks else None
        replica_seconds = deadlines.ranks / 2 if several else None
        self._rollbacks = Rollbacks(
            self._run,
            settings,
            self._store,
            self._policy,
            ranks=self._ranks,
            daemon=daemon_seconds,
            replica=replica_seconds,
        )
        self._loop, self._resumed = _Loop(self, total=0, save_every=1), False
        self._replaying: Replaying | None = None
        self._child = ensure_daemon(self._run, settings) if asks and leads else None

    @property
    def step(self) -> int:
        """Updates completed."""
        return self._progress.step

    @property
    def run(self) -> str:
        """The run's normalised URL or absolute path."""
        return self._run.url

    def steps(self, loader: Iterable[Batch], total: int, save_every: int) -> Iterator[tuple[int, Batch]]:
        """Yield (number of the update to make, batch) until `total` updates are done, epoch after epoch.

        Resumes at the newest known-good checkpoint. Saves after every `save_every` updates and at the end. When the
        state is sick, it goes back between two iterations, and leaves out the batches that did harm. After a `break`
        an update counts as made if it was observed. Several ranks wait here for the last save, because a process group
        may end after it. The last save then has its verdict, or the log says how to get it.

        RollbackExhausted if the policy's budget is spent. NoKnownGoodError if there is nothing to go back to.
        SettingsError if another process of this machine trains into the run.
        """
        if save_every < 1 or total < 0:
            raise SettingsError("save_every must be at least 1 and total not negative")
        self._progress.use_loader(loader)
        return _Loop(self, total, save_every).steps()

    def observe(
        self,
        loss: Any = None,
        grad_norm: Any = None,
        *further: object,
        skipped: bool | None = None,
        error: BaseException | None = None,
        **unknown: object,
    ) -> Diagnosis:
        """Take in, once, the signals of the update just made: floats or tensors. `skipped`: the optimizer left it out,
        where the guard has no scaler to tell that from. `error`: an exception that it raised; if the answer is not
        `sick`, it means nothing here and should be raised again. Never raises, whatever it is given, and never rolls
        back: `steps` does, before the next batch. What cannot be read counts as not reported, and the log says so once.
        Tensors on a device are not waited for: they are judged a few updates later, at the latest before the next
        save."""
        for name, value in (*(("a third argument", value) for value in further), *unknown.items()):
            self._monitor.reader.say(name, type(value), TypeError("observe() takes no such argument"))
        self._progress.observed = self._progress.now
        self._monitor.begin()
        return self._monitor.observe(self._progress.current, loss, grad_norm, skipped=skipped, error=error)

    def save(self, step: int | None = None, *, blocking: bool = True, metrics: Mapping[str, Any] | None = None) -> str:
        """Save now, and return the checkpoint's path. Inside `steps`, call it after the update: the checkpoint is named
        by the update that is being made. Outside `steps`, give the `step`. A poisoned state is not saved:
        SickTrainingError. Any other failure, such as StorageFullError, is raised, too.

        `blocking=False` returns as soon as the state is copied. One thread checks, hashes and writes one save at a
        time. A failure there is logged and recorded as an incident at once. The next `save`, `wait_for_save` or
        `close` raises it and does nothing else. At the end of the interpreter the save gets up to a minute. All ranks
        call this and `wait_for_save`, and `close` before they end their process group. Do not use it with a `save=` of
        your own, which reads the state while training changes it.

        `metrics` are named numbers by which `ckptguard prune --keep-best` chooses; those of rank 0 count. NaN is
        recorded, and is never the best. What is not a number is left out, and the log says so once.
        """
        given = {} if metrics is None else {"metrics": self._monitor.reader.read_metrics(metrics)}
        self._saving.raise_unheard()
        if step is None:
            if self._progress.position is None:
                raise SettingsError("outside of steps(), save(step=...) must say how many updates are done")
            step = self._progress.current
        if not 0 <= step <= MAX_STEP:
            raise SettingsError(f"a step is a number from 0 to {MAX_STEP}, not {step}")
        if self._loop.runs and step > self._progress.current:
            raise SettingsError(f"step {step} is not made yet: training is at {self._progress.current}")
        self._only.begin(loops=False)
        if not self._loop.runs and self._saving.last is not None and step > self._saving.last:
            self._monitor.say_if_unheard(step, _OBSERVE)
        if blocking:
            self._monitor.look(step)
        else:
            self._monitor.flush()  # the copy is looked at, which costs training nothing
        self._refuse_sick("not saved")
        if not self._loop.runs:
            self._progress.end_cut(self._policy, step)
        path = self._saving.begin(step, self._extra(step) | given, blocking=blocking, asked=True)
        self._curve.saved()
        if not self._loop.runs:
            self._progress.step = step
        return self._run.usable(path)

    def wait_for_save(self, seconds: float | None = None) -> bool:
        """True if no save is in flight any more, after it had `seconds` to end (None: as long as it takes). Raises
        what went wrong with a `save(blocking=False)`."""
        over = self._saving.wait(seconds)
        self._saving.raise_unheard()
        return over

    def resume(self, probe: Probe | None = None) -> int:
        """Load and verify the newest known-good checkpoint, if there is one. Return the number of completed updates.
        `steps` does this by itself, and restores the data's position and the RNG when it begins.

        `probe` computes the loss of a small batch with the model (``lambda: loss_of(model, batch)``), and leaves no
        trace. If that loss or its gradients are not finite, the next older checkpoint is tried.
        `missing_for_exact_resume` says what a resume lacks.

        NoKnownGoodError if there are checkpoints, but none can be used. StateError if a checkpoint's names do not fit.
        CouldNotTellError if it cannot be read.
        """
        self._leave_replay("training was resumed instead")
        self._saving.drain(self._deadline)
        loaded = self._rollbacks.resume(self._parts, probe)
        self._resumed = True
        if self._ranks.rank == 0:
            announce_resume(self._run, loaded)
        if loaded is not None:
            self._saving.went_to(loaded.step)
            self._monitor.restart(loaded.step)
            self._progress.arrive(loaded.step, loaded.extra)
            self._monitor.resumed = replace(self._progress.resumed, id=str(loaded.id), path=loaded.path)
            for why in self._progress.gaps:
                _log.warning("the resumed training may differ from the interrupted one: %s", why)
        return self.step

    @property
    def missing_for_exact_resume(self) -> tuple[str, ...]:
        """Why training goes on differently than without the interruption, after the last load; empty: it does not."""
        return self._progress.missing

    def rollback(self, reason: str = "asked by the caller") -> int | None:
        """Go back to the newest known-good checkpoint and replay from there: inside `steps` before the next batch
        (returns None), elsewhere at once (returns the step). Raises what `steps` raises when it goes back; of the
        policy's budget it takes nothing."""
        from ckptguard.training.rollback.rollbacks import take_back

        now = self._progress.current
        onset = now + (self._progress.now is None)
        asked = Diagnosis(step=now, cause="asked", onset_step=onset, reason=reason)
        if self._loop.runs:
            self._monitor.sick = self._monitor.sick or asked
            return None
        self._saving.drain(self._deadline)
        take_back(self._loop, asked)
        return self.step

    def close(self) -> None:
        """End the daemon that this guard started, after it had the chance to verify the last save. Idempotent. A save
        in flight gets a minute, then it is abandoned. Raises what went wrong with a `save(blocking=False)`, once."""
        self.__exit__(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._saving.close(_EXIT_SECONDS)
        self._rollbacks.settle(now=True)
        self._leave_replay("training ended before")
        self._monitor.close()
        self._curve.close()
        self._only.end()
        self._progress.position = None
        child, self._child = self._child, None
        if child is not None:
            if self._saving.last is not None:
                self._rollbacks.let_daemon_verify()
            child.stop()
        if kind is None:
            self._saving.raise_unheard()

    def _end_replay(self, again: Diagnosis | None) -> Replay | None:
        """End the replay under way, if there is one. Returns what it shows. All ranks call this."""
        replaying, self._replaying = self._replaying, None
        if replaying is None:
            return None
        self._monitor.flush()
        made, gaps = self._monitor.recent.after(replaying.began), self._progress.missing
        return replaying.ended(made, again, ranks=self._ranks, gaps=gaps, model=self._parts.model)

    def _leave_replay(self, why: str) -> None:
        replaying, self._replaying = self._replaying, None
        if replaying is not None:
            self._rollbacks.conclude(replaying.left(self.step, why))

    def _refuse_sick(self, what: str) -> None:
        sick = agree(self._ranks, self._monitor.sick)
        if sick is not None:
            raise SickTrainingError(f"{what}: {sick.reason}", known_good=None)

    def _save_automatically(self, step: int, *, final: bool = False) -> None:
        if self._how.when_busy == "skip" and not final and self._saving.busy:
            _log.warning("step %s is not saved: the save before it is still being written", step)
            return
        full_every = 1 if final else self._how.optimizer_every
        try:
            self._saving.begin(step, self._extra(step), blocking=self._how.blocking, full_every=full_every)
            self._curve.saved()
        except Exception as error:  # a failed save must not end training; the next one may succeed
            self._tell_failed_save(step, error)
            self._ranks.any(False)  # but a rank that is gone ends it, here and not a batch later

    def _extra(self, step: int) -> dict[str, Any]:
        """What is saved beside model and optimizer; where one rank has none, none saves, and none waits for it."""
        return each(self._ranks, f"saving step {step}", self._progress.extra)

    def _tell_failed_save(self, step: int, error: Exception) -> None:
        trace = None if isinstance(error, CkptguardError) else error  # of ours the message says it all
        _log.error("step %s could not be saved: %s", step, error, exc_info=trace)
        cause = "weights" if isinstance(error, SickTrainingError) else "storage"
        reason = f"the checkpoint could not be saved: {error}"
        self._rollbacks.tell(step, cause, reason, {"error": type(error).__name__})


class _Loop:
    """One `steps` of a guard, as a `Training` that can go back."""

    def __init__(self, guard: TrainingGuard, total: int, save_every: int) -> None:
        self._guard, self._total, self.save_every = guard, total, save_every
        self.runs = False
        self._unsaved_since: int | None = -1  # the last save before the one that was reported
        # Where training went back to last, with which cut of the rates and which lowest loss scale.
        self._arrived: tuple[int, RateCut | None, float | None] = (-1, None, None)

    def steps(self) -> Iterator[tuple[int, Any]]:
        """See `TrainingGuard.steps`."""
        from ckptguard.training.rollback.rollbacks import train

        guard = self._guard
        guard._progress.leave()  # a loop that was left and is still held, as a notebook's last traceback does
        guard._loop, self.runs = self, True
        try:
            guard._only.begin(loops=True)
            self._begin()
            yield from train(self)
            self._end()
        finally:
            if guard._loop is self:
                guard._progress.leave()
                self.runs = False
                guard._only.end()
                guard._curve.finish()

    def stretch(self) -> Generator[tuple[int, Any], None, Diagnosis | None]:
        """Make updates, and save, until all are made or training is sick."""
        guard, progress, monitor, saving = self._guard, self._guard._progress, self._guard._monitor, self._guard._saving
        due = False
        while True:
            sick = agree(guard._ranks, monitor.sick)
            if sick is not None:
                saving.drain(guard._deadline)
                return sick
            if guard._replaying is not None and guard.step >= guard._replaying.first.step:
                self._tell_healthy_replay()
            if due:
                guard._save_automatically(guard.step, final=guard.step >= self._total)
                self._tell_if_unsaved()
            if guard.step >= self._total:
                return None
            batch = progress.next_batch()
            yield progress.current, batch
            if guard._loop is not self:
                raise SettingsError("another steps() of this guard has begun: this one cannot go on")
            step = progress.made()
            progress.end_cut(guard._policy, step)
            guard._rollbacks.settle()
            due = (step % self.save_every == 0 or step == self._total) and saving.last != step
            if due or step - self._begun >= _UNOBSERVED:
                monitor.say_if_unheard(step - self._begun, _OBSERVE)
            if monitor.sick is None:
                looks = guard._replaying is not None and guard._replaying.looks(step)
                monitor.after_step(step, must_know=due or looks or saving.found_sick)
                saving.found_sick = False

    def go_back(self, sick: Diagnosis) -> Rollback:
        """Load the checkpoint that the policy asks for."""
        from ckptguard.training.rollback.replaying import Replaying, may_replay  # loaded only when needed

        guard, recent = self._guard, self._guard._monitor.recent
        guard._monitor.flush()
        shown = guard._end_replay(sick)
        went = guard._rollbacks.go_back(
            sick,
            save_every=self.save_every,
            details_of=guard._monitor.details_of,
            replays=may_replay(guard._policy, guard._progress.missing, guard._ranks),
            shown=shown,
        )
        if went.decision.replay:
            began, draws = went.loaded.step, guard._progress.draws(sick.onset_step or went.onset, went.last)
            guard._replaying = Replaying(sick, recent.after(began), draws, began=began)
        return went

    def leave_out(self, first: int, last: int) -> None:
        """Skip the batches of these updates."""
        self._guard._progress.skip(self._guard._progress.draws(first, last).values())
        self._guard._curve.skip(first, last)

    def arrive(self, went: Rollback) -> None:
        """Take over what was loaded beside model and optimizer. If that turns out not to be exact, nothing is replayed
        unless the policy asks for it."""
        guard, loaded, progress = self._guard, went.loaded, self._guard._progress
        guard._saving.went_to(loaded.step)
        guard._monitor.restart(loaded.step)
        harmful = progress.draws(went.onset, went.last)
        cut, lowest_scale = progress.cut.after(went.decision, last=went.last), went.decision.reset_scale
        if not went.decision.replay:
            self._arrived = loaded.step, cut, lowest_scale
        elif self._arrived[0] != loaded.step:
            self._arrived = loaded.step, None, None  # as it was saved
        _, now, lowest = self._arrived
        progress.arrive(loaded.step, loaded.extra, cut=now, lowest_scale=lowest)
        if went.decision.replay and guard._policy.first is None and guard._ranks.any(bool(progress.missing)):
            shown = guard._end_replay(None)
            assert shown is not None
            guard._rollbacks.conclude(shown, f"skipping the batches of updates {went.onset} to {went.last}")
            progress.skip(harmful.values())
            guard._curve.skip(went.onset, went.last)
            progress.change_cut(cut, lowest_scale=lowest_scale)

    def _tell_healthy_replay(self) -> None:
        shown = self._guard._end_replay(None)
        if shown is not None:
            self._guard._rollbacks.conclude(shown)

    def _begin(self) -> None:
        """Resume. In a new run there must be a good checkpoint to go back to from the first update on."""
        guard = self._guard
        if not guard._resumed:
            guard.resume()
        guard._progress.begin()
        guard._monitor.begin()
        self._begun = guard.step
        if guard.step > self._total:
            _log.warning("training is at step %s already: nothing is left of a total of %s", guard.step, self._total)
        if guard._saving.last is None:
            guard._monitor.look(guard.step)
            guard._refuse_sick("training cannot begin")
            guard._save_automatically(guard.step)
            guard._saving.drain()

    def _end(self) -> None:
        """All updates are made: the last save is what people ship, so it gets its verdict now."""
        guard, saving = self._guard, self._guard._saving
        several = guard._ranks.size > 1
        if several:
            saving.drain()  # a caller may now end the process group, over which ranks agree
        if saving.last is not None and saving.wait(_EXIT_SECONDS):
            guard._rollbacks.judge_last_save(seconds=guard._deadline if several else None)
        elif saving.last is not None:
            _log.warning("the last save is still being written; this judges it: ckptguard verify %s", guard.run)

    def _tell_if_unsaved(self) -> None:
        guard = self._guard
        last = guard._saving.last
        reason = overdue(guard.step, last, save_every=self.save_every, most=guard._policy.unsaved)
        if reason is not None and self._unsaved_since != last:
            self._unsaved_since = last
            _log.error("step %s: %s", guard.step, reason)
            guard._rollbacks.tell(guard.step, "unsaved", reason, {"last_saved": last})


def _store_for(run: Run, settings: Settings, parts: TrainingParts, ranks: Ranks, files: UserFiles | None) -> Store:
    """The user's own files where there is a `save` and a `load`, else our own layout: sharded for several ranks, for a
    sharded model, and where the newest save is, because names of tensors must not change within a run."""
    from ckptguard.training.saving.stores import OwnStore, UserStore, was_sharded

    if files is not None:
        return UserStore(run, files, settings, ranks)
    if ranks.size > 1 or any(hasattr(one, "full_tensor") for one in parts.parameters()) or was_sharded(run):
        from ckptguard.training.sharded.sharded_store import ShardedStore

        return ShardedStore(run, parts, ranks, settings)
    return OwnStore(run, parts, settings)

"""TrainingGuard: the training side in one object."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from ckptguard.config import Settings
from ckptguard.errors import CkptguardError, NoKnownGoodError, RollbackExhausted, SettingsError, SickTrainingError
from ckptguard.names import MAX_STEP
from ckptguard.operations.load_settings import load_settings
from ckptguard.records.run import open_run
from ckptguard.storage import normalise_url
from ckptguard.training.child_daemon import ChildDaemon, ensure_daemon
from ckptguard.training.client import ask_known_good
from ckptguard.training.data_position import DataPosition, Draw
from ckptguard.training.going_back import Loaded, go_back, load_newest_good, newest_good_step
from ckptguard.training.health import Diagnosis, Health, Limits, Signal
from ckptguard.training.incident_log import begin_incident, end_incident
from ckptguard.training.parts import Parts, scale_learning_rate
from ckptguard.training.policy import Decision, PastRollback, RollbackPolicy, decide
from ckptguard.training.rng import capture_rng, restore_rng
from ckptguard.training.stores import OwnStore, Store, UserStore
from ckptguard.training.weights import first_non_finite, first_non_finite_state

_log = logging.getLogger("ckptguard")
_REMEMBERED_DRAWS = 10_000


class TrainingGuard:
    """Saves training, notices when it turns sick, and takes it back to the last known-good checkpoint.

    ::

        guard = ckptguard.TrainingGuard("runs/exp1", model=model, optimizer=optimizer)
        for step, batch in guard.steps(loader, total=10_000, save_every=500):
            loss, norm = train_step(batch)
            guard.observe(loss=loss, grad_norm=norm)

    `steps` resumes at known-good, saves, and after an incident rewinds model, data and step between two iterations.
    With `save=f(path, step)` and `load=f(path)` the user's own files are used, named by `name`. `daemon="auto"`
    starts a daemon for the run where none answers; with "off" or None checkpoints are verified when they are needed.
    Weights, buffers and optimizer state are read every `check_every` steps and before every save: a poisoned state
    is never saved.
    `deadline` is how many seconds the daemon may take to verify what is pending before this process does it.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        save: Callable[[str, int], object] | None = None,
        load: Callable[[str], object] | None = None,
        name: str = "step-{step}.pt",
        daemon: str | None = "auto",
        policy: RollbackPolicy | None = None,
        settings: Settings | None = None,
        check_every: int = 50,
        deadline: float = 30.0,
    ) -> None:
        if (save is None) != (load is None):
            raise SettingsError("save= and load= go together: what one writes the other reads")
        if daemon not in ("auto", "off", None):
            raise SettingsError(f'daemon must be "auto" or "off", not {daemon!r}')
        if check_every < 1:
            raise SettingsError("check_every must be at least 1")
        _refuse_ranks()
        self._settings = settings if settings is not None else load_settings(None, os.environ)
        url = normalise_url(run)
        if "://" not in url:
            os.makedirs(url, exist_ok=True)
        self._run = open_run(url, records=self._settings.records, patterns=self._settings.patterns)
        self._parts = Parts(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        self._store: Store
        if save is not None and load is not None:
            self._store = UserStore(self._run, save, load, name)
        else:
            self._store = OwnStore(self._run, self._parts)
        self._policy = policy if policy is not None else RollbackPolicy()
        self._limits = Limits(nan_losses=self._policy.nan_losses, scale_skips=self._policy.scale_skips)
        self._check_every = check_every
        self._deadline = deadline
        self._step = 0
        self._now: int | None = None  # the update that the caller is making
        self._observed: int | None = None
        self._looping = False
        self._resumed = False
        self._last_saved: int | None = None
        self._last_look = 0
        self._save_every = 1
        self._lr_factor = 1.0
        self._health = Health()
        self._sick: Diagnosis | None = None
        self._past: list[PastRollback] = []
        self._position: DataPosition | None = None
        self._waiting: dict[str, Any] | None = None  # loaded before the loader was known
        self._draws: dict[int, Draw] = {}
        self._asks = daemon == "auto"
        self._child: ChildDaemon | None = ensure_daemon(self._run, self._settings) if self._asks else None

    @property
    def step(self) -> int:
        """Updates completed."""
        return self._step

    @property
    def run(self) -> str:
        """The run's normalised URL or absolute path."""
        return self._run.url

    def steps(self, loader: Any, total: int, save_every: int) -> Iterator[tuple[int, Any]]:
        """Yield (number of the update to make, batch) until `total` updates are done, epoch after epoch.

        Resumes at the newest known-good checkpoint, saves after every `save_every` updates and at the end, and goes
        back between two iterations when the state is sick. Batches that did harm are left out from then on. After a
        `break` an update counts as made if it was observed.
        RollbackExhausted when the policy's budget is spent, NoKnownGoodError when there is nothing to go back to.
        """
        if save_every < 1 or total < 0:
            raise SettingsError("save_every must be at least 1 and total not negative")
        if self._position is None or self._position.loader is not loader:
            self._position = DataPosition(loader)
        self._save_every = save_every
        return self._loop(self._position, total)

    def observe(self, loss: Any = None, grad_norm: Any = None) -> Diagnosis:
        """Take in the signals of the update just made: floats or tensors.

        Never raises because of sickness and never rolls back: `steps` does, before the next batch.
        """
        self._observed = self._now
        signal = Signal(
            step=self._now if self._now is not None else self._step,
            loss=_number(loss),
            grad_norm=_number(grad_norm),
            scale=self._loss_scale(),
        )
        if self._health.wants_look(signal):
            signal = dataclasses.replace(signal, looked=True, bad_tensor=self._bad_tensor())
        return self._take_in(signal)

    def save(self, step: int | None = None) -> str:
        """Save now; returns the checkpoint's path. Inside of `steps`, call it after the update: the checkpoint is
        named by the update that is being made. SickTrainingError instead of saving a poisoned state; whatever
        else goes wrong (StorageFullError) is raised too. Outside of `steps` say which `step` this is."""
        if step is None:
            if self._position is None:
                raise SettingsError("outside of steps(), save(step=...) must say how many updates are done")
            step = self._now if self._now is not None else self._step
        if not 0 <= step <= MAX_STEP:
            raise SettingsError(f"a step is a number from 0 to {MAX_STEP}, not {step}")
        if self._look(step).sick:
            assert self._sick is not None
            raise SickTrainingError(f"not saved: {self._sick.reason}", known_good=None)
        path = self._write(step)
        if not self._looping:
            self._step = step
        return self._run.usable(path)

    def resume(self) -> int:
        """Load the newest known-good checkpoint, verified, if there is one; returns the updates completed.

        `steps` does this by itself. The data's position and the RNG are put back when `steps` begins.
        """
        loaded = load_newest_good(self._run, self._settings, self._store)
        self._resumed = True
        if loaded is not None:
            _log.info("resumed at step %s from %s", loaded.step, loaded.path)
            self._arrive(loaded)
        return self._step

    def rollback(self, reason: str = "asked by the caller") -> int | None:
        """Go back to the newest known-good checkpoint and replay from there.

        Inside `steps` it happens before the next batch (returns None); elsewhere at once (returns the step).
        """
        now = self._now if self._now is not None else self._step
        asked = Diagnosis(step=now, cause="asked", onset_step=now + (self._now is None), reason=reason)
        if self._looping:
            self._sick = self._sick or asked
            return None
        self._go_back(asked)
        return self._step

    def close(self) -> None:
        """End the daemon that this guard started, after it had the chance to verify the last save. Idempotent."""
        child, self._child = self._child, None
        self._position = None
        if child is not None:
            if self._last_saved is not None:
                ask_known_good(self._run, before_step=None, series=self._store.series, wait_seconds=self._deadline)
            child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _loop(self, position: DataPosition, total: int) -> Iterator[tuple[int, Any]]:
        self._looping = True
        try:
            if not self._resumed:
                self.resume()
            if self._waiting is not None:
                self._put_back(position, self._waiting)
            if self._last_saved is None:
                self._begin()
            while True:
                if self._sick is not None:
                    self._go_back(self._sick)
                if self._step >= total:
                    break
                batch, draw = position.draw()
                self._now = self._step + 1
                self._draws[self._now] = draw
                if len(self._draws) > _REMEMBERED_DRAWS:
                    del self._draws[min(self._draws)]
                yield self._now, batch
                self._step, self._now = self._now, None
                if self._sick is None:
                    self._after_step(self._step, due=self._step % self._save_every == 0 or self._step == total)
        finally:
            if self._now is not None and self._observed == self._now:
                self._step = self._now  # left by break after an update that was observed
            self._looping, self._now = False, None

    def _begin(self) -> None:
        """A new run: there must be a good checkpoint to go back to from the first update on."""
        if self._look(self._step).sick:
            assert self._sick is not None
            raise SickTrainingError(f"training cannot begin: {self._sick.reason}", known_good=None)
        self._save_automatically(self._step)

    def _after_step(self, step: int, *, due: bool) -> None:
        if (due or step - self._last_look >= self._check_every) and self._look(step).sick:
            return
        if due and self._last_saved != step:
            self._save_automatically(step)

    def _save_automatically(self, step: int) -> None:
        try:
            self._write(step)
        except Exception as error:  # a failed save must not end training; the next one may succeed
            _log.exception("step %s could not be saved: %s", step, error)
            reason = f"the checkpoint could not be saved: {error}"
            incident = begin_incident(
                self._run, step=step, cause="storage", reason=reason, evidence={"error": type(error).__name__}
            )
            end_incident(self._run, incident, action="training goes on without this checkpoint")

    def _write(self, step: int) -> str:
        extra = {
            "rng": capture_rng(),
            "data": self._position.state() if self._position is not None else None,
            "guard": {"lr_factor": self._lr_factor},
        }
        path = self._store.write(step, extra)
        self._last_saved = step
        return path

    def _go_back(self, diagnosis: Diagnosis) -> None:
        onset = diagnosis.onset_step if diagnosis.onset_step is not None else diagnosis.step
        cause = diagnosis.cause or "asked"
        _log.warning("step %s: %s", diagnosis.step, diagnosis.reason)
        incident = begin_incident(
            self._run, step=diagnosis.step, cause=cause, reason=diagnosis.reason, evidence=diagnosis.evidence
        )
        decision = decide(self._policy, self._past, cause=cause, onset_step=onset, save_every=self._save_every)
        if decision.give_up:
            report = end_incident(self._run, incident, action=f"gave up: {decision.reason}")
            raise RollbackExhausted(
                f"training is sick again ({diagnosis.reason}) and {decision.reason}",
                report=report,
                hint=f"ckptguard status {self._run.url}",
            )
        if self._asks:
            # Its answer is worth having for what it verifies meanwhile; what counts is in the records.
            ask_known_good(self._run, before_step=onset, series=self._store.series, wait_seconds=self._deadline)
        try:
            loaded = self._find_and_load(decision, diagnosis.reason)
        except CkptguardError as error:
            end_incident(self._run, incident, action=f"could not go back: {error.message}")
            raise
        if decision.skip and self._position is not None:
            harmful = (self._draws.get(step) for step in range(onset, diagnosis.step + 1))
            self._position.skipped |= {draw for draw in harmful if draw is not None}
        self._lr_factor *= decision.lr_factor
        if cause != "asked":  # what the caller asks for is no sign of sickness
            self._past.append(PastRollback(onset_step=onset, target_step=loaded.step))
        self._arrive(loaded, going_back=True)
        action = f"went back from step {diagnosis.step} to step {loaded.step}; {decision.reason}"
        _log.warning("%s", action)
        end_incident(self._run, incident, action=action, known_good=loaded.id)

    def _find_and_load(self, decision: Decision, reason: str) -> Loaded:
        if decision.further:
            newest = newest_good_step(self._run, self._settings, self._store, before_step=decision.before_step)
            try:
                if newest is not None:
                    return go_back(self._run, self._settings, self._store, before_step=newest, reason=reason)
            except NoKnownGoodError:
                pass  # there is none further back: the newest one it is
        return go_back(self._run, self._settings, self._store, before_step=decision.before_step, reason=reason)

    def _arrive(self, loaded: Loaded, *, going_back: bool = False) -> None:
        """Take over what was loaded: rates, data, health, and the RNG last."""
        self._step = self._last_saved = self._last_look = loaded.step
        self._health = Health(healthy_through=loaded.step)
        self._sick = None
        saved_factor = loaded.extra.get("guard", {}).get("lr_factor", 1.0)
        if not going_back:
            self._lr_factor = saved_factor
        scale_learning_rate(self._parts.optimizer, self._parts.scheduler, self._lr_factor / saved_factor)
        self._draws = {step: draw for step, draw in self._draws.items() if step <= loaded.step}
        if self._position is None:
            self._waiting = loaded.extra
        else:
            self._put_back(self._position, loaded.extra)

    def _put_back(self, position: DataPosition, extra: dict[str, Any]) -> None:
        self._waiting = None
        if extra.get("data") is not None:
            position.restore(extra["data"])
        else:
            position.restart_epoch(position.epoch)
        if "rng" in extra:
            restore_rng(extra["rng"])

    def _look(self, step: int) -> Diagnosis:
        self._last_look = step
        return self._take_in(Signal(step=step, looked=True, bad_tensor=self._bad_tensor()))

    def _take_in(self, signal: Signal) -> Diagnosis:
        self._health, diagnosis = self._health.after(signal, self._limits)
        if diagnosis.sick and self._sick is None:
            self._sick = diagnosis
        return diagnosis

    def _bad_tensor(self) -> str | None:
        allowed = self._settings.allow_nonfinite
        return first_non_finite(self._parts.model, allowed) or first_non_finite_state(self._parts.optimizer, allowed)

    def _loss_scale(self) -> float | None:
        scaler = self._parts.scaler
        if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
            return None
        return float(scaler.get_scale())


def _number(value: Any) -> float | None:
    """A float of what the caller gives; one that lies on a device is fetched."""
    if value is None:
        return None
    return float(value.detach() if hasattr(value, "detach") else value)


def _refuse_ranks() -> None:
    import torch

    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise SettingsError(
            "TrainingGuard guards a training of one process so far; ranks would go back to different steps",
            hint="let one ckptguard-daemon guard the run, and use ckptguard rollback",
        )

"""Going back: one loop for each kind of training. Each time it has an incident, a decision, and a verified checkpoint.

Rank 0 decides and finds the checkpoint. The other ranks load what it loads, and get its result.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import msgspec

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.replay import CANNOT_TELL, EXACT
from ckptguard.decisions.restarts import GAVE_UP
from ckptguard.decisions.rollback_policy import RollbackDecision, RollbackPolicy, choose_target, decide
from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, RollbackExhausted
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.run import Run
from ckptguard.runs.find_known_good import Wanted
from ckptguard.runs.run_view import RunView
from ckptguard.training.client import let_daemon_verify
from ckptguard.training.ranks import Ranks
from ckptguard.training.rollback.incident_log import begin_incident, end_incident, note_replay
from ckptguard.training.saving.stores import LedStore, Loaded, LoadingStore
from ckptguard.values.ids import CheckpointId, single_number
from ckptguard.values.incident import Details, Replay
from ckptguard.values.own_log import log as _log
from ckptguard.values.plain_numbers import made_again
from ckptguard.values.settings import Settings

if TYPE_CHECKING:
    from ckptguard.training.content.training_parts import TrainingParts
    from ckptguard.training.rollback.load_known_good import Probe

Done = TypeVar("Done")
Update = TypeVar("Update", covariant=True)
_MOST_READ = 32  # incidents, for what earlier replays showed
_MOST_PAUSE = 64  # calls between two attempts to record an unrecorded rollback


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """What was loaded, and why. The updates from `onset` to `last` may have done the harm."""

    loaded: Loaded
    decision: RollbackDecision
    onset: int
    last: int


class GuardedTraining(Protocol[Update]):
    """What a framework gives, so that its training can go back."""

    def stretch(self) -> Generator[Update, None, Diagnosis | None]:
        """Train until the end, or until training is sick: then return why."""

    def go_back(self, sick: Diagnosis) -> Rollback:
        """Choose a checkpoint from before the sickness, by `Rollbacks.go_back`."""

    def leave_out(self, first: int, last: int) -> None:
        """Make none of these updates from now on."""

    def arrive(self, went: Rollback) -> None:
        """Have the next stretch begin at the chosen checkpoint, with the learning rate and loss scale as decided."""


def train(training: GuardedTraining[Update]) -> Generator[Update, None, None]:
    """Train to the end. Go back each time that training turns sick. Yields what the stretches yield."""
    while (sick := (yield from training.stretch())) is not None:
        take_back(training, sick)


def take_back(training: GuardedTraining[Any], sick: Diagnosis) -> None:
    """Take training to a checkpoint from before the sickness. Raises what `Rollbacks.go_back` raises."""
    went = training.go_back(sick)
    if went.decision.skip:
        training.leave_out(went.onset, went.last)
    training.arrive(went)


class Rollbacks:
    """Finds the checkpoint for each rollback, and remembers past ones.

    It gives the daemon `daemon` seconds to verify what is pending (None: it is not asked), and a replica `replica`
    seconds, while other ranks wait (None: unlimited). All ranks call the methods that load something, in the same
    order.
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        store: LoadingStore,
        policy: RollbackPolicy,
        *,
        ranks: Ranks,
        daemon: float | None,
        replica: float | None = None,
    ) -> None:
        self._run, self._settings, self._store, self._policy = run, settings, store, policy
        self._ranks, self._daemon, self._replica = ranks, daemon, replica
        self._past: list[int] = []  # the onsets
        self._replayed: Incident | None = None  # about which the same updates are made again
        self._since: tuple[int, float] | None = None  # the step and the time at which this process began to train on
        self._unrecorded = Unrecorded()
        self.settle = self._unrecorded.settle

    def resume(self, parts: TrainingParts, probe: Probe | None) -> Loaded | None:
        """Load the newest known-good checkpoint with which the probe is finite on every rank. None if there is none.

        A refused checkpoint is sick, because an older one passed: it is quarantined. If the probe refuses all, it may
        be at fault itself: nothing is moved, and NoKnownGoodError is raised.
        """
        from ckptguard.training.rollback import load_known_good as known_good  # loaded only when needed

        view = self._view()
        refused: dict[CheckpointId, tuple[Loaded, str]] = {}
        while True:
            try:
                newest = functools.partial(known_good.newest, view, self._store, refused, thinned=not parts.strict)
                loaded = self._lead_or_follow(newest, Loaded | None)
            except NoKnownGoodError as error:
                if not refused:
                    raise
                reasons = "; ".join(f"{found.path}: {why}" for found, why in refused.values())
                raise NoKnownGoodError(
                    f"no checkpoint of {self._run.url} passes the probe ({reasons})",
                    hint="if this seems wrong, check the probe's own batch and precision",
                ) from error
            why = known_good.refused_by(probe, parts.model, self._ranks) if loaded and probe is not None else None
            if loaded is None or why is None:
                break
            _log.warning("%s is not used for the resume: %s", loaded.path, why)
            refused[loaded.id] = (loaded, why)
        if self._ranks.rank == 0:
            for found, why in refused.values():
                known_good.put_aside(view, found, why)
        self.begins_at(loaded.step if loaded is not None else 0)
        return loaded

    def begins_at(self, step: int) -> None:
        """Training goes on from this step, now: so it is known how long its updates take."""
        self._since = step, time.monotonic()

    def let_daemon_verify(self, *, before_step: int | None = None) -> None:
        """Give the daemon its time to verify the last save, or what is before a step. Only the records count."""
        series, seconds = self._store.series, self._daemon
        if seconds is not None:
            let_daemon_verify(self._run, before_step=before_step, series=series, wait_seconds=seconds)

    def judge_last_save(self, *, seconds: float | None = None) -> None:
        """Verify the newest save, by the daemon or here; see `last_save.judge_last_save`. Rank 0 does it."""
        if self._ranks.rank == 0:
            from ckptguard.training.rollback.last_save import judge_last_save  # loaded only when needed

            judge_last_save(self._view(), self._store, daemon=self._daemon, seconds=seconds)

    def tell(self, step: int, cause: str, reason: str, evidence: dict[str, object]) -> None:
        """Record an incident that does not stop training."""
        if self._ranks.rank == 0:
            incident = begin_incident(self._run, step=step, cause=cause, reason=reason, evidence=evidence)
            end_incident(self._run, incident, action="training continues without this checkpoint")

    def go_back(
        self,
        diagnosis: Diagnosis,
        *,
        save_every: int,
        details_of: Callable[[Diagnosis], Details],
        replays: bool | None = False,
        shown: Replay | None = None,
    ) -> Rollback:
        """Load the checkpoint that the policy asks for. `details_of` gives the incident's details, and must not raise.

        `replays`: whether training can make the same updates again before anything is skipped. None: if an earlier
        replay of the run was equal. `shown`: what a replay showed that ends with this sickness, which is still the same
        incident.

        Raises:
            RollbackExhausted: the budget is spent.
            NoKnownGoodError: there is nothing to go back to.
        """
        if shown is not None and diagnosis.cause == "asked":
            self.conclude(shown)
            shown = None
        return self._lead_or_follow(lambda: self._go_back(diagnosis, save_every, details_of, replays, shown), Rollback)

    def conclude(self, shown: Replay, more: str = "") -> None:
        """A replay is over: close its incident with what it showed."""
        if self._ranks.rank == 0:
            incident, self._replayed = self._replayed, None
            said = "; ".join(filter(None, (shown.in_words, more)))
            report = end_incident(self._run, incident and _with_replay(incident, shown), action=said)
            _log.warning("%s", f"{said}; the report: {report}" if report is not None else said)

    def _lead_or_follow(self, work: Callable[[], Done], kind: Any) -> Done:
        """Rank 0 does the work, which loads through the store. Every rank returns its result, with its own extra.

        `kind` is the result's type.
        """
        if self._ranks.size == 1:
            return work()
        led, done = cast("LedStore", self._store).led, None

        def lead() -> Any:
            nonlocal done
            done = work()
            return msgspec.to_builtins(_with_extra(done, {}))  # other ranks have their own

        answer = led.lead(lead)
        followed: Done = done if done is not None else _with_extra(msgspec.convert(answer, kind), led.own)
        return followed

    def _go_back(
        self,
        diagnosis: Diagnosis,
        save_every: int,
        details_of: Callable[[Diagnosis], Details],
        replays: bool | None,
        shown: Replay | None,
    ) -> Rollback:
        self.settle(now=True)
        step, reason, cause = diagnosis.step, diagnosis.reason, diagnosis.cause or "asked"
        since = diagnosis.onset_step if diagnosis.onset_step is not None else step
        last = diagnosis.suspect_through if diagnosis.suspect_through is not None else step
        _log.warning("step %s: %s", step, reason)
        span = {"onset_step": diagnosis.surely_by, "possibly_since": since, "last": last}
        past = self._past if shown is None else self._past[:-1]
        can_replay = shown is None and (self._was_equal() if replays is None else replays)
        decision = decide(self._policy, past, cause=cause, save_every=save_every, replays=can_replay, **span)
        details = msgspec.structs.replace(details_of(diagnosis), onset=since, onset_through=diagnosis.onset_through)
        if shown is not None:
            tensor = details.tensors[0].name if details.tensors else None
            shown = msgspec.structs.replace(shown, tensor=tensor)
            details = msgspec.structs.replace(details, replay=shown)
        begin = functools.partial(
            begin_incident,
            self._run,
            step=step,
            cause=cause,
            reason=reason,
            evidence=diagnosis.evidence,
            details=details,
        )
        replayed, self._replayed = self._replayed, None
        incident = begin() if replayed is None or shown is None else _with_replay(replayed, shown)
        if decision.give_up:
            report = end_incident(self._run, incident, action=f"{GAVE_UP}: {decision.reason}")
            raise RollbackExhausted(
                f"training is sick again ({reason}) and {decision.reason}",
                report=report,
                hint=f"ckptguard status {shlex.quote(self._run.url)}",
            )
        try:
            self.let_daemon_verify(before_step=decision.onset_step)
            loaded = self._find_or_read(decision, reason)
        except CkptguardError as error:
            end_incident(self._run, incident, action=f"could not roll back: {error.message}")
            raise
        if cause != "asked":  # a rollback that the caller asks for is no sign of sickness
            self._past = [*past, diagnosis.surely_by]
        action = f"went back from step {step} to step {loaded.step}; {decision.reason}"
        if shown is not None:
            action = f"{shown.in_words}; {action}"
        end = functools.partial(end_incident, self._run, action=action, known_good=loaded.id)
        report = None
        if not decision.replay:
            report = end(incident)
        elif incident is not None:
            self._replayed = note_replay(self._run, incident, action=action, known_good=loaded.id)
        _log.warning("%s", self._in_one_line(step, loaded, decision, report))
        self.begins_at(loaded.step)
        if incident is None:

            def record() -> None:
                noted = begin()
                if noted is None:
                    raise OSError("the incident cannot be recorded")
                end(noted)

            self._unrecorded.note(record)
        return Rollback(loaded=loaded, decision=decision, onset=decision.onset_step, last=last)

    def _was_equal(self) -> bool:
        """True if the newest replay of the run that showed something was equal bit for bit up to the onset."""
        try:
            found = [i.known_details().replay for i in list_incidents(self._run, most=_MOST_READ)]
        except CkptguardError as error:
            _log.debug("earlier replays could not be read: %s", error)
            return False
        outcomes = [replay.outcome for replay in found if replay is not None and replay.outcome != CANNOT_TELL]
        return bool(outcomes) and outcomes[-1] in EXACT

    def _in_one_line(self, step: int, loaded: Loaded, decision: RollbackDecision, report: str | None) -> str:
        """Say from where to where, how much is made again, which copy was used, and where the report is."""
        seconds = None
        if self._since is not None and step > self._since[0]:
            begun, at = self._since
            seconds = (time.monotonic() - at) / (step - begun) * (step - loaded.step)
        elif loaded.saved_at is not None:
            seconds = time.time() - loaded.saved_at
        again = made_again(step - loaded.step, seconds=seconds)
        went = f"went back from step {step} to step {loaded.step}, {loaded.path}"
        found = f"the report: {report}" if report is not None else ""
        said = f"{went}: {again}" if again else went
        return "; ".join(filter(None, (said, loaded.remark, decision.reason, found)))

    def _find_or_read(self, decision: RollbackDecision, reason: str) -> Loaded:
        from ckptguard.training.rollback.load_known_good import go_back, load_unrecorded  # loaded only when needed

        onset = decision.onset_step
        try:
            return self._find_and_load(decision, reason)
        except (NoKnownGoodError, CouldNotTellError) as error:
            if self._settings.replicas and self._fetch(onset):
                with contextlib.suppress(NoKnownGoodError, CouldNotTellError):
                    return go_back(self._view(), self._store, before_step=onset, reason=reason)
            # If nothing can be written, no verdict can be recorded, but files on the storage may be good.
            loaded = load_unrecorded(self._view(), self._store, before_step=onset)
            if loaded is None:
                raise
            unmarked = "the rollback could not be recorded, so newer checkpoints stay in place for now: %s"
            _log.error(unmarked, error.message)
            self._owe_newer(loaded, reason)
            return loaded

    def _owe_newer(self, loaded: Loaded, reason: str) -> None:
        """Note that what is newer than a loaded checkpoint has to be moved aside. An earlier restart could resume from
        one, so the log names them."""
        try:
            own = [c for c in self._view().checkpoints if c.series == self._store.series]
        except CkptguardError as error:
            _log.warning("the checkpoints newer than %s cannot be listed: %s", loaded.path, error.message)
            return
        newer = [c for c in own if (single_number(c.step) or 0) > loaded.step]
        if not newer:
            return
        paths = ", ".join(c.path for c in newer)
        _log.error("until there is space, a restart could resume from these unmarked checkpoints: %s", paths)

        def move_aside(path: str, signature: object) -> None:
            view = self._view()
            checkpoint = view.look_again(path)
            if checkpoint is not None and checkpoint.signature == signature:
                quarantine(view, path, reason=reason)
                _log.warning("%s was moved aside, now that there is space: %s", path, reason)

        self._unrecorded.note(*(functools.partial(move_aside, c.path, c.signature) for c in newer))

    def _fetch(self, onset: int) -> bool:
        """True if a good checkpoint from before the onset came from a replica in time. Other ranks wait for it."""
        from ckptguard.replicas.start_run import regain_before  # only runs with replicas need it

        stop = threading.Event()
        timer = threading.Timer(self._replica or 0.0, stop.set)
        timer.daemon = True
        if self._replica is not None:
            timer.start()
        try:
            back = regain_before(self._view(), Wanted(before_step=onset, series=self._store.series), stop=stop)
        except CkptguardError as error:
            _log.error("no checkpoint could be copied from a replica: %s", error.message)
            return False
        finally:
            timer.cancel()
        if back is not None:
            _log.warning("%s has no good checkpoint left; %s was copied from %s", self._run.url, back.path, back.source)
        return back is not None

    def _find_and_load(self, decision: RollbackDecision, reason: str) -> Loaded:
        from ckptguard.training.rollback.load_known_good import go_back, newest_good_step  # loaded only when needed

        before, onset = decision.before_step, decision.onset_step
        if decision.further or decision.prefer_before < onset:

            def good_before(step: int) -> int | None:
                return newest_good_step(self._view(), self._store, before_step=step)

            target = choose_target(decision, good_before, onset_step=onset)
            try:
                if target is not None:
                    return go_back(self._view(), self._store, before_step=target + 1, reason=reason)
            except NoKnownGoodError:
                before = onset  # nothing that old can be used, so use a newer one
        return go_back(self._view(), self._store, before_step=before, reason=reason)

    def _view(self) -> RunView:
        return RunView(self._run, self._settings)


def _with_replay(incident: Incident, shown: Replay) -> Incident:
    details = msgspec.structs.replace(incident.known_details(), replay=shown)
    return msgspec.structs.replace(incident, details=details)


def _with_extra(done: Any, extra: dict[str, Any]) -> Any:
    if isinstance(done, Rollback):
        return replace(done, loaded=_with_extra(done.loaded, extra))
    return replace(done, extra=extra) if done is not None else None


class Unrecorded:
    """What the rollbacks of one guard could not write, for lack of space. It is written once there is space.

    Nothing here raises. Until then the checkpoints newer than the target stay in place, unmarked. Training replaces
    them when it reaches their steps again.
    """

    def __init__(self) -> None:
        self._debts: list[Callable[[], None]] = []
        self._calls = 0

    def note(self, *debts: Callable[[], None]) -> None:
        """Note calls that failed, in their order."""
        self._debts += debts
        self._calls = 0

    def settle(self, *, now: bool = False) -> None:
        """Try what failed once more. Called after each update.

        After a failure it tries again at the calls 2, 4, 8 and so on, then at every 64th, and always with `now`.
        """
        if not self._debts:
            return
        self._calls += 1
        if not now and self._calls % min(_MOST_PAUSE, 1 << (self._calls.bit_length() - 1)):
            return
        while self._debts:
            try:
                self._debts[0]()
            except (CkptguardError, OSError) as error:
                _log.debug("a rollback is still not recorded: %s", error)
                return
            del self._debts[0]

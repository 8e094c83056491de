"""The rollbacks of one guard: each has an incident, a decision, and a verified checkpoint that is loaded."""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.restarts import GAVE_UP
from ckptguard.decisions.rollback import PastRollback, RollbackDecision, RollbackPolicy, choose_target, decide
from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, RollbackExhausted
from ckptguard.records.run import Run
from ckptguard.runs.find_known_good import Wanted
from ckptguard.runs.run_view import RunView
from ckptguard.training.client import let_daemon_verify
from ckptguard.training.ranks import Ranks
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.rollback.lead_and_follow import Loaded, Rollback, lead_or_follow
from ckptguard.values.ids import CheckpointId, single_number
from ckptguard.values.incident import Details
from ckptguard.values.settings import Settings

if TYPE_CHECKING:
    from ckptguard.training.content.training_parts import TrainingParts
    from ckptguard.training.rollback.load_known_good import Probe
    from ckptguard.training.saving.stores import Store

_MOST_PAUSE = 64  # calls between two attempts to record an unrecorded rollback
_log = logging.getLogger("ckptguard")


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How many seconds a rollback waits. `daemon`: for the daemon to verify what is pending (None: it is not asked).

    `replica`: for a checkpoint from a replica, while other ranks wait (None: unlimited).
    """

    daemon: float | None
    replica: float | None = None


class Rollbacks:
    """Rolls back, and remembers past rollbacks. `evidence(diagnosis)` gives the incident's details, and must not raise.

    All ranks call the methods that load something, in the same order.
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        store: Store,
        policy: RollbackPolicy,
        *,
        waits: Waits,
        ranks: Ranks | None = None,
    ) -> None:
        self._run, self._settings, self._store, self._policy = run, settings, store, policy
        self._waits = waits
        self._ranks = ranks if ranks is not None else Ranks()
        self.evidence: Callable[[Diagnosis], Details] | None = None
        self._past: list[PastRollback] = []
        self._owed = Unrecorded(run, settings, store.series)
        self._unmarked = False  # whether the last rollback left newer checkpoints unmarked

    def settle(self, *, now: bool = False) -> None:
        """Write what could not be written before, if there is space now; see `Unrecorded.settle`."""
        self._owed.settle(now=now)

    def resume(self, parts: TrainingParts, probe: Probe | None) -> Loaded | None:
        """Load the newest known-good checkpoint; see `load_checked`."""
        from ckptguard.training.rollback.load_known_good import load_checked  # loaded only when needed

        return load_checked(RunView(self._run, self._settings), self._store, parts, self._ranks, probe)

    def let_daemon_verify(self, *, before_step: int | None = None) -> None:
        """Give the daemon its time to verify the last save, or what is before a step. Only the records count."""
        series, seconds = self._store.series, self._waits.daemon
        if seconds is not None:
            let_daemon_verify(self._run, before_step=before_step, series=series, wait_seconds=seconds)

    def judge_last_save(self, *, seconds: float | None = None) -> None:
        """Verify the newest save, by the daemon or here; see `last_save.judge_last_save`. Rank 0 does it."""
        if self._ranks.rank == 0:
            from ckptguard.training.rollback.last_save import judge_last_save  # loaded only when needed

            daemon, series = self._waits.daemon, self._store.series
            judge_last_save(self._run, self._settings, series, daemon=daemon, seconds=seconds)

    def tell(self, step: int, cause: str, reason: str, evidence: dict[str, object]) -> None:
        """Record an incident that does not stop training."""
        if self._ranks.rank == 0:
            incident = begin_incident(self._run, step=step, cause=cause, reason=reason, evidence=evidence)
            end_incident(self._run, incident, action="training continues without this checkpoint")

    def go_back(self, diagnosis: Diagnosis, *, save_every: int) -> Rollback:
        """Load the checkpoint that the policy asks for.

        Raises:
            RollbackExhausted: the budget is spent.
            NoKnownGoodError: there is nothing to go back to.
        """
        work = functools.partial(self._go_back, diagnosis, save_every=save_every)
        return lead_or_follow(self._ranks, self._store, work, Rollback)

    def _go_back(self, diagnosis: Diagnosis, *, save_every: int) -> Rollback:
        self.settle(now=True)
        surely_by, step, reason = diagnosis.surely_by, diagnosis.step, diagnosis.reason
        since = diagnosis.onset_step if diagnosis.onset_step is not None else step
        last = diagnosis.suspect_through if diagnosis.suspect_through is not None else step
        cause = diagnosis.cause or "asked"
        _log.warning("step %s: %s", step, reason)
        span = {"onset_step": surely_by, "possibly_since": since, "last": last}
        decision = decide(self._policy, self._past, cause=cause, save_every=save_every, **span)
        onset = decision.onset_step
        details = self.evidence(diagnosis) if self.evidence is not None else Details()
        noticed: dict[str, Any] = {"step": step, "cause": cause, "reason": reason, "evidence": diagnosis.evidence}
        details = msgspec.structs.replace(details, onset=since, onset_through=diagnosis.onset_through)
        incident = begin_incident(self._run, **noticed, details=details)
        if decision.give_up:
            report = end_incident(self._run, incident, action=f"{GAVE_UP}: {decision.reason}")
            raise RollbackExhausted(
                f"training is sick again ({reason}) and {decision.reason}",
                report=report,
                hint=f"ckptguard status {shlex.quote(self._run.url)}",
            )
        self.let_daemon_verify(before_step=onset)
        try:
            loaded = self._find_or_read(decision, onset, reason)
        except CkptguardError as error:
            end_incident(self._run, incident, action=f"could not roll back: {error.message}")
            raise
        if cause != "asked":  # a rollback that the caller asks for is no sign of sickness
            self._past.append(PastRollback(onset_step=surely_by, target_step=loaded.step))
        action = f"went back from step {step} to step {loaded.step}; {decision.reason}"
        _log.warning("%s", action)
        end_incident(self._run, incident, action=action, known_good=loaded.id)
        owed = {**noticed, "details": details} if incident is None else None
        self._owed.note(loaded, reason=reason, incident=owed, action=action, unmarked=self._unmarked)
        return Rollback(loaded=loaded, decision=decision, onset=onset, last=last)

    def _find_or_read(self, decision: RollbackDecision, onset: int, reason: str) -> Loaded:
        # Imported here: only a rollback needs it.
        from ckptguard.training.rollback.load_known_good import go_back, load_unrecorded

        self._unmarked = False
        try:
            return self._find_and_load(decision, onset, reason)
        except (NoKnownGoodError, CouldNotTellError) as error:
            if self._settings.replicas and self._fetch(onset):
                with contextlib.suppress(NoKnownGoodError, CouldNotTellError):
                    return go_back(self._view(), self._store, before_step=onset, reason=reason)
            # If nothing can be written, no verdict can be recorded, but files on the storage may be good.
            loaded = load_unrecorded(self._view(), self._store, before_step=onset)
            if loaded is None:
                raise
            self._unmarked = True
            unmarked = "the rollback could not be recorded, so newer checkpoints stay in place for now: %s"
            _log.error(unmarked, error.message)
            return loaded

    def _fetch(self, onset: int) -> bool:
        """True if a good checkpoint from before the onset came from a replica in time. Other ranks wait for it."""
        from ckptguard.replicas.start_run import regain_before  # only runs with replicas need it

        stop = threading.Event()
        timer = threading.Timer(self._waits.replica or 0.0, stop.set)
        timer.daemon = True
        if self._waits.replica is not None:
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

    def _find_and_load(self, decision: RollbackDecision, onset: int, reason: str) -> Loaded:
        from ckptguard.training.rollback.load_known_good import go_back, newest_good_step

        before = decision.before_step
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


@dataclass
class _Debt:
    """One unrecorded rollback. `newer`: paths and signatures of what it should have moved aside. `incident`: the
    arguments of its incident, or None once that is recorded."""

    reason: str
    newer: list[tuple[str, Any]]
    incident: dict[str, Any] | None
    action: str
    known_good: CheckpointId


class Unrecorded:
    """What the rollbacks of one guard could not write, for lack of space. It is written once there is space.

    Nothing here raises. Until then the checkpoints newer than the target stay in place, unmarked. Training replaces
    them when it reaches their steps again. An earlier restart could resume from one, so the log names them.
    """

    def __init__(self, run: Run, settings: Settings, series: str) -> None:
        self._run, self._settings, self._series = run, settings, series
        self._debts: list[_Debt] = []
        self._calls = 0

    def note(
        self, loaded: Loaded, *, reason: str, incident: dict[str, Any] | None, action: str, unmarked: bool
    ) -> None:
        """Note a rollback to `loaded` that was not recorded. `incident` has the arguments of `begin_incident`, or None
        if only the newer checkpoints are `unmarked`."""
        newer = []
        if unmarked:
            try:
                found = RunView(self._run, self._settings).checkpoints
                own = [c for c in found if c.series == self._series]
                newer = [(c.path, c.signature) for c in own if (single_number(c.step) or 0) > loaded.step]
            except CkptguardError as error:
                _log.warning("the checkpoints newer than %s cannot be listed: %s", loaded.path, error.message)
        if newer:
            paths = ", ".join(path for path, _ in newer)
            _log.error("until there is space, a restart could resume from these unmarked checkpoints: %s", paths)
        if newer or incident is not None:
            self._debts.append(_Debt(reason, newer, incident, action, loaded.id))
            self._calls = 0

    def settle(self, *, now: bool = False) -> None:
        """Try to move aside and record what is missing. Called after each update.

        After a failure it tries again at the calls 2, 4, 8 and so on, then at every 64th, and always with `now`.
        """
        if not self._debts:
            return
        self._calls += 1
        if not now and self._calls % min(_MOST_PAUSE, 1 << (self._calls.bit_length() - 1)):
            return
        while self._debts:
            try:
                self._pay(self._debts[0])
            except (CkptguardError, OSError) as error:
                _log.debug("a rollback is still not recorded: %s", error)
                return
            del self._debts[0]

    def _pay(self, debt: _Debt) -> None:
        from ckptguard.keep.quarantine import quarantine  # loaded only when needed

        view = RunView(self._run, self._settings)
        while debt.newer:
            path, signature = debt.newer[0]
            checkpoint = view.look_again(path)
            if checkpoint is not None and checkpoint.signature == signature:
                quarantine(view, path, reason=debt.reason)
                _log.warning("%s was moved aside, now that there is space: %s", path, debt.reason)
            del debt.newer[0]
        if debt.incident is not None:
            incident = begin_incident(self._run, **debt.incident)
            if incident is None:
                raise OSError("the incident cannot be recorded")
            debt.incident = None
            end_incident(self._run, incident, action=debt.action, known_good=debt.known_good)

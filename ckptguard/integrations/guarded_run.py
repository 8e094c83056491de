"""A run whose checkpoints a framework writes and loads: protected as they come, and verified before one is loaded.

The integrations share it. All ranks call everything here in the same order. Rank 0 alone touches the run; what it
finds, or why it cannot, is the answer of all.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.rollback_policy import RollbackPolicy, policy_of
from ckptguard.errors import CkptguardError, NoKnownGoodError, SettingsError
from ckptguard.records.run import Run, open_run
from ckptguard.recover.roll_back import GoBack, RolledBack, roll_back
from ckptguard.recover.verify_pending import verify_pending
from ckptguard.runs.find_known_good import Wanted, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settings_file import GivenSettings, given_settings, training_settings
from ckptguard.training.announce import announce_resume
from ckptguard.training.client import ChildDaemon, ensure_daemon
from ckptguard.training.options import asks_daemon
from ckptguard.training.ranks import Ranks, ranks_of_training, together
from ckptguard.training.rollback.rollbacks import Rollback, Rollbacks
from ckptguard.training.saving.stores import Loaded
from ckptguard.training.signals.curve_recorder import CurveRecorder
from ckptguard.upkeep.finish_copies import protect_finished, restore_pending_copies
from ckptguard.values.incident import Details
from ckptguard.values.manifest import Manifest
from ckptguard.values.own_log import log as _log

_PROTECT_SECONDS = 60.0
_RANKS_SECONDS = 3600.0  # rank 0 may have to read back several large checkpoints


class FrameworkStore:
    """Checkpoints of one series that the framework saves and loads by itself: here they are only chosen.

    `find_series` returns the series, or None while nothing was saved.
    """

    hashes_on_load = False

    def __init__(self, find_series: Callable[[], str | None]) -> None:
        self._find_series = find_series

    @property
    def series(self) -> str:
        """The series. NoKnownGoodError while nothing was saved."""
        series = self._find_series()
        if series is None:
            raise NoKnownGoodError("nothing was saved yet")
        return series

    def read(self, manifest: Manifest) -> dict[str, Any]:
        """Nothing: the framework loads what is chosen."""
        return {}


class GuardedRun:
    """One run at one place, in one series. `series` may be a function that finds it, on rank 0.

    `settings` is a dict of settings, which count before those of ``ckptguard.toml`` and the environment.
    `daemon="auto"` starts one where none answers, "off" does without. It may take `deadline` seconds to verify what is
    pending, before this process does it.

    A setting that cannot be true, on whichever rank, is the same SettingsError on all of them.
    """

    def __init__(
        self,
        url: str,
        *,
        series: str | Callable[[], str | None],
        policy: RollbackPolicy | None = None,
        settings: GivenSettings = None,
        daemon: str = "auto",
        deadline: float = 120.0,
    ) -> None:
        self.policy, self._asks = policy_of(policy), asks_daemon(daemon)
        if self.policy.first == "replay":
            hint = "RollbackPolicy(skip=False) makes the same updates again, and compares nothing"
            raise SettingsError(
                'first="replay" needs a TrainingGuard: only that knows that it resumes exactly', hint=hint
            )
        self.ranks: Ranks = ranks_of_training(_RANKS_SECONDS)
        self.store = FrameworkStore(series if callable(series) else lambda: series)
        self._url, self._deadline = url, deadline
        self.run: Run  # this and what is made with it: on rank 0 only
        self._rollbacks: Rollbacks
        self.curve = CurveRecorder(None)
        self._child: ChildDaemon | None = None
        self._protecting: threading.Thread | None = None
        answers = together(self.ranks, f"opening the run {url}", lambda: self._wrong_setting(settings))
        wrong = next((answer for answer in answers if answer is not None), None)
        if wrong is not None:
            self.close()
            raise SettingsError(wrong[0], hint=wrong[1])

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the one that touches the run."""
        return self.ranks.rank == 0

    def on_first(self, what: str, work: Callable[[], Any]) -> Any:
        """What rank 0's `work` returns (a JSON value), on every rank; if it fails, all fail."""
        return together(self.ranks, what, lambda: work() if self.leads else None)[0]

    def newest(self) -> Loaded | None:
        """The newest known-good to resume from, verified and in place; what is newer was quarantined. None where
        nothing was ever good: training starts from scratch. CouldNotTellError where that could not be told."""
        found = self.on_first("looking for a checkpoint to resume from", lambda: msgspec.to_builtins(self._newest()))
        return msgspec.convert(found, Loaded | None)

    def go_back(self, diagnosis: Diagnosis, *, save_every: int, details: Details) -> Rollback:
        """Go back as the policy says: what is newer is quarantined, and an incident recorded, with its `details`.

        RollbackExhausted when the budget is spent, NoKnownGoodError when there is nothing to go back to.
        """

        def work() -> Any:
            went = self._rollbacks.go_back(diagnosis, save_every=save_every, details_of=lambda _: details)
            return msgspec.to_builtins(went)

        self.wait_for_protection()
        return msgspec.convert(self.on_first("going back", work), Rollback)

    def protect(self) -> None:
        """Keep the finished saves, now: what deletes old ones may come next. Trouble is logged, never raised."""
        self.wait_for_protection()
        if self.leads:
            self._protect()

    def protect_beside(self) -> None:
        """The same beside training; `wait_for_protection` ends it."""
        self.wait_for_protection()
        if self.leads:
            self._protecting = threading.Thread(target=self._protect, name="ckptguard-protect", daemon=True)
            self._protecting.start()

    def wait_for_protection(self) -> None:
        """Let `protect_beside` finish."""
        if self._protecting is not None:
            self._protecting.join(_PROTECT_SECONDS)
            self._protecting = None

    def judge_last_save(self) -> None:
        """Training is over: have its newest save judged, by the daemon or here. Trouble is logged, never raised."""
        self.wait_for_protection()
        if self.leads:
            self._rollbacks.judge_last_save(seconds=self._deadline if self.ranks.size > 1 else None)

    def close(self) -> None:
        """End the daemon that was started here. Idempotent."""
        self.wait_for_protection()
        self.curve.close()
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _wrong_setting(self, settings: GivenSettings) -> tuple[str, str | None] | None:
        """Open the run; (what is wrong with a setting, hint) as an answer, for it has to be raised by all ranks."""
        try:
            self.settings = given_settings(settings, lambda: training_settings(self._url))
            if self.leads:
                self.run = run = open_run(self._url, self.settings, must_exist=False)
                seconds = self._deadline if self._asks else None
                self._rollbacks = Rollbacks(run, self.settings, self.store, self.policy, ranks=Ranks(), daemon=seconds)
                self.curve = CurveRecorder(run)
                self._child = ensure_daemon(run, self.settings) if self._asks else None
        except SettingsError as error:
            return error.message, error.hint
        return None

    def view(self) -> RunView:
        """The run as it is now; on rank 0 only."""
        return RunView(self.run, self.settings)

    def _newest(self) -> Loaded | None:
        try:
            found = self._roll_back_to_newest()
        except NoKnownGoodError:
            announce_resume(self.run, None)
            return None
        known_good = found.known_good
        loaded = Loaded(step=found.training_step or 0, id=known_good.id, path=known_good.path, remark=found.copied)
        announce_resume(self.run, loaded, counted=found.training_step is not None, aside=found.quarantined)
        if found.training_step is not None:
            self._rollbacks.begins_at(loaded.step)
        return loaded

    def _roll_back_to_newest(self) -> RolledBack:
        series = self.store.series
        view, wanted = self.view(), Wanted(series=series)
        verify_pending(view, wanted)
        if newest_candidate(view, wanted) is None:
            # Nothing that is in place is good: what was rotated away before it was verified is put back for that.
            for place in restore_pending_copies(view, series=series):
                _log.warning("%s was deleted before it was verified: put back for that", place)
            view.forget()
        return roll_back(view, GoBack(reason="training was resumed", series=series, check_writing=False))

    def _protect(self) -> None:
        try:
            self._rollbacks.settle(now=True)
            for trouble in protect_finished(self.view()):
                _log.warning("%s", trouble)
        except Exception as error:  # beside training, nothing of ours may surface in it
            _log.warning("the new save could not be protected: %s", error)


@contextlib.contextmanager
def instead(owner: Any, **methods: Any) -> Iterator[None]:
    """Give an object other methods meanwhile. Afterwards it has what was its own, which may wrap one."""
    own = {name: vars(owner).get(name) for name in methods}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, method in own.items():
            if method is not None:
                setattr(owner, name, method)
            else:
                delattr(owner, name)


def open_guarded(url: str, *, series: str, **guarding: Any) -> GuardedRun | None:
    """A `GuardedRun`, or a warning and None on every rank: for what must never end training. SettingsError as there."""
    try:
        return GuardedRun(url, series=series, **guarding)
    except SettingsError:
        raise
    except (CkptguardError, OSError) as error:
        _log.warning("%s is not guarded: %s", url, error)
        return None

"""What supervise sees of a run's saves: the engine's passes while the command runs, and which saves are sick.

All of it runs in one thread beside the command's own. A failure here is reported, and the command keeps running.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ckptguard.engine.going_back import GoingBack, Signature, Tell
from ckptguard.engine.sick_saves import SickSave, find_sick_saves
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.engine.watcher import Watcher
from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.reporting.events import reason_of
from ckptguard.reporting.notify import Hooks
from ckptguard.runs.not_understood import NotUnderstood
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan import Scanner
from ckptguard.storage import normalise_url
from ckptguard.supervise.recovery import Recovery
from ckptguard.upkeep.reconcile import PassResult
from ckptguard.values.ids import CheckpointId, run_id_of
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

Answer = TypeVar("Answer")
_GAP = 0.5  # seconds between two passes, however much changes
_UNSEEN, _SHARE = 2.0, 20.0  # seconds between two looks where changes may go unseen; more if a pass is slow
_DAEMON_TIMEOUT = 10.0  # seconds that a finished save waits for the verdict of a daemon that guards the run


class SavesSince(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since the command was started: anything `saved`, anything `good`, and whether its guard
    `gave_up`."""

    saved: bool
    good: bool
    gave_up: bool


class SaveWatch:
    """Watches the saves of one run as a daemon does, or follows the daemon that guards it. `tell` gets sentences for
    people, and the hooks get events."""

    def __init__(self, url: str, settings: Settings, scanner: Scanner, hooks: Hooks, *, tell: Tell) -> None:
        self._url, self._settings, self._scanner, self._tell = url, settings, scanner, tell
        self._changed = changed = threading.Event()
        self._watcher = Watcher(lambda key: changed.set(), hooks.log)
        # A caller in a process that goes on has a limited number of inotify instances.
        weakref.finalize(self, self._watcher.close).atexit = False
        normal = normalise_url(url)
        self._run = WatchedRun(normal, run_id_of(normal), settings, hooks, None, source="supervise", caller_acts=True)
        self._run.watcher = self._watcher if os.path.isabs(normal) else None
        self._run.yields, self._run.daemon_timeout = True, _DAEMON_TIMEOUT
        self._reported: set[str] = set()
        self._reported_not_understood = False
        self._good_before: frozenset[CheckpointId] = frozenset()  # at the start of the command
        self.back = GoingBack(url, settings, scanner, self.tell_once)
        self.recovery = Recovery(self.back, hooks, tell)
        self._seen: object = None  # the records and files that `_found` was concluded from
        self._found: list[SickSave] = []

    def prepare(self) -> CkptguardError | None:
        """Record what exists at the beginning. Returns the error if settings or records make supervision impossible."""
        try:
            self.back.open()
        except NotFoundError as error:
            return error if os.path.exists(self._url) else None  # a file, not a folder
        except CkptguardError as error:
            return error
        self.back.before = self._signatures()
        if (found := self.not_understood()) is not None:
            self._tell_not_understood(found)
        return None

    def begin(self) -> None:
        """Record the state before the command starts."""
        self.recovery.begin()
        self._good_before = self._good()
        self.back.lying, self.back.known = self._signatures(), self._ask(_on_record, frozenset())

    def since(self) -> SavesSince:
        """Return what happened since then."""
        return SavesSince(
            saved=not self._signatures() <= self.back.lying,
            good=not self._good() <= self._good_before,
            gave_up=self.recovery.has_given_up(),
        )

    def not_understood(self) -> NotUnderstood | None:
        """Return what in the run may be state and nothing verifies, as of now."""
        return self._ask(lambda view: view.listing.not_understood, None)

    def watch(self, until: threading.Event) -> list[SickSave]:
        """Make passes, woken by changes, until a save is sick that no guard in the command deals with, or until `until`
        is set and `wake` was called."""
        while not until.is_set():
            self._changed.clear()
            began = time.monotonic()
            found = self._pass(until)
            if found and not self.recovery.of_guards():
                return found
            now = time.monotonic()
            pause = self._run.due - now
            if self._run.watcher is not None and not self._watcher.sees_all(self._run.run_id):
                pause = min(pause, max(_UNSEEN, _SHARE * (now - began)))
            self._changed.wait(max(0.0, pause))
            until.wait(_GAP)
        return []

    def wake(self) -> None:
        """Have `watch` see that `until` was set. Any thread may call it."""
        self._changed.set()

    def last_look(self) -> list[SickSave]:
        """Verify what the ended command left, and return what is sick."""
        return self._pass(threading.Event(), assume_quiet=True)

    def sick(self) -> list[SickSave]:
        """Return the sick saves by the current records; none if they cannot be read."""
        return self._ask(self._sick_in, [])

    def tell_once(self, sentence: str) -> None:
        """Notify, unless they were told exactly this before."""
        if sentence not in self._reported:
            self._reported.add(sentence)
            self._tell(sentence)

    def _pass(self, stop: threading.Event, *, assume_quiet: bool = False) -> list[SickSave]:
        """Make one pass. Returns what is sick afterwards, and notifies of what else is not good."""
        done = self._run.step(Work(scanner=self._scanner, stop=stop), assume_quiet=assume_quiet) or PassResult()
        sick = self.sick()
        acted_upon = {s.path for s in sick}
        for one in done.checked:
            if one.outcome is not Outcome.GOOD and one.path not in acted_upon:
                self.tell_once(f"{one.path} is {one.outcome.value}: {reason_of(one)}")
        if done.not_understood is not None:
            self._tell_not_understood(done.not_understood)
        return sick

    def _tell_not_understood(self, found: NotUnderstood) -> None:
        """Say once that there are files that nothing verifies, and what to do."""
        if not self._reported_not_understood:
            self._reported_not_understood = True
            for sentence in found.notes:
                self._tell(sentence)

    def _sick_in(self, view: RunView) -> list[SickSave]:
        seen = (view.history.names, view.history.quarantined, [c.signature for c in view.checkpoints])
        if seen != self._seen:
            self._found = self.back.fresh_start(view) or find_sick_saves(view, before=self.back.before)
            self._seen = seen
        return self._found

    def _good(self) -> frozenset[CheckpointId]:
        return self._ask(_good_by_names, frozenset())

    def _signatures(self) -> frozenset[Signature]:
        checkpoints = self._ask(lambda view: view.checkpoints, None) or ()
        self.back.note_series(checkpoints)
        return frozenset(c.signature for c in checkpoints)

    def _ask(self, question: Callable[[RunView], Answer], unknown: Answer) -> Answer:
        """Return an answer by the run as it is now; `unknown` if there is none, which is told unless there is no run
        yet."""
        try:
            return question(self.back.look())
        except NotFoundError:
            pass  # the command may still create the folder
        except Exception as error:
            self.tell_once(error.message if isinstance(error, CkptguardError) else f"{type(error).__name__}: {error}")
        return unknown


def _good_by_names(view: RunView) -> frozenset[CheckpointId]:
    """Return every generation whose verdict is GOOD, by the names of the ledger alone."""
    of_series = (view.history.current_verdicts(series).values() for series in view.history.names)
    return frozenset(one.id for verdicts in of_series for one in verdicts if one.outcome is Outcome.GOOD)


def _on_record(view: RunView) -> frozenset[CheckpointId]:
    """Return every generation that has a manifest, by the names of the records alone."""
    return frozenset(id for series in view.history.series for id in view.history.sealed(series))

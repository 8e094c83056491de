"""Supervise: run a training command. If its saves turn sick or it dies, roll back and start it again.

There are two threads. This one manages the command and the signals, so hanging storage cannot block either. The other
one (`SaveWatch`, `Recovery`) works on the saves, and `SignalWatch` waits for it.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial

import msgspec

from ckptguard.decisions.restarts import CommandEnd, NextAction, decide
from ckptguard.errors import (
    BusyError,
    CkptguardError,
    NoKnownGoodError,
    NotFoundError,
    RollbackExhausted,
    SettingsError,
)
from ckptguard.records.incidents import Incident, open_incident
from ckptguard.records.run import has_records
from ckptguard.reporting.events import incident_event
from ckptguard.reporting.notify import LONGEST_CLOSE, Hooks
from ckptguard.reporting.open_and_close import close_incident
from ckptguard.scan.process.process_scanner import ProcessScanner
from ckptguard.scan.process.worker_process import limits_of
from ckptguard.supervise.command import SupervisedCommand
from ckptguard.supervise.lock_file import MARK, Note, Supervision, end_left_running, left_running
from ckptguard.supervise.process_tree import become_subreaper
from ckptguard.supervise.save_watch import SavesSince, SaveWatch, StateBefore, SupervisedRollback, Tell
from ckptguard.supervise.sick_saves import SickSave
from ckptguard.supervise.wait_for_command import Background, HeldSignals, SignalWatch, WaitAbandoned
from ckptguard.values.ids import single_number
from ckptguard.values.settings import Settings


class Supervised(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: the command's last exit code (128 + n after signal n), and an error that outweighs it, if any.

    `sick_end`: the command's code was 0, but its last save was sick. It is quarantined, unless we were asked to end.
    `not_understood`: files that may be state were not verified.
    """

    status: int
    error: CkptguardError | None = None
    sick_end: bool = False
    not_understood: bool = False


def supervise(
    url: str,
    argv: Sequence[str],
    settings: Settings,
    signals: HeldSignals,
    *,
    max_rollbacks: int,
    stop_seconds: float,
    tell: Tell,
) -> Supervised:
    """Run the command until it needs no further start. `signals` are already held; `tell` gets sentences.

    The command is not started with unusable settings or records. Raises SettingsError outside Linux.
    """
    if not sys.platform.startswith("linux"):
        raise SettingsError(
            "supervise needs Linux: elsewhere it cannot reliably find the processes that a command starts"
        )
    if not become_subreaper():
        tell("the system does not report processes that leave their parents: some may survive a stop")
    return _Supervisor(url, argv, settings, signals, max_rollbacks, stop_seconds, tell).run()


class _Supervisor:
    def __init__(
        self,
        url: str,
        argv: Sequence[str],
        settings: Settings,
        held: HeldSignals,
        most: int,
        patience: float,
        tell: Tell,
    ) -> None:
        self._url, self._tell, self._most, self._stop_seconds = url, tell, most, patience
        self._ending = threading.Event()
        self._scanner = ProcessScanner(
            limits_of(settings),
            workers=settings.workers or 2,
            stop=self._ending,
            spare_cache=True,  # training's files are more important than ours
            # While the command does not run, the scan disturbs nobody.
            rate=lambda: settings.verify_rate if self._watch.command_runs else None,
            yields=lambda: self._watch.command_runs,
        )
        self._hooks = Hooks(settings, self._hook_log, held.released)
        self._argv, self._environment = argv, dict[str, str]()
        self._command = SupervisedCommand(
            argv, self._environment, held.before, lambda: [*self._scanner.pids, *self._hooks.pids]
        )
        self._background = Background("saves")
        self._watch = SignalWatch(held, self._command, self._background, tell)
        self._saves = SaveWatch(
            url, settings, self._scanner, tell=tell, event=self._hooks.tell, begin_telling=self._hooks.begin
        )
        self._recovery = Recovery(self._saves)
        self._supervision: Supervision | None = None
        self._restarts = 0
        self._to_mend = False  # the next supervise of this run must recover something first

    def run(self) -> Supervised:
        """Run all starts of the command, one after another."""
        done = None
        try:
            done = self._run()
            if self._watch.asked is None:  # otherwise the user is in a hurry
                unread = self._watch.beside(self._saves.not_understood, None, only_looks=True)
                if unread is not None:
                    done = msgspec.structs.replace(done, not_understood=True)
                    self._tell(unread.sentence)
                self._watch.beside(partial(self._hooks.close, patience=LONGEST_CLOSE), None, only_looks=True)
            return done
        except WaitAbandoned:
            return done or Supervised(status=128 + (self._watch.asked or signal.SIGTERM))
        except Exception as error:
            self._to_mend = True
            self._tell(f"unexpected {type(error).__name__}: {error}; the command keeps running without supervision")
            self._watch.wait(self._command.has_ended)
            return Supervised(status=self._command.status if self._command.status is not None else 1)
        finally:
            self._hooks.close(patience=1.0)
            if self._supervision is not None and not self._to_mend:
                self._supervision.end()
            self._ending.set()  # a scanning process ends with us; it may hang, so it is not waited for

    def _run(self) -> Supervised:
        refused = self._watch.beside(self._saves.prepare, None, only_looks=True)
        if refused is not None:
            return Supervised(status=1, error=refused)
        try:
            left = self._begin()
        except BusyError as busy:
            return Supervised(status=1, error=busy)
        look = self._saves.last_look if left else self._saves.sick
        # Unchanged weights are reported, but nothing is moved for that alone before the command runs.
        sick = [s for s in self._watch.beside(look, list[SickSave](), only_looks=True) if not s.stale]
        why = "the newest save was sick before the command was started"
        if sick and left and self._restarts >= self._most:
            return self._give_up(sick, why, 1)
        if left or (sick and self._most):
            why = why if sick else "the previous supervise was killed"
            error = self._go_back(sick, why, None, costs=bool(sick))
            if error is not None:
                return Supervised(status=1, error=error)
        died_before, is_first = False, left is None
        while self._watch.asked is None:
            before = self._watch.beside(self._saves.begin, StateBefore())
            if self._watch.asked is not None:
                break
            found = self._attempt()
            status = self._command.status
            broken_off = bool(found) or (status != 0 and self._watch.asked is None)
            if status is None or (broken_off and not self._command.stop_the_rest(self._stop_seconds, self._watch.wait)):
                self._to_mend = True
                message = "the command could not be stopped: some of its processes survive SIGKILL"
                return Supervised(status=status or 1, error=BusyError(message))
            since = SavesSince(saved=True, good=True, gave_up=False)
            sick = found
            if not self._is_asked or status == 0:  # otherwise the user is in a hurry, and the status says enough
                asked = self._is_asked
                try:
                    look_back = self._saves.sick if asked else self._saves.last_look
                    sick = self._watch.beside(look_back, list[SickSave](), only_looks=True) or found
                except WaitAbandoned:  # the next supervise looks at the newest save before it starts the command
                    if not asked:
                        raise
                    return Supervised(status=status)
            if not self._is_asked:
                since = self._watch.beside(partial(self._saves.since, before), since)
            ended = CommandEnd(
                status=status,
                asked=self._is_asked,
                stopped=bool(found),
                sick=bool(sick),
                saved=since.saved,
                good_since=since.good,
                gave_up=since.gave_up,
                died_before=died_before,
                is_first=is_first,
                seconds=self._command.seconds,
            )
            finished = self._follow(ended, sick)
            if finished is not None:
                return finished
            died_before, is_first = not sick, False
        return Supervised(status=128 + (self._watch.asked or 0))

    def _begin(self) -> Note | None:
        """Become the only supervise of this run. If the previous one was killed, end its processes and return its note.

        It may have been killed at any point. Raises BusyError if another one runs, or processes survive.
        """
        try:
            self._supervision, left = Supervision.begin(self._url, self._argv, os.environ)
        except OSError as error:
            self._tell(f"no note can be kept, so nothing can continue this if we are killed: {error}")
            return None
        self._environment[MARK] = self._supervision.mark
        if left is None:
            return None
        self._to_mend = True
        self._tell("the previous supervise was killed")
        if running := left_running(left):
            self._tell(f"ending what it left running: process {', '.join(str(p.pid) for p in running)}")
            if not end_left_running(left, self._stop_seconds, self._watch.wait):
                raise BusyError("some processes of a killed supervise survive SIGKILL")
        self._restarts = left.restarts
        self._watch.beside(partial(self._saves.take_over, left.series, left.targets), None)
        self._note()
        return left

    def _note(self, command: tuple[int, int] | None = None) -> None:
        if self._supervision is not None:
            series, targets = self._saves.to_take_over
            self._supervision.note(command=command, restarts=self._restarts, series=series, targets=targets)

    def _attempt(self) -> list[SickSave]:
        """Start the command and wait for its end. Returns the sick saves for which it was stopped."""
        until = threading.Event()
        self._note()
        self._command.start()
        self._note(self._command.process)
        if self._command.trouble is not None:
            self._tell(self._command.trouble)
        self._watch.command_runs = True
        watching = self._background.submit(lambda: self._saves.watch(until))

        def found() -> list[SickSave]:
            return watching.result() if watching.done() and watching.exception() is None else []

        try:
            self._watch.wait(lambda: self._command.has_ended() or (bool(found()) and self._watch.asked is None))
            if self._command.status is not None:
                return []
            for one in found():
                self._tell(f"{one.path} is sick: {one.reason}")
            self._tell("stopping the command")
            self._command.stop(self._stop_seconds, self._watch.wait)
            return found()
        finally:
            self._watch.command_runs = False
            until.set()

    @property
    def _is_asked(self) -> bool:
        return self._watch.asked is not None

    def _follow(self, ended: CommandEnd, sick: list[SickSave]) -> Supervised | None:
        """Do what follows the command's end. None means: start it again."""
        if anew := [s for s in sick if s.anew]:
            return self._end_what_began_anew(anew, ended.status)
        then, why = decide(ended, restarts=self._restarts, most=self._most)
        if then is NextAction.END:
            if not ended.asked and ended.status:
                self._tell(f"the command {why}; it is not started again")
            return Supervised(status=ended.status, sick_end=bool(sick) and ended.status == 0)
        if then is NextAction.SPENT:
            return self._give_up(sick, f"the command {why}", ended.status)
        error = self._go_back(sick, f"the command {why}", ended.status)
        if error is not None and not sick:  # it would have ended like this without us
            self._tell(f"it is not started again, because the rollback failed: {error.message}")
            return Supervised(status=ended.status)
        if error is not None:
            return Supervised(status=ended.status, error=error)
        if then is NextAction.GO_BACK:
            self._tell("the command is not started again; you can run it again, for what it resumes from is good now")
            return Supervised(status=ended.status, sick_end=ended.status == 0)
        if self._watch.asked is None:
            self._tell(f"starting the command again ({self._restarts} of {self._most})")
        return None

    def _end_what_began_anew(self, anew: list[SickSave], status: int) -> Supervised:
        """A training that begins from scratch would overwrite good saves at every start."""
        why = f"{anew[0].path}: {anew[0].reason}"
        error = self._go_back(anew, "the command began from scratch", status, costs=False)
        hint = (
            "make the command resume from the path that ckptguard known-good prints, or from the name that it "
            "reads itself"
        )
        if error is not None:
            self._tell(f"the rollback failed: {error.message}")
        return Supervised(status=status, error=RollbackExhausted(f"{why}; it is not started again", hint=hint))

    def _give_up(self, sick: list[SickSave], why: str, status: int) -> Supervised:
        action = f"not started again: the budget of {self._most} rollbacks is spent"
        self._watch.beside(partial(self._recovery.give_up, sick, why, status, action), None)
        hint = f"ckptguard rollback {shlex.quote(self._url)}" if sick else None
        self._to_mend = False
        return Supervised(status=status, error=RollbackExhausted(f"{why}; {action}", hint=hint))

    def _go_back(
        self, sick: list[SickSave], why: str, status: int | None, *, costs: bool = True
    ) -> CkptguardError | None:
        """Roll back in the other thread. Returns the error if that failed. It costs one of the budget."""
        self._restarts += costs
        self._to_mend = True
        self._note()
        self._tell(why)
        error = self._watch.beside(partial(self._recovery.go_back, sick, why, status), None)
        self._to_mend = error is not None and not isinstance(error, NoKnownGoodError)
        self._note()
        return error

    def _hook_log(self, event: str, *, level: str = "info", **fields: object) -> None:
        if level != "info":
            self._tell(f"{event.replace('_', ' ')}: " + ", ".join(f"{k} {v}" for k, v in fields.items()))


class Recovery:
    """Rolls back, and records why and what was done. Never raises."""

    def __init__(self, saves: SaveWatch) -> None:
        self._saves, self._tell = saves, saves.tell

    def go_back(self, sick: list[SickSave], why: str, status: int | None) -> CkptguardError | None:
        """Roll back because of sick saves, or after the command died with `status`. Returns the error if that
        failed."""
        try:
            for sentence in _sentences(self._go_back(sick, why, status)):
                self._tell(sentence)
        except NotFoundError:
            return None  # there is no run yet, so nothing to go back to
        except CkptguardError as error:
            return error
        except Exception as error:
            return CkptguardError(f"the rollback failed: {type(error).__name__}: {error}")
        return None

    def give_up(self, sick: list[SickSave], why: str, status: int | None, action: str) -> None:
        """Record that nothing more is done, and why."""
        self._close(self._open(sick, why, status), action)

    def _go_back(self, sick: list[SickSave], why: str, status: int | None) -> SupervisedRollback:
        incident = self._open(sick, why, status)
        try:
            went = self._saves.go_back(sick, f"supervise: {why}")
        except CkptguardError as error:
            self._close(incident, f"could not roll back: {error.message}")
            raise
        self._close(incident, "; ".join(_sentences(went)), known_good=str(went.ids[0]) if went.ids else None)
        return went

    def _open(self, sick: list[SickSave], why: str, status: int | None) -> Incident | None:
        try:
            run = self._saves.open()
            if not sick and not has_records(run):
                return None  # the command never saved anything; a folder of ours may keep it from starting
            incident = open_incident(
                run,
                step=single_number(sick[0].step) if sick else None,
                cause="crash" if not sick else "anew" if sick[0].anew else "numeric",
                reason="; ".join(f"{s.path}: {s.reason}" for s in sick) or why,
                evidence={} if status is None else {"exit_status": status},
                source="supervise",
            )
            self._saves.event(incident_event(run, incident))
            return incident
        except NotFoundError:
            return None  # the same
        except Exception as error:
            self._tell(f"the incident could not be recorded: {error}")
            return None

    def _close(self, incident: Incident | None, action: str, *, known_good: str | None = None) -> None:
        self._saves.close_left_incidents(f"the command ended; supervise: {action}")
        if incident is None:
            return
        try:
            close_incident(self._saves.open(), incident, action=action, known_good=known_good)
        except Exception as error:
            self._tell(f"the incident {incident.id} could not be closed: {error}")


def _sentences(went: SupervisedRollback) -> list[str]:
    moved = [f"quarantined {', '.join(went.quarantined)}"] if went.quarantined else []
    return [*moved, f"went back to {', '.join(went.to)}" if went.to else "there is nothing to go back to"]

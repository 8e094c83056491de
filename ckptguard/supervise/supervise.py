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
from ckptguard.engine.going_back import Tell
from ckptguard.engine.sick_saves import SickSave
from ckptguard.errors import (
    BusyError,
    CkptguardError,
    NoKnownGoodError,
    RollbackExhausted,
    SettingsError,
)
from ckptguard.reporting.notify import LONGEST_CLOSE, Hooks
from ckptguard.scan.process.process_scanner import ProcessScanner
from ckptguard.scan.process.worker_process import limits_of
from ckptguard.supervise.command import SupervisedCommand
from ckptguard.supervise.lock_file import MARK, Note, Supervision, end_left_running, left_running
from ckptguard.supervise.nodes import CommandOnNodes, Nodes, follow
from ckptguard.supervise.process_tree import become_subreaper
from ckptguard.supervise.save_watch import SavesSince, SaveWatch
from ckptguard.supervise.wait_for_command import HeldSignals, SignalWatch, WaitAbandoned
from ckptguard.values.exit_codes import ExitCode, of_error
from ckptguard.values.settings import Settings

_REPORTED = ("could_not_tell", "failing", "lost", "not_enough_room", "watching_by_timer_only")  # events of the engine


class Supervised(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: the command's last exit code (128 + n after signal n), and an error that outweighs it, if any.

    `sick_end`: the command's code was 0, but its last save was sick. It is quarantined, unless we were asked to end.
    `not_understood`: files that may be state were not verified. `last_line`: what is wrong with what a plain resume
    would take, if anything is, and what to do.
    """

    status: int
    error: CkptguardError | None = None
    sick_end: bool = False
    not_understood: bool = False
    last_line: str | None = None

    @property
    def code(self) -> int:
        """The exit code that this is."""
        if self.error is not None:
            return of_error(self.error)
        return ExitCode.BAD if self.sick_end else self.status


def supervise(
    url: str,
    argv: Sequence[str],
    settings: Settings,
    signals: HeldSignals,
    *,
    max_rollbacks: int,
    stop_seconds: float,
    tell: Tell,
    nodes: Nodes | None = None,
) -> Supervised:
    """Run the command until it needs no further start. `signals` are already held; `tell` gets sentences. With `nodes`
    it runs on each of them, and one of them leads.

    The command is not started with unusable settings or records. Raises SettingsError outside Linux.
    """
    if not sys.platform.startswith("linux"):
        raise SettingsError(
            "supervise needs Linux: elsewhere it cannot reliably find the processes that a command starts"
        )
    if not become_subreaper():
        tell("the system does not report processes that leave their parents: some may survive a stop")
    return _Supervisor(url, argv, settings, signals, max_rollbacks, stop_seconds, tell, nodes).run()


class _Supervisor:
    def __init__(
        self,
        url: str,
        argv: Sequence[str],
        settings: Settings,
        held: HeldSignals,
        most: int,
        timeout: float,
        tell: Tell,
        nodes: Nodes | None,
    ) -> None:
        self._nodes = nodes
        self._url, self._tell, self._most, self._stop_seconds = url, tell, most, timeout
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
        self._hooks = Hooks(settings, self._log, held.released)
        what = argv, held.before, lambda: [*self._scanner.pids, *self._hooks.pids]
        asked = (lambda: self._is_asked, timeout, tell)
        self._command = SupervisedCommand(*what) if nodes is None else CommandOnNodes(nodes, *asked, *what)
        self._watch = SignalWatch(held, self._command, tell)
        self._saves = SaveWatch(url, settings, self._scanner, self._hooks, tell=tell)
        self._supervision: Supervision | None = None
        self._restarts = 0
        self._died_before, self._is_first = False, True  # how the previous start ended, if there was one
        self._to_repair = False  # the next supervise of this run must recover something first

    def run(self) -> Supervised:
        """Run all starts of the command, one after another."""
        done, unknown = (
            None,
            f"what a resume would take was not looked at; run ckptguard status {shlex.quote(self._url)}",
        )
        try:
            done = self._run()
            if self._nodes is not None and not self._nodes.leads:
                return done
            done = msgspec.structs.replace(done, last_line=unknown)
            look = self._saves.back.what_a_resume_takes
            done = msgspec.structs.replace(done, last_line=self._watch.beside(look, unknown, only_looks=True))
            if self._watch.asked is None:  # otherwise the user is in a hurry
                unread = self._watch.beside(self._saves.not_understood, None, only_looks=True)
                if unread is not None:
                    done = msgspec.structs.replace(done, not_understood=True)
                    self._tell(unread.sentence)
                self._watch.beside(partial(self._hooks.close, timeout=LONGEST_CLOSE), None, only_looks=True)
            return done
        except WaitAbandoned:
            return done or Supervised(status=128 + (self._watch.asked or signal.SIGTERM), last_line=unknown)
        except Exception as error:
            self._to_repair = True
            self._tell(f"unexpected {type(error).__name__}: {error}; the command keeps running without supervision")
            self._watch.wait(self._command.has_ended)
            status = self._command.status
            return Supervised(status=1 if status is None else status, last_line=unknown)
        finally:
            if self._nodes is not None:
                self._nodes.end(1 if done is None else done.code)
            self._hooks.close(timeout=1.0)
            if self._supervision is not None and not self._to_repair:
                self._supervision.end()
            self._ending.set()  # a scanning process ends with us; it may hang, so it is not waited for

    def _run(self) -> Supervised:
        nodes = self._nodes
        alone = None if nodes is None else self._watch.beside(nodes.join, None, only_looks=True)
        if alone is not None:
            return Supervised(status=1, error=alone)
        if nodes is None or nodes.leads:
            refused = self._watch.beside(self._saves.prepare, None, only_looks=True)
            if refused is not None:
                return Supervised(status=1, error=refused)
        try:
            left = self._begin()
        except BusyError as busy:
            return Supervised(status=1, error=busy)
        if nodes is not None and not nodes.leads:
            return self._follow_leader(nodes)
        done = self._recover(left)
        self._is_first = left is None
        while done is None and self._watch.asked is None:
            done = self._start_once()
        return done or Supervised(status=128 + (self._watch.asked or 0))

    def _recover(self, left: Note | None) -> Supervised | None:
        """Before the first start: go back from sick saves, and finish what a killed supervise had begun."""
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
        return None

    def _start_once(self) -> Supervised | None:
        """One start of the command, and what follows its end. None means: start it again, unless we are to end."""
        self._watch.beside(self._saves.begin, None)
        if self._watch.asked is not None:
            return None
        found = self._attempt()
        status = self._command.status
        broken_off = bool(found) or (status != 0 and self._watch.asked is None)
        if status is None or (broken_off and not self._command.stop_the_rest(self._stop_seconds, self._watch.wait)):
            self._to_repair = True
            message = "the command could not be stopped: some of its processes survive SIGKILL"
            return Supervised(status=status or 1, error=BusyError(message))
        since, sick, asked = SavesSince(saved=True, good=True, gave_up=False), found, self._is_asked
        if not asked or status == 0:  # otherwise the user is in a hurry, and the status says enough
            look_back = self._saves.sick if asked else self._saves.last_look
            try:
                sick = self._watch.beside(look_back, list[SickSave](), only_looks=True) or found
            except WaitAbandoned:  # the next supervise looks at the newest save before it starts the command
                if not asked:
                    raise
                return Supervised(status=status)
        if not self._is_asked:
            since = self._watch.beside(self._saves.since, since)
        ended = CommandEnd(
            status=status,
            asked=self._is_asked,
            stopped=bool(found),
            sick=bool(sick),
            saved=since.saved,
            good_since=since.good,
            gave_up=since.gave_up,
            died_before=self._died_before,
            is_first=self._is_first,
            seconds=self._command.seconds,
        )
        self._died_before, self._is_first = not sick, False
        return self._follow(ended, sick)

    def _follow_leader(self, nodes: Nodes) -> Supervised:
        """On each other node: start, stop and end as the leader says."""
        assert isinstance(self._command, CommandOnNodes)
        status, trouble = follow(nodes, self._command, self._watch.wait, lambda: self._is_asked)
        if self._watch.asked is not None and trouble is None and status == 1:
            status = 128 + self._watch.asked
        return Supervised(status=status, error=None if trouble is None else CkptguardError(trouble))

    def _begin(self) -> Note | None:
        """Become the only supervise of this run. If the previous one was killed, end its processes and return its note.

        It may have been killed at any point. Raises BusyError if another one runs, or processes survive.
        """
        try:
            self._supervision, left = Supervision.begin(
                self._url, self._command.argv, os.environ, 0 if self._nodes is None else self._nodes.rank
            )
        except OSError as error:
            self._tell(f"no note can be kept, so nothing can continue this if we are killed: {error}")
            return None
        self._command.environment[MARK] = self._supervision.mark
        if left is None:
            return None
        self._to_repair = True
        self._tell("the previous supervise was killed")
        if running := left_running(left):
            self._tell(f"ending what it left running: process {', '.join(str(p.pid) for p in running)}")
            if not end_left_running(left, self._stop_seconds, self._watch.wait):
                raise BusyError("some processes of a killed supervise survive SIGKILL")
        self._restarts = left.restarts
        self._watch.beside(partial(self._saves.recovery.take_over, left.series, left.targets), None)
        self._note()
        return left

    def _note(self, command: tuple[int, int] | None = None) -> None:
        if self._supervision is not None:
            series, targets = self._saves.back.to_take_over
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
        watching = self._watch.submit(lambda: self._saves.watch(until))

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
            self._saves.wake()

    @property
    def _is_asked(self) -> bool:
        return self._watch.asked is not None or self._command.asked_elsewhere

    def _follow(self, ended: CommandEnd, sick: list[SickSave]) -> Supervised | None:
        """Do what follows the command's end. None means: start it again."""
        if anew := [s for s in sick if s.anew]:
            return self._end_fresh_start(anew, ended.status)
        if self._command.lost is not None:
            self._go_back(sick, self._command.lost, ended.status, costs=False)
            return Supervised(status=1, error=CkptguardError(self._command.lost, hint="start all nodes again"))
        then, why = decide(ended, restarts=self._restarts, most=self._most)
        if then is NextAction.END:
            if not ended.asked and ended.status:
                self._tell(f"the command {why}; it is not started again")
            return Supervised(status=ended.status, sick_end=bool(sick) and ended.status == 0)
        if then is NextAction.SPENT:
            return self._give_up(sick, f"the command {why}", ended.status)
        error = self._go_back(sick, f"the command {why}", ended.status)
        if error is not None and not sick and not isinstance(error, NoKnownGoodError):  # it would have ended like this
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

    def _end_fresh_start(self, anew: list[SickSave], status: int) -> Supervised:
        """A training that begins from scratch would overwrite good saves at every start."""
        why = f"{anew[0].path}: {anew[0].reason}"
        error = self._go_back(anew, "the command began from scratch", status, costs=False)
        hint = (
            "make the command resume from the path that ckptguard known-good prints, or from the name that it "
            "reads itself"
        )
        if error is not None:
            then = f"move {anew[0].path} away, then run ckptguard rollback {shlex.quote(self._url)}"
            is_of_no_use = isinstance(error, NoKnownGoodError)  # another rollback would end like this one
            self._tell(f"the rollback failed: {error.message}; {(is_of_no_use and error.hint) or then}")
        return Supervised(status=status, error=RollbackExhausted(f"{why}; it is not started again", hint=hint))

    def _give_up(self, sick: list[SickSave], why: str, status: int) -> Supervised:
        """Go back once more, for the next who resumes, but start nothing. Without any budget nothing is moved."""
        action = f"not started again: the budget of {self._most} rollbacks is spent"
        if self._most:
            error = self._go_back(sick, why, status, costs=False, after=action)
            if error is not None:
                self._tell(f"the rollback failed: {error.message}")
        else:
            self._watch.beside(partial(self._saves.recovery.give_up, sick, why, status, action), None)
        self._to_repair = False
        return Supervised(status=status, error=RollbackExhausted(f"{why}; {action}"))

    def _go_back(
        self, sick: list[SickSave], why: str, status: int | None, *, costs: bool = True, after: str | None = None
    ) -> CkptguardError | None:
        """Roll back in the other thread. Returns the error if that failed. It costs one of the budget."""
        self._restarts += costs
        self._to_repair = True
        self._note()
        self._tell(why)
        error = self._watch.beside(partial(self._saves.recovery.go_back, sick, why, status, after), None)
        self._to_repair = error is not None and not isinstance(error, NoKnownGoodError)
        self._note()
        return error

    def _log(self, event: str, *, level: str = "info", **fields: object) -> None:
        """Notify of what is wrong with the hooks, and once of what keeps a run from being guarded."""
        if event.startswith("hook_") and level != "info":
            self._tell(f"{event.replace('_', ' ')}: " + ", ".join(f"{k} {v}" for k, v in fields.items()))
        elif event in _REPORTED:
            self._saves.tell_once(str(fields["reason"]))

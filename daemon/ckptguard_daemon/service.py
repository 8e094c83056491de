"""The whole daemon: everything is started in order, and stopped in order."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from starlette.types import ASGIApp

from ckptguard.decisions.turns import LANES
from ckptguard.errors import CkptguardError
from ckptguard.inspect.list_states import survey
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import this_host, utc_now
from ckptguard.reporting.notify import LONGEST_CLOSE, Hooks
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.version import __version__
from ckptguard_daemon.answers import Answers
from ckptguard_daemon.connections import BoundedConnection
from ckptguard_daemon.guarded import WatchedRun
from ckptguard_daemon.idle_work import Replicating, Scrubbing
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import LaneScanner, Loop, Passes
from ckptguard_daemon.rendezvous import listen
from ckptguard_daemon.roster import Roster
from ckptguard_daemon.watcher import Watcher

GOOD, FAILED, BAD, UNDECIDED = 0, 1, 3, 4  # the command line's exit codes, for --once
_LANES_STOP_SECONDS = 2.0
_HTTP_START_SECONDS, _HTTP_STOP_SECONDS = 10.0, 2.0
_HOOK_STOP_SECONDS = 3.0
_LONGEST_SETTLING = 60.0


def run_id_of(url: str) -> str:
    """Return the id of a run, known before the run exists."""
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def serve(
    urls: Sequence[str],
    settings: Settings,
    environ: Mapping[str, str],
    stop: threading.Event,
    *,
    socket_path: str | None = None,
    still_wanted: Callable[[], bool] = lambda: True,
) -> int:
    """Guard the runs until `stop` is set or the parent is gone. Returns the exit code.

    Raises SettingsError or BusyError if the socket is unavailable. Later errors do not end it.
    """
    rendezvous = listen(socket_path, urls, environ)
    host, boot_id = this_host()
    presence = DaemonRecord(address=rendezvous.path, host=host, boot_id=boot_id, pid=os.getpid(), started_at=utc_now())
    hooks = Hooks(settings, log)
    runs = Roster(WatchedRun(url, run_id_of(url), settings, hooks, presence) for url in urls)
    passes = Passes()
    watchers: list[Watcher] = []

    def after_pass(run: WatchedRun) -> None:
        passes.done(run.run_id)
        for watcher in watchers:
            watcher.keep_watching()
        for work in behind:
            work.after_pass(run)

    def replicas_first(run_id: str) -> bool:
        return loop.lanes.somebody_waits() or loop.verdicts_first(run_id) or replicating.is_busy(run_id)

    loop = Loop(runs, stop, after_pass, lambda run: replicating.after_pass(run))
    niceness = settings.niceness
    replicating = Replicating(runs, hooks, loop.verdicts_first, loop.wake, stop, niceness=niceness)
    scrubbing = Scrubbing(runs, hooks, replicas_first, loop.wake, stop, niceness=niceness)
    behind = (replicating, scrubbing)
    watchers += [
        Watcher(run.url, lambda run_id=run.run_id: loop.wake(run_id))  # type: ignore[misc]  # a default binds the id
        for run in runs
        if os.path.isabs(run.url)
    ]
    thread = threading.Thread(target=loop.run, name="loop", daemon=True)
    aside = [threading.Thread(target=work.lanes.run, name=work.name, daemon=True) for work in behind]
    answers = Answers(runs, loop, passes, hooks, presence, thread.is_alive)
    server = HttpServer(answers.application(), rendezvous.socket)
    try:
        if not server.start():
            return FAILED
        for watcher in watchers:  # before the first pass, so that no change is missed
            watcher.keep_watching()
        for begun in (thread, *aside):
            begun.start()
        log("started", version=__version__, pid=presence.pid, socket=rendezvous.path, runs=list(urls))
        while not stop.wait(1.0):
            if not still_wanted():
                log("parent_gone")
                stop.set()
    finally:
        stop.set()
        everywhere = (loop.lanes, replicating.lanes, scrubbing.lanes)
        for lanes in everywhere:
            lanes.wake(())
        server.close()
        for watcher in watchers:
            watcher.close()
        deadline = time.monotonic() + _LANES_STOP_SECONDS
        for lanes in everywhere:
            lanes.wait_for_end(deadline - time.monotonic())
        for run in runs:
            run.leave()
        rendezvous.close()
        # Whose parent is gone is waited for by nobody: what training came to is told first.
        hooks.close(patience=_HOOK_STOP_SECONDS if still_wanted() else LONGEST_CLOSE)
        log("stopped", pid=presence.pid)
    return GOOD


def run_once(urls: Sequence[str], settings: Settings, stop: threading.Event) -> int:
    """Make one full pass over each run, and wait for saves that are settling, but not for unfinished ones.

    Returns the exit code for the final state. Raises NotFoundError if a run does not exist.
    """
    for url in urls:
        open_run(url, settings)
    hooks = Hooks(settings, log)
    runs = Roster(WatchedRun(url, run_id_of(url), settings, hooks, None) for url in urls)
    replicating = Replicating(runs, hooks, lambda run_id: False, lambda run_id: None, stop, niceness=settings.niceness)

    def settle(run: WatchedRun) -> bool:
        scanner = LaneScanner(stop)
        try:
            all_read = _settled_pass(run, Work(scanner=scanner.by(run.settings), stop=stop))
        finally:
            scanner.close()
        replicating.once(run)
        return all_read

    try:
        with ThreadPoolExecutor(LANES, "pass") as lanes:
            all_read = all(list(lanes.map(settle, runs)))
    finally:
        hooks.close(patience=0.0 if stop.is_set() else LONGEST_CLOSE)
    outcomes: list[Outcome] = []
    for url in urls:
        try:
            states = survey(open_view(url, settings))
        except CkptguardError as error:
            log("could_not_tell", level="error", run=url, reason=error.message)
            all_read = False
            continue
        outcomes += [Outcome.PENDING if state.changed else state.outcome for state in states if state.in_place]
    return exit_code(outcomes, all_read=all_read)


def exit_code(outcomes: Iterable[Outcome], *, all_read: bool) -> int:
    """Return the first code that applies: something is bad, could not tell, something (or everything) undecided, all
    good."""
    found = set(outcomes)
    if Outcome.BAD in found:
        return BAD
    if not all_read:
        return FAILED
    return GOOD if found == {Outcome.GOOD} else UNDECIDED


def _settled_pass(run: WatchedRun, work: Work) -> bool:
    """Make passes until nothing is merely settling. Returns whether everything could be read."""
    settle = run.settings.settle
    patience = _LONGEST_SETTLING + 10 * settle
    while True:
        done = run.step(work)
        if done is None:
            return False
        settling = done.next_in is not None and done.next_in <= settle
        if not settling or patience <= 0 or work.is_stopped():
            return not done.could_not_tell
        pause = max(done.next_in or 0.0, 0.05)
        patience -= pause
        if work.stop is not None and work.stop.wait(pause):
            return False


class HttpServer:
    """uvicorn in its own thread, on a socket that is already bound, until `close`."""

    def __init__(self, application: ASGIApp, listening: socket.socket) -> None:
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            log_level="warning",
            lifespan="off",
            http=BoundedConnection,
            ws="none",
            loop="asyncio",
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._listening = listening
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> bool:
        """Start to serve. Returns whether that worked."""
        self._thread.start()
        return self._started.wait(_HTTP_START_SECONDS) and self._thread.is_alive()

    def close(self) -> None:
        """Stop serving. Waiting requests get a second."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout=_HTTP_STOP_SECONDS)

    def _serve(self) -> None:
        try:
            asyncio.run(self._serve_and_tell())
        except (Exception, SystemExit) as error:
            log("http_failed", level="error", reason=f"{type(error).__name__}: {error}")
        finally:
            self._started.set()

    async def _serve_and_tell(self) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._started.set()
        await serving

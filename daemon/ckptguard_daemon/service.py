"""The whole daemon: everything is started in order, and stopped in order."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.engine.watcher import Watcher
from ckptguard.fleet import FleetRun
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.records.who_and_when import this_host, utc_now
from ckptguard.reporting.notify import HookSets
from ckptguard.values.exit_codes import ExitCode
from ckptguard.values.ids import run_id_of
from ckptguard.version import __version__
from ckptguard_daemon.application import application, routes
from ckptguard_daemon.catalogue_feed import CatalogueFeed, open_catalogue
from ckptguard_daemon.hints import HintQueue
from ckptguard_daemon.http.gate import admit_owner
from ckptguard_daemon.http.routes import Served
from ckptguard_daemon.http.server import HttpServer
from ckptguard_daemon.http.tcp_address import address_of
from ckptguard_daemon.http.unix_socket import listen
from ckptguard_daemon.http.web_server import open_web_server
from ckptguard_daemon.idle_work import Replicating, Scrubbing
from ckptguard_daemon.jobs import Jobs
from ckptguard_daemon.lanes import Lanes
from ckptguard_daemon.liveness import Systemd, is_fresh
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import Loop, Waiters
from ckptguard_daemon.metrics import Metrics
from ckptguard_daemon.metrics_outlets import MetricsFile, Scrapers, listen_for_scrapers
from ckptguard_daemon.plan import DaemonPlan, ListenOptions, Reload
from ckptguard_daemon.run_set import RunDiscovery, RunSet

# The parts of a clean stop. What takes longer is left to the next start.
_WORK_STOP_SECONDS = 1.5
_HOOK_STOP_SECONDS = 3.0
_MOST_CALLS = 8
_FLEET = "fleet"  # the watcher's key of the folders in which new runs would be seen


def serve(
    plan: DaemonPlan,
    environ: Mapping[str, str],
    stop: threading.Event,
    options: ListenOptions,
    *,
    wanted: Callable[[], bool] | None = None,
    reload: Reload | None = None,
) -> int:
    """Guard the runs until `stop` is set, because of a signal or because nobody has `wanted` it any more. Returns the
    exit code.

    Raises SettingsError or BusyError if the socket is unavailable. Later errors do not end it.
    """
    manager = Systemd()
    listening = Listening(plan, environ, options)
    feed = CatalogueFeed(open_catalogue(environ))
    guarding = Guarding(plan, stop, listening.presence, feed, only_looks=options.if_unguarded)
    try:
        if not listening.start(guarding):
            return ExitCode.FAILED
        guarding.start(reload)
        log("started", version=__version__, pid=os.getpid(), socket=listening.presence.address, runs=list(plan.urls))
        if plan.fleet is not None:
            log("searching", folders=list(plan.fleet.file.folders))
        manager.is_ready()
        if listening.web_server is not None:
            listening.web_server.show_link()
        while not stop.wait(1.0):
            manager.tell_progress(guarding.loop.last_progress(), guarding.runs)
            if listening.web_server is not None:
                listening.web_server.look()
            if reload is not None and reload.asked.is_set():
                guarding.following.wake()
        if wanted is not None and not wanted():
            log("parent_gone")
    finally:
        began = time.monotonic()
        manager.is_stopping()
        stop.set()
        guarding.end_waits()
        listening.close(began + _WORK_STOP_SECONDS)
        guarding.close(began)
        log("stopped", pid=os.getpid())
    return ExitCode.GOOD


class Guarding:
    """The runs, the threads that work on them, and what each of these tells the others."""

    def __init__(
        self,
        plan: DaemonPlan,
        stop: threading.Event,
        presence: DaemonRecord,
        feed: CatalogueFeed,
        *,
        only_looks: bool,
    ) -> None:
        self._presence, self._only_looks, self.stop = presence, only_looks, stop
        self.hooks, self.runs, self.passes, self.passed = HookSets(log), RunSet(), Waiters(), threading.Event()
        self.feed, self.jobs = feed, Jobs(stop)
        self._watcher = Watcher(self._notice, log)
        self.loop = Loop(self.runs, stop, self._after_pass, lambda run: self._replicating.after_pass(run))
        self._replicating = Replicating(self.runs, self.loop.verdicts_first, self.loop.wake, stop)
        self._scrubbing = Scrubbing(self.runs, self._replicas_first, self.loop.wake, stop)
        self.following = RunDiscovery(
            plan,
            self.runs,
            self._make,
            lambda run, found: run.take(found.name, found.settings, self.hooks.of(found.settings)),
            arrived=lambda run: self.loop.wake(run.run_id),
            left=self._leave,
            looked=self._looked,
            catalogue=feed.catalogue,
        )
        self._thread = threading.Thread(target=self.loop.run, name="loop", daemon=True)
        self._hints = HintQueue(plan.settings, self.runs, self.loop.wake, lambda: self.following.wake(), stop)
        self.metrics = Metrics(
            lambda: [self.feed.summary(run) for run in self.runs],
            self.loop.last_progress,
            lambda: self.following.places,
        )

    @property
    def _lanes(self) -> tuple[Lanes, ...]:
        return self.loop.lanes, self._replicating.lanes, self._scrubbing.lanes

    def is_alive(self) -> bool:
        """True while passes are made."""
        return self._thread.is_alive() and is_fresh(self.loop.last_progress())

    def start(self, reload: Reload | None) -> None:
        """Start the threads."""
        self._thread.start()
        for work in (self._replicating, self._scrubbing):
            threading.Thread(target=work.lanes.run, name=work.name, daemon=True).start()
        if self.following.plan.settings.hints is not None:
            threading.Thread(target=self._hints.run, name="hints", daemon=True).start()
        threading.Thread(target=self.following.run, args=(self.stop, reload), name="fleet", daemon=True).start()

    def end_waits(self) -> None:
        """Let each thread see that `stop` is set."""
        self.feed.wake()  # streams of events end before the servers do
        self.following.wake()
        for lanes in self._lanes:
            lanes.wake(())
        self.passed.set()

    def close(self, began: float) -> None:
        """Wait for what is under way, but not long. Stopping `began` then, by the monotonic clock."""
        self._watcher.close()
        for lanes in self._lanes:
            lanes.wait_for_end(began + _WORK_STOP_SECONDS - time.monotonic())
        self.jobs.wait_for_end(began + _WORK_STOP_SECONDS - time.monotonic())
        # Those with work under way may hang, and so may their records.
        left_last = sorted(self.runs, key=lambda run: any(lanes.turn_of(run.run_id) for lanes in self._lanes))
        calls = CallsAtOnce([run.leave for run in left_last])
        self.hooks.close(timeout=began + _HOOK_STOP_SECONDS - time.monotonic())
        calls.wait(began + _HOOK_STOP_SECONDS - time.monotonic())

    def _notice(self, key: str) -> None:
        self.following.wake() if key == _FLEET else self.loop.wake(key)

    def _make(self, found: FleetRun) -> WatchedRun:
        hooks = self.hooks.of(found.settings)
        run = WatchedRun(found.url, run_id_of(found.url), found.settings, hooks, self._presence, self.feed)
        if os.path.isabs(run.url):
            run.watcher = self._watcher
        run.hears = lambda: self._hints.is_alive()
        run.yields = self._only_looks
        return run

    def _leave(self, run: WatchedRun) -> None:
        self._watcher.forget(run.run_id)
        run.leave()

    def _looked(self) -> None:
        self._watcher.keep(_FLEET, self.following.folders)
        self.feed.keep_only(run.run_id for run in self.runs)
        self.hooks.keep_only(run.settings for run in self.runs)

    def _after_pass(self, run: WatchedRun) -> None:
        self.passes.wake(run.run_id)
        self.passed.set()
        if self.runs.get(run.run_id) is not run:
            self._leave(run)  # it went during this pass, which wrote and watched once more
            return
        if run.asks_others_for_room():
            for other in self.runs:
                if other is not run and other.storage == run.storage:
                    other.look_soon()
                    self.loop.wake(other.run_id)
        if run.guards:
            self._replicating.after_pass(run)
            self._scrubbing.after_pass(run)

    def _replicas_first(self, run_id: str) -> bool:
        waits = self.loop.lanes.somebody_waits() or self.loop.verdicts_first(run_id)
        return waits or self._replicating.is_busy(run_id)


class Listening:
    """The places where the daemon is asked: its Unix socket, and by TCP for browsers and scrapers. And the file of its
    metrics."""

    def __init__(self, plan: DaemonPlan, environ: Mapping[str, str], options: ListenOptions) -> None:
        """Raises SettingsError or BusyError."""
        self._environ, self._token_file = environ, options.metrics_token
        self._scrapers = listen_for_scrapers(options)
        self.web_server = open_web_server(options)
        self._file = MetricsFile(options.metrics_file) if options.metrics_file is not None else None
        self._socket = listen(options.socket_path, plan.places, environ)
        self._servers: list[HttpServer] = []
        host, boot_id = this_host()
        self.presence = DaemonRecord(
            address=self._socket.path, host=host, boot_id=boot_id, pid=os.getpid(), started_at=utc_now()
        )

    def start(self, guarding: Guarding) -> bool:
        """Start the servers, which answer about the guarded runs. Returns whether all of them work."""
        served = Served(
            runs=guarding.runs,
            loop=guarding.loop,
            passes=guarding.passes,
            presence=self.presence,
            feed=guarding.feed,
            metrics=guarding.metrics,
            alive=guarding.is_alive,
            searched=lambda: guarding.following.has_looked,
            unseen_places=lambda: sum(not place.seen for place in guarding.following.places),
            stop=guarding.stop,
            jobs=guarding.jobs,
        )
        every = routes(served)
        self._servers.append(HttpServer(application(every, admit_owner), self._socket.socket))
        if self.web_server is not None:
            self.web_server.remember(self._socket.path, self._environ)
            self._servers.append(self.web_server.server(application(every, self.web_server.tcp_access.admit)))
        if self._scrapers is not None:
            log("metrics", address=address_of(self._scrapers))
            admit = Scrapers(self._token_file).admit
            self._servers.append(HttpServer(application(every, admit), self._scrapers))
        if not all(server.start() for server in self._servers):
            return False
        if self._file is not None:
            given = (guarding.metrics.text, guarding.passed, guarding.stop)
            threading.Thread(target=self._file.keep_written, args=given, daemon=True).start()
        return True

    def close(self, deadline: float) -> None:
        """End the servers by then, on the monotonic clock."""
        for server in self._servers:
            server.begin_to_close()
        for server in self._servers:
            server.close(deadline - time.monotonic())
        self._socket.close()


class CallsAtOnce:
    """Makes calls, several at a time and in this order: one that hangs holds up few others."""

    def __init__(self, calls: Iterable[Callable[[], None]]) -> None:
        self._calls = deque(calls)
        numbers = range(min(_MOST_CALLS, len(self._calls)))
        self._threads = [threading.Thread(target=self._work, name="end", daemon=True) for _ in numbers]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> None:
        """Wait this long at most for the end."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            try:
                call()
            except Exception:  # the others are made all the same
                log("stop_failed", level="error", trace=True)

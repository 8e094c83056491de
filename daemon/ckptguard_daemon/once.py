"""``--once``: verify what is there in all runs, and end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ckptguard.decisions.turns import LANES
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.inspect.list_states import survey
from ckptguard.records.run import open_run
from ckptguard.reporting.notify import LONGEST_CLOSE, HookSets
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.values.exit_codes import of_outcomes
from ckptguard.values.ids import run_id_of
from ckptguard.values.verdict import Outcome
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.idle_work import Replicating
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import LaneScanner
from ckptguard_daemon.metrics import exposition
from ckptguard_daemon.metrics_outlets import MetricsFile
from ckptguard_daemon.plan import DaemonPlan, ListenOptions
from ckptguard_daemon.run_set import RunDiscovery, RunSet

_LONGEST_SETTLING = 60.0  # seconds


def run_once(plan: DaemonPlan, stop: threading.Event, options: ListenOptions) -> int:
    """Make one full pass over each run, and wait for saves that are settling, but not for unfinished ones.

    Returns the exit code for the final state. Raises NotFoundError if a named run does not exist.
    """
    if options.metrics is not None or options.metrics_token is not None:
        raise SettingsError("--once ends before anybody can ask for metrics", hint="use --metrics-file PATH")
    file = MetricsFile(options.metrics_file) if options.metrics_file is not None else None
    for url in plan.urls:
        open_run(url, plan.settings)
    hooks, runs, feed = HookSets(log), RunSet(), CatalogueFeed()
    following = RunDiscovery(
        plan,
        runs,
        lambda found: WatchedRun(found.url, run_id_of(found.url), found.settings, hooks.of(found.settings), None, feed),
        lambda run, found: run.take(found.name, found.settings, hooks.of(found.settings)),
    )
    following.look()
    replicating = Replicating(runs, lambda run_id: False, lambda run_id: None, stop)

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
        if file is not None:
            file.write(exposition([feed.summary(run) for run in runs], None, time.time()))
        hooks.close(timeout=0.0 if stop.is_set() else LONGEST_CLOSE)
    all_read = all_read and following.has_looked and not following.troubles
    outcomes: list[Outcome] = []
    for run in runs:
        try:
            states = survey(open_view(run.url, run.settings))
        except CkptguardError as error:
            log("could_not_tell", level="error", run=run.url, reason=error.message)
            all_read = False
            continue
        outcomes += [Outcome.PENDING if state.changed else state.outcome for state in states if state.in_place]
    return of_outcomes(outcomes, could_not_tell=not all_read)


def _settled_pass(run: WatchedRun, work: Work) -> bool:
    """Make passes until nothing is merely settling. Returns whether everything could be read."""
    settle = run.settings.settle
    timeout = _LONGEST_SETTLING + 10 * settle
    while True:
        done = run.step(work)
        if done is None:
            return False
        settling = done.next_in is not None and done.next_in <= settle
        if not settling or timeout <= 0 or work.is_stopped():
            return not (done.could_not_tell or done.unread)
        pause = max(done.next_in or 0.0, 0.05)
        timeout -= pause
        if work.stop is not None and work.stop.wait(pause):
            return False

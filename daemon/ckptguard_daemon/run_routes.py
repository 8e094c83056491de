"""The HTTP routes, each one call of an operation. A bad request gets a sentence and a status.

`docs/reference/http.md` shows one example of each document.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.decisions.known_good import may_be_newer
from ckptguard.documents.build import document, fields
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import (
    CouldNotTellError,
    NoKnownGoodError,
    NotFoundError,
    SettingsError,
)
from ckptguard.inspect.list_states import survey, undecided
from ckptguard.layouts import Checkpoint
from ckptguard.records.incidents import open_incident
from ckptguard.reporting.events import incident_event
from ckptguard.runs.find_known_good import Candidate, KnownGood, Wanted, best_on_record, openable
from ckptguard.runs.history import names_alone
from ckptguard.upkeep.reconcile import PendingSave
from ckptguard.values.access import Role
from ckptguard.values.ids import MAX_STEP, CheckpointId, Step, is_safe_path, single_number
from ckptguard.version import __version__
from ckptguard_daemon.http.replies import number, read_body, refusal, reply
from ckptguard_daemon.http.routes import Route, Served, caller_of
from ckptguard_daemon.jobs import StorageThreads
from ckptguard_daemon.log import log
from ckptguard_daemon.metrics import CONTENT_TYPE

LONGEST_WAIT = 600.0
_LOOK_AGAIN = 30.0  # another daemon may give the verdict that a client waits for
_AT_ONCE, _OF_RUN = 32, 8  # questions that ask a storage


class IncidentBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body that reports an incident."""

    reason: str
    cause: str = "numeric"
    step: int | None = None
    evidence: dict[str, Any] = {}
    source: str = "guard"


class VerifyBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body that asks for a pass; `path` makes it read that checkpoint again."""

    path: str | None = None


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""
    return Answers(served).routes()


class Answers:
    """The routes over the daemon's runs."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._loop, self._passes, self._alive = served.loop, served.passes, served.alive
        self._was_ready = False
        self._turns = StorageThreads(most=_AT_ONCE, of_run=_OF_RUN)

    def routes(self) -> list[Route]:
        """Return the routes."""
        run = "/v1/runs/{run}"
        return [
            Route("/healthz", self._healthz, Role.READER),
            Route("/metrics", self._show_metrics, Role.READER),
            Route("/readyz", self._readyz, Role.READER),
            Route("/v1/runs", self._list_runs, Role.READER),
            Route(f"{run}/checkpoints", self._checkpoints, Role.READER),
            Route(f"{run}/known-good", self._known_good, Role.READER),
            Route(f"{run}/incidents", self._incidents, Role.GUARD, ["POST"]),
            Route(f"{run}/verify", self._verify, Role.GUARD, ["POST"]),
        ]

    async def _healthz(self, request: Request) -> Response:
        alive = self._alive()
        status, presence = "ok" if alive else "the loop has ended, or hangs", fields(self._served.presence, "healthz")
        answer = document(
            "healthz", status=status, version=__version__, **presence, runs=len(self._served.runs_for(request))
        )
        return reply(answer, status=200 if alive else 503)

    async def _show_metrics(self, request: Request) -> Response:
        if caller_of(request).runs is not None:
            return refusal("forbidden", "the metrics tell of all runs, and this token is for some", 403)
        return Response(await run_in_threadpool(self._served.metrics.text), media_type=CONTENT_TYPE)

    async def _readyz(self, request: Request) -> Response:
        """Ready: each place of the fleet was searched, and every run had a pass or a reason why not. Runs that come
        later do not count, and neither does a place that cannot be searched any more."""
        runs = self._served.runs_for(request)
        waiting = {run.run_id for run in self._served.runs if not run.passes and run.trouble is None}
        searched, unseen = self._served.searched(), self._served.unseen_places()
        self._was_ready = self._was_ready or (searched and not unseen and not waiting)
        ready = self._alive() and self._was_ready
        status = "ready" if ready else "starting" if self._alive() else "the loop has ended"
        if status == "starting" and searched and unseen:
            status = "a place cannot be searched"
        answer = document(
            "readyz",
            status=status,
            runs=len(runs),
            without_pass=sum(run.run_id in waiting for run in runs),
            unseen_places=unseen,
        )
        return reply(answer, status=200 if ready else 503)

    async def _list_runs(self, request: Request) -> Response:
        return reply(document("runs", runs=[fields(run) for run in self._served.runs_for(request)]))

    async def _checkpoints(self, request: Request) -> Response:
        guarded = self._served.run_of(request)
        states = await self._turns.do(guarded.run_id, lambda: survey(guarded.look()))
        return reply(document("checkpoints", run=guarded.run_id, target=guarded.url, checkpoints=states))

    async def _known_good(self, request: Request) -> Response:
        guarded = self._served.run_of(request)
        before = number(request, "before_step", int, MAX_STEP + 1)
        series = request.query_params.get("series")
        timeout = min(number(request, "wait_seconds", float, 1e9) or 0.0, LONGEST_WAIT)
        deadline = time.monotonic() + timeout
        waited = False
        while True:
            with self._passes.woken(guarded.run_id) as passed:
                answer, touched, pending = await self._turns.do(
                    guarded.run_id, lambda: self._best_and_pending(guarded, before, series, timeout > 0)
                )
                left = deadline - time.monotonic()
                for path in touched if not waited else ():
                    guarded.ask(path)
                    self._loop.wake(guarded.run_id)
                if not (pending or touched) or left <= 0 or await request.is_disconnected():
                    break
                if not waited and caller_of(request).role >= Role.GUARD:
                    self._loop.wake(guarded.run_id)
                waited = True
                await self._passes.wait(passed, min(left, _LOOK_AGAIN))
        if waited and not request.scope.get("still_in", lambda: True)():
            return refusal("unauthorized", "your token ended while you waited", 401)
        if isinstance(answer, NoKnownGoodError):
            raise answer
        if touched:
            raise CouldNotTellError(
                f"{touched[0]} is read again: something happened to its files since they were verified",
                hint="ask with wait_seconds",
            )
        found = fields(answer, "known-good of the daemon")
        # `pending`: newer checkpoints that may still turn out good, or good again.
        return reply(document("known-good", run=guarded.run_id, **found, waited=waited, pending=pending))

    async def _incidents(self, request: Request) -> Response:
        guarded = self._served.run_of(request)
        run = await self._turns.do(guarded.run_id, guarded.open)
        body = await read_body(request, IncidentBody, empty=None)
        if body.step is not None and not 0 <= body.step <= MAX_STEP:
            raise SettingsError("`step` must be a number of updates, 0 or more")
        incident = await self._turns.do(guarded.run_id, lambda: open_incident(run, **msgspec.structs.asdict(body)))
        log("incident", level="warning", run=run.url, step=incident.step, cause=incident.cause, reason=incident.reason)
        guarded.hooks.tell(run, incident_event(run, incident))
        self._loop.wake(guarded.run_id)
        return reply(document("incident", run=guarded.run_id, incident=incident), status=201)

    async def _verify(self, request: Request) -> Response:
        guarded = self._served.run_of(request)
        run = await self._turns.do(guarded.run_id, guarded.open)
        path = (await read_body(request, VerifyBody, empty=VerifyBody())).path
        if path is not None:
            if path != "." and not is_safe_path(path):
                raise SettingsError("`path` must be the path of a checkpoint, relative to its run")
            if await self._turns.do(guarded.run_id, lambda: guarded.look().checkpoint(path)) is None:
                raise NotFoundError(f"there is no checkpoint {path} in {run.url}")
            guarded.ask(path)
        self._loop.wake(guarded.run_id)
        return reply(document("verify", run=guarded.run_id, path=path, accepted=True), status=202)

    def _best_and_pending(
        self, guarded: WatchedRun, before: int | None, series: str | None, certain: bool
    ) -> tuple[KnownGood | NoKnownGoodError, list[str], list[str]]:
        """Return the current answer, what must be read before it is given, because its ctime is another one, and the
        newer checkpoints that could change it: without a verdict, or changed since.

        With `certain` these are listed now. Otherwise they are as of the last pass, if nothing hinted at a change.
        """

        def best() -> Candidate | NoKnownGoodError:
            try:
                return best_on_record(run, Wanted(before_step=before, series=series, sure=True))
            except NoKnownGoodError as error:
                return error

        def could_change(series_of_it: str, step: Step) -> bool:
            number = single_number(step)
            if series not in (None, series_of_it) or (before is not None and number is not None and number >= before):
                return False
            return isinstance(answer, NoKnownGoodError) or may_be_newer(series_of_it, step, answer.id)

        view = guarded.look()
        run = view.run
        looked = self._alive() and self._loop.has_seen_all(guarded.run_id) and guarded.state == "guarded"
        pending: Sequence[PendingSave | Checkpoint] = guarded.last_pass.pending
        answer, seen = best(), None
        while (certain or not looked) and (seen is None or seen != _id_of(answer)):
            seen = _id_of(answer)
            view.forget()
            found = [c for c in view.checkpoints if could_change(c.series, c.step)]
            pending = undecided(names_alone(view.run), found)
            answer = best()  # again: it may have got its verdict in between
        newer = [w.path for w in pending if could_change(w.series, w.step)]
        if isinstance(answer, NoKnownGoodError):
            return answer, [], newer
        return openable(answer.answer), [part.manifest.path for part in answer.save if part.touched(run)], newer


def _id_of(answer: Candidate | NoKnownGoodError) -> CheckpointId | str:
    return answer.id if isinstance(answer, Candidate) else ""

"""The HTTP routes, each one call of an operation. A bad request gets a sentence and a status.

`docs/reference/http.md` shows one example of each document.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ckptguard.decisions.known_good import may_be_newer
from ckptguard.documents.build import Document, document, fields
from ckptguard.errors import (
    BusyError,
    CkptguardError,
    CouldNotTellError,
    NoKnownGoodError,
    NotFoundError,
    ObjectExistsError,
    RecordsError,
    RefusedError,
    SettingsError,
)
from ckptguard.inspect.list_states import survey, undecided
from ckptguard.layouts import Checkpoint
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.records.incidents import open_incident
from ckptguard.records.names_by_step import list_steps
from ckptguard.reporting.events import incident_event
from ckptguard.runs.find_known_good import KnownGood, find_known_good
from ckptguard.upkeep.reconcile import Waiting
from ckptguard.values.ids import MAX_STEP, CheckpointId, Step, is_safe_path, single_number
from ckptguard.values.record_text import what_is_wrong
from ckptguard.version import __version__
from ckptguard_daemon.guarded import WatchedRun
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import Loop, Passes
from ckptguard_daemon.metrics import CONTENT_TYPE, Metrics
from ckptguard_daemon.roster import Roster

LARGEST_BODY = 64 * 1024
LONGEST_WAIT = 600.0
_BODY_SECONDS = 10.0
_DEEPEST = 32  # levels of tables and lists in a body
_LOOK_AGAIN = 30.0  # another daemon may give the verdict that a client waits for
_HOSTS = {"", "localhost", "ckptguard"}

_STATUS: dict[int, tuple[type[CkptguardError], ...]] = {
    400: (SettingsError,),
    404: (NotFoundError, NoKnownGoodError),
    423: (BusyError,),
    409: (RefusedError, ObjectExistsError),
    503: (CouldNotTellError, RecordsError),
}

_Body = TypeVar("_Body", bound=msgspec.Struct)


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


class Answers:
    """The routes over the daemon's runs."""

    def __init__(
        self,
        runs: Roster,
        loop: Loop,
        passes: Passes,
        presence: DaemonRecord,
        alive: Callable[[], bool],
        metrics: Metrics,
        searched: Callable[[], bool] = lambda: True,
    ) -> None:
        self._runs, self._metrics = runs, metrics
        self._loop, self._passes = loop, passes
        self._presence, self._alive, self._searched = presence, alive, searched
        self._was_ready = False

    def application(self) -> ASGIApp:
        """Return the ASGI application."""
        run = "/v1/runs/{run}"
        routes = [
            Route("/healthz", self._healthz),
            Route("/metrics", self._show_metrics),
            Route("/readyz", self._readyz),
            Route("/v1/runs", self._list_runs),
            Route(f"{run}/checkpoints", self._checkpoints),
            Route(f"{run}/known-good", self._known_good),
            Route(f"{run}/incidents", self._incidents, methods=["POST"]),
            Route(f"{run}/verify", self._verify, methods=["POST"]),
        ]
        failures: Any = {CkptguardError: _answer_error, HTTPException: _answer_http_error, Exception: _answer_mistake}
        return _OnlyLocalCallers(Starlette(routes=routes, exception_handlers=failures))

    async def _healthz(self, request: Request) -> Response:
        alive = self._alive()
        status, presence = "ok" if alive else "the loop has ended", fields(self._presence, "healthz")
        answer = document("healthz", status=status, version=__version__, **presence, runs=len(self._runs))
        return _json(answer, status=200 if alive else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(await run_in_threadpool(self._metrics.text), media_type=CONTENT_TYPE)

    async def _readyz(self, request: Request) -> Response:
        """Ready: the fleet was searched, and every run had a pass or a reason why not. Runs that come later do not
        count."""
        waiting = sum(not run.passes and run.trouble is None for run in self._runs)
        self._was_ready = self._was_ready or (self._searched() and not waiting)
        ready = self._alive() and self._was_ready
        status = "ready" if ready else "starting" if self._alive() else "the loop has ended"
        answer = document("readyz", status=status, runs=len(self._runs), without_pass=waiting)
        return _json(answer, status=200 if ready else 503)

    async def _list_runs(self, request: Request) -> Response:
        return _json(document("runs", runs=[fields(run) for run in self._runs]))

    async def _checkpoints(self, request: Request) -> Response:
        guarded = self._guarded(request)
        states = await run_in_threadpool(lambda: survey(guarded.look(), guarded.states))
        return _json(document("checkpoints", run=guarded.run_id, target=guarded.url, checkpoints=states))

    async def _known_good(self, request: Request) -> Response:
        guarded = self._guarded(request)
        before = _number(request, "before_step", int, MAX_STEP + 1)
        series = request.query_params.get("series")
        patience = min(_number(request, "wait_seconds", float, 1e9) or 0.0, LONGEST_WAIT)
        deadline = time.monotonic() + patience
        waited = False
        while True:
            with self._passes.next(guarded.run_id) as passed:
                answer, pending = await run_in_threadpool(self._best_and_pending, guarded, before, series, patience > 0)
                left = deadline - time.monotonic()
                if not pending or left <= 0:
                    break
                if not waited:
                    self._loop.wake(guarded.run_id)
                waited = True
                await self._passes.wait(passed, min(left, _LOOK_AGAIN))
        if isinstance(answer, NoKnownGoodError):
            raise answer
        found = fields(answer, "known-good of the daemon")
        # `pending`: newer checkpoints that may still turn out good, or good again.
        return _json(document("known-good", run=guarded.run_id, **found, waited=waited, pending=pending))

    async def _incidents(self, request: Request) -> Response:
        guarded = self._guarded(request)
        run = await run_in_threadpool(guarded.open)
        body = await _body(request, IncidentBody, empty=None)
        if body.step is not None and not 0 <= body.step <= MAX_STEP:
            raise SettingsError("`step` must be a number of updates, 0 or more")
        incident = await run_in_threadpool(open_incident, run, **msgspec.structs.asdict(body))
        log("incident", level="warning", run=run.url, step=incident.step, cause=incident.cause, reason=incident.reason)
        guarded.hooks.tell(incident_event(run, incident))
        self._loop.wake(guarded.run_id)
        return _json(document("incident", run=guarded.run_id, incident=incident), status=201)

    async def _verify(self, request: Request) -> Response:
        guarded = self._guarded(request)
        run = await run_in_threadpool(guarded.open)
        path = (await _body(request, VerifyBody, empty=VerifyBody())).path
        if path is not None:
            if path != "." and not is_safe_path(path):
                raise SettingsError("`path` must be the path of a checkpoint, relative to its run")
            if await run_in_threadpool(lambda: guarded.look().checkpoint(path)) is None:
                raise NotFoundError(f"there is no checkpoint {path} in {run.url}")
            guarded.ask(path)
        self._loop.wake(guarded.run_id)
        return _json(document("verify", run=guarded.run_id, path=path, accepted=True), status=202)

    def _best_and_pending(
        self, guarded: WatchedRun, before: int | None, series: str | None, certain: bool
    ) -> tuple[KnownGood | NoKnownGoodError, list[str]]:
        """Return the current answer, and the newer checkpoints that could change it: without a verdict, or changed
        since.

        With `certain` these are listed now. Otherwise they are as of the last pass, if nothing hinted at a change.
        """

        def best() -> KnownGood | NoKnownGoodError:
            try:
                return find_known_good(run, before_step=before, series=series)
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
        pending: Sequence[Waiting | Checkpoint] = guarded.last_pass.pending
        answer, seen = best(), None
        while (certain or not looked) and (seen is None or seen != _id_of(answer)):
            seen = _id_of(answer)
            view.forget()
            found = [c for c in view.checkpoints if could_change(c.series, c.step)]
            pending = undecided(view, list_steps(view.run), found)
            answer = best()  # again: it may have got its verdict in between
        return answer, [w.path for w in pending if could_change(w.series, w.step)]

    def _guarded(self, request: Request) -> WatchedRun:
        guarded = self._runs.get(request.path_params["run"])
        if guarded is None:
            raise NotFoundError(
                f"this daemon does not guard a run {request.path_params['run'][:40]}", hint="GET /v1/runs lists them"
            )
        return guarded


def _id_of(answer: KnownGood | NoKnownGoodError) -> CheckpointId | str:
    return answer.id if isinstance(answer, KnownGood) else ""


def _number(request: Request, name: str, kind: Callable[[str], Any], most: float) -> Any:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = kind(text[:40])
    except ValueError:
        value = None
    if value is None or not 0 <= value <= most:
        raise SettingsError(f"`{name}` must be a number, 0 or more")
    return value


async def _body(request: Request, kind: type[_Body], empty: _Body | None) -> _Body:
    """Read the request's JSON body, with limited size and time."""
    data = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for block in request.stream():
                data += block
                if len(data) > LARGEST_BODY:
                    raise HTTPException(413, f"the body is longer than {LARGEST_BODY} bytes")
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended early") from None
    if not data and empty is not None:
        return empty
    try:
        body = msgspec.json.decode(data, type=kind)
        if _is_deep(msgspec.structs.asdict(body)):
            raise RecursionError
    except RecursionError:
        raise SettingsError(f"the body is nested deeper than {_DEEPEST} levels") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SettingsError(f"the body does not have the expected form: {what_is_wrong(error)}") from error
    return body


def _is_deep(value: Any) -> bool:
    """True if tables and lists are nested too deep for some JSON readers."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        inner = (v.values() if isinstance(v, dict) else v if isinstance(v, list) else () for v in level)
        level = [v for values in inner for v in values]
    return bool(level)


def _json(document: Document, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document) + b"\n", status_code=status, media_type="application/json")


def _refusal(kind: str, message: str, status: int, hint: str | None = None) -> Response:
    return _json({"error": {"kind": kind, "message": message, "hint": hint}}, status)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CkptguardError)
    status = next((status for status, kinds in _STATUS.items() if isinstance(error, kinds)), 500)
    return _refusal(error.kind, error.message, status, error.hint)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "not_found", 405: "method", 408: "timeout", 413: "too_large"}
    return _refusal(kinds.get(error.status_code, "request"), error.detail, error.status_code)


async def _answer_mistake(request: Request, error: Exception) -> Response:
    log("answer_failed", level="error", path=request.url.path, reason=f"{type(error).__name__}: {error}")
    return _refusal("error", f"unexpected {type(error).__name__}", 500)


class _OnlyLocalCallers:
    """Refuses what a browser could be made to send: a foreign Host, or any Origin."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.lower(): value for name, value in scope["headers"]}
            host = headers.get(b"host", b"").decode("latin-1").partition(":")[0]
            if host.lower() not in _HOSTS or b"origin" in headers:
                refusal = _refusal("forbidden", "only programs on this machine may send requests", 403)
                await refusal(scope, receive, send)
                return
        await self._application(scope, receive, send)

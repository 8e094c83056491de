"""What a route is: a path, what answers there, and the role that a caller needs.

A module of routes has one function, ``routes(served) -> list[Route]``; `ckptguard_daemon.application` lists them.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import NotFoundError
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.values.access import Role as Role
from ckptguard.values.ids import name_of_run
from ckptguard.values.settings import fits_run
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.http.replies import refusal, unauthorized
from ckptguard_daemon.jobs import Jobs
from ckptguard_daemon.loop import Loop, Waiters
from ckptguard_daemon.metrics import Metrics
from ckptguard_daemon.reading import Clicks
from ckptguard_daemon.run_set import RunSet


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. `runs` are patterns for names, URLs and labels of runs; None means all. `expires`: in seconds since
    1970. `is_owner`: the user who runs the daemon, on a page or connection of their own."""

    name: str
    role: Role
    runs: tuple[str, ...] | None = None
    expires: float | None = None
    is_owner: bool = False

    def sees(self, run: WatchedRun) -> bool:
        """True if this run exists for the caller."""
        names = (run.name or name_of_run(run.url), run.url, run.run_id)
        return self.runs is None or any(fits_run(p, names, run.settings.labels) for p in self.runs)


STREAMS = 240  # at a time: 200 pages, and those that connect anew

OWNER = Caller(name="owner", role=Role.OPERATOR, is_owner=True)  # a process that can open the Unix socket


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the routes answer about. `stop` is set when the daemon ends: then streams end."""

    runs: RunSet
    loop: Loop
    passes: Waiters
    presence: DaemonRecord
    feed: CatalogueFeed
    metrics: Metrics
    alive: Callable[[], bool]
    searched: Callable[[], bool] = lambda: True
    unseen_places: Callable[[], int] = lambda: 0
    stop: threading.Event
    jobs: Jobs = field(default_factory=lambda: Jobs(threading.Event()))
    clicks: Clicks = field(default_factory=Clicks)  # all that they read shares one bound

    def run_of(self, request: Request) -> WatchedRun:
        """Return the run that the path names. Raises NotFoundError, also if the caller may not see it."""
        run = self.runs.get(request.path_params["run"])
        if run is None or not caller_of(request).sees(run):
            name = request.path_params["run"][:40]
            raise NotFoundError(f"this daemon does not guard a run {name}", hint="GET /v1/runs lists them")
        return run

    def runs_for(self, request: Request) -> list[WatchedRun]:
        """Return the runs that exist for the caller."""
        caller = caller_of(request)
        return [run for run in self.runs if caller.sees(run)]


def caller_of(request: Request) -> Caller:
    """Return who asks. Only for routes with a role."""
    caller: Caller = request.scope["caller"]
    return caller


class Route(routing.Route):
    """A route that only callers of a role reach. With None anybody does, who passed the gate.

    The answer of a `stream` has no end. At most `STREAMS` of them are open.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        role: Role | None,
        methods: Sequence[str] = ("GET",),
        *,
        stream: bool = False,
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self.role, self.stream, self._under_way = role, stream, 0
        if stream:
            self.methods = set(methods)  # HEAD would never end

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        refused = self._refusal(scope.get("caller"))
        if refused is not None:
            await refused(scope, receive, send)
            return
        self._under_way += 1
        try:
            await super().handle(scope, receive, send)
        finally:
            self._under_way -= 1

    def _refusal(self, caller: Caller | None) -> Response | None:
        if self.role is None:
            return None
        if caller is None:
            return unauthorized("a token is needed", "`ckptguard token --help` says how to get one")
        if caller.role < self.role:
            return refusal("forbidden", f"this needs the role {self.role.word}", 403)
        if self.stream and self._under_way >= STREAMS:
            return refusal("busy", "too many streams at a time", 503)
        return None

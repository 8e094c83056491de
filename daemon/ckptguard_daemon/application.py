"""The application: every route of the daemon, behind the gate of the socket at which it is asked."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptguard_daemon import run_routes
from ckptguard_daemon.dashboard import (
    actions,
    compare,
    events,
    heat,
    incident,
    one_checkpoint,
    page_files,
    pages,
)
from ckptguard_daemon.http import session_routes
from ckptguard_daemon.http.gate import Admit
from ckptguard_daemon.http.replies import REFUSALS
from ckptguard_daemon.http.routes import Route, Served

# Each has `routes(served)`.
_MODULES = (
    run_routes,
    session_routes,
    page_files,
    pages,
    events,
    one_checkpoint,
    heat,
    compare,
    incident,
    actions,
)
_HEADERS = {
    "Content-Security-Policy": page_files.POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def routes(served: Served) -> list[Route]:
    """Return the routes, for the applications of all sockets."""
    return [route for module in _MODULES for route in module.routes(served)]


def application(routes: Sequence[Route], admit: Admit) -> ASGIApp:
    """Return the ASGI application of one socket. `admit` says why a request is refused, or notes its caller, of whom
    the routes ask a role."""
    every = Starlette(routes=routes, exception_handlers=REFUSALS)
    every.router.redirect_slashes = False  # it would name a place that a proxy may show elsewhere

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and tell browsers what the answer may do, also a refusal."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "http":
            await (admit(scope, Headers(scope=scope)) or every)(scope, receive, send_with_headers)

    return answer

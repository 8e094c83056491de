"""The application: every route of the daemon, behind the gate of the socket at which it is asked."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
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
from ckptguard_daemon.dashboard.reading import Clicks
from ckptguard_daemon.http import session_routes
from ckptguard_daemon.http.gate import Admission, Admit
from ckptguard_daemon.http.replies import REFUSALS
from ckptguard_daemon.http.routes import Route, Served

_MODULES = (run_routes, session_routes, page_files, pages, events)  # each has `routes(served)`
# What is read or done only when somebody clicks: `routes(served, clicks)`.
_OF_CLICKS = (one_checkpoint, heat, compare, incident, actions)
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
    clicks = Clicks()  # all that they read shares one bound
    found = [module.routes(served) for module in _MODULES] + [module.routes(served, clicks) for module in _OF_CLICKS]
    return [route for routes in found for route in routes]


def application(routes: Sequence[Route], admit: Admit) -> ASGIApp:
    """Return the ASGI application of one socket."""
    gate = Middleware(Admission, admit=admit)
    found = Starlette(routes=routes, middleware=[gate], exception_handlers=REFUSALS)
    found.router.redirect_slashes = False  # it would name a place that a proxy may show elsewhere
    return _SafeHeaders(found)


class _SafeHeaders:
    """Tells browsers what an answer may do, also a refusal."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._application(scope, receive, send_with_headers)

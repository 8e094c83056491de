"""The application: every route of the daemon, behind the gate of the socket at which it is asked."""

from __future__ import annotations

from starlette.applications import Starlette

from ckptguard_daemon.dashboard import clicks, curves, events, pages
from ckptguard_daemon.http import access, answers, page_files
from ckptguard_daemon.http.replies import REFUSALS
from ckptguard_daemon.http.routes import Served

_MODULES = (answers, access, page_files, pages, curves, events, clicks)  # each has `routes(served)`


def application(served: Served) -> Starlette:
    """Return the ASGI application, without a gate."""
    routes = [route for module in _MODULES for route in module.routes(served)]
    return Starlette(routes=routes, exception_handlers=REFUSALS)

"""The gate of the Unix socket: a process that can open it is its owner's."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ckptguard_daemon.http.replies import refusal
from ckptguard_daemon.http.routes import OWNER

_HOSTS = {"", "localhost", "ckptguard"}


class LocalGate:
    """Refuses what a browser could be made to send: a foreign Host, or any Origin."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            headers = {name.lower(): value for name, value in scope["headers"]}
            host = headers.get(b"host", b"").decode("latin-1").partition(":")[0]
            if host.lower() not in _HOSTS or b"origin" in headers:
                refused = refusal("forbidden", "only programs on this machine may send requests", 403)
                await refused(scope, receive, send)
                return
            scope["caller"] = OWNER
        await self._application(scope, receive, send)

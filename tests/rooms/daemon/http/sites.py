"""A site on loopback: the real application, its gate and its server, in this process, and what is said to it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

from ckptguard_daemon.application import application
from ckptguard_daemon.http.server import HttpServer
from ckptguard_daemon.http.web_server import WebServer
from ckptguard_daemon.plan import ListenOptions
from gate_calls import SECRETS, Behind
from support.daemon_process import PATIENCE

from ckptguard.values.access import Role

TOKEN = f"Authorization: Bearer {SECRETS[Role.READER]}\r\n"


def unfinished(host: str, more: int = 0) -> dict[str, bytes]:
    """What a slow client has sent: nothing, or half a head or half a body, with so many bytes more of it."""
    body = f"POST /v1/session HTTP/1.1\r\nHost: {host}\r\nContent-Length: {more + 50}\r\n\r\n{{"
    return {
        "nothing": b"",
        "half a head": f"GET / HTTP/1.1\r\nHost: {host}\r\nX: ".encode() + b"x" * more,
        "half a body": body.encode() + b"x" * more,
    }


UNFINISHED = tuple(unfinished("localhost"))


class Site:
    """A front that serves `Behind`'s application."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.behind = Behind(folder)
        self.web_server = WebServer(
            ListenOptions(http="127.0.0.1:0", tokens=str(self.behind.tokens), **options)  # type: ignore[arg-type]
        )
        self.port = int(self.web_server.tcp_access.cookie.rpartition("-")[2])  # its name holds it
        application_ = application(self.behind.routes, self.web_server.tcp_access.admit)
        self.server: HttpServer = self.web_server.server(application_)
        self.context: ssl.SSLContext | None = None
        assert self.server.start()

    def connect(self) -> socket.socket:
        """A connection, with TLS if this is a site with it."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        return made if self.context is None else self.context.wrap_socket(made, server_hostname="localhost")

    def say(self, text: str | bytes) -> bytes:
        """All that is answered to this until the other side closes."""
        with self.connect() as made:
            made.sendall(text.encode("latin-1") if isinstance(text, str) else text)
            return rest_of(made)

    def get(self, path: str, more: str = "") -> bytes:
        """What one request is answered, as it comes."""
        return self.say(f"GET {path} HTTP/1.1\r\nHost: localhost:{self.port}\r\nConnection: close\r\n{more}\r\n")

    def works(self) -> bool:
        """Whether somebody with a token is answered."""
        with contextlib.suppress(OSError):  # it was ended for others
            return self.get("/v1/me", TOKEN).startswith(b"HTTP/1.1 200 ")
        return False

    def close(self) -> None:
        """End it as the daemon does: streams first."""
        self.behind.served.stop.set()
        self.behind.served.feed.wake()
        self.server.close()


def rest_of(made: socket.socket) -> bytes:
    """All that comes until the end."""
    parts = []
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        while part := made.recv(65536):
            parts.append(part)
    return b"".join(parts)

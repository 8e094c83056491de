"""The real application behind its gate, asked within this process, or as a site on loopback with its own server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

from ckptguard_daemon.application import application, routes
from ckptguard_daemon.http.callers import Callers
from ckptguard_daemon.http.gate import Names, TcpAccess
from ckptguard_daemon.http.server import HttpServer
from ckptguard_daemon.http.web_server import WebServer
from ckptguard_daemon.plan import ListenOptions
from support.daemon_process import PATIENCE
from support.served_runs import Answer, answer_of, served, watched

from ckptguard.values.access import Role, Token, digest_of
from ckptguard.values.settings import Settings

PORT = 8123
SECRETS = {role: f"secret-of-the-{role.word}" for role in Role}
LIMITED = "secret-for-some-runs"  # an operator who sees the runs of `shown` alone


class Behind:
    """Two runs behind a gate: ``shown/run`` and ``hidden/run``."""

    def __init__(self, folder: Path, *, secure: bool = False, url: str | None = None, beyond: bool = False) -> None:
        settings = Settings(settle=0.0, keep="none")
        for name in ("shown", "hidden"):
            (folder / name / "run").mkdir(parents=True)
        self.shown, self.hidden = (watched(folder / name / "run", settings) for name in ("shown", "hidden"))
        tokens = [Token(name=role.word, role=role, digest=digest_of(SECRETS[role])) for role in Role]
        digest = digest_of(LIMITED)
        tokens.append(Token(name="limited", role=Role.OPERATOR, digest=digest, runs=(f"{folder}/shown/*",)))
        self.tokens = folder / "tokens"
        self.tokens.touch(0o600)
        self.tokens.write_text("".join(f"{token.line}\n" for token in tokens))
        self.served = served([self.shown, self.hidden])
        self.callers = Callers(str(self.tokens), Role.OPERATOR)
        names = Names(url, "127.0.0.1" if beyond else None)
        self.tcp_access = TcpAccess(self.callers, names, secure=secure, port=PORT)
        self.routes = routes(self.served)
        self.application = application(self.routes, self.tcp_access.admit)
        self._addresses = iter(range(1, 2**31))

    def ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        address: str | None = None,
    ) -> Answer:
        """Send one request, by default from an address of its own."""
        given = {"host": f"127.0.0.1:{PORT}", **(headers or {})}
        scheme = "https" if self.tcp_access.secure else "http"
        client = (address or f"192.0.2.{next(self._addresses)}", 1)
        more = {"scheme": scheme, "client": client}
        return asyncio.run(answer_of(self.application, path, method=method, headers=given, body=body, **more))

    def log_in(self, secret: str) -> str:
        """The Cookie header of a new session."""
        answer = self.ask("POST", "/v1/session", body=b'{"token": "%s"}' % secret.encode())
        assert answer.status == 201, answer
        return answer.headers["set-cookie"].partition(";")[0]


def bearer(secret: str) -> dict[str, str]:
    """The header that names a token."""
    return {"authorization": f"Bearer {secret}"}


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

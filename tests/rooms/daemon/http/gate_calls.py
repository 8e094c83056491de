"""The real application behind its gate, within this process, and requests to it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ckptguard_daemon.application import application, routes
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.http.callers import Callers
from ckptguard_daemon.http.gate import Names, TcpAccess
from ckptguard_daemon.http.routes import Served
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import Loop, Passes
from ckptguard_daemon.metrics import Metrics
from ckptguard_daemon.run_set import RunSet

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.reporting.notify import Hooks
from ckptguard.values.access import Role, Token, digest_of
from ckptguard.values.ids import run_id_of
from ckptguard.values.settings import Settings

PORT = 8123
SECRETS = {role: f"secret-of-the-{role.word}" for role in Role}
LIMITED = "secret-for-some-runs"  # an operator who sees the runs of `shown` alone


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


class Behind:
    """Two runs behind a gate: ``shown/run`` and ``hidden/run``."""

    def __init__(self, folder: Path, *, secure: bool = False, url: str | None = None, beyond: bool = False) -> None:
        settings = Settings(settle=0.0, keep="none")
        made = []
        for name in ("shown", "hidden"):
            path = folder / name / "run"
            path.mkdir(parents=True)
            made.append(WatchedRun(str(path), run_id_of(str(path)), settings, Hooks(settings, log), None))
        self.shown, self.hidden = made
        run_set = RunSet(made)
        tokens = [Token(name=role.word, role=role, digest=digest_of(SECRETS[role])) for role in Role]
        digest = digest_of(LIMITED)
        tokens.append(Token(name="limited", role=Role.OPERATOR, digest=digest, runs=(f"{folder}/shown/*",)))
        self.tokens = folder / "tokens"
        self.tokens.touch(0o600)
        self.tokens.write_text("".join(f"{token.line}\n" for token in tokens))
        self.served = Served(
            runs=run_set,
            loop=Loop(run_set, threading.Event(), lambda run: None),
            passes=Passes(),
            presence=DaemonRecord(address="", host="", boot_id="", pid=0, started_at=""),
            feed=CatalogueFeed(),
            metrics=Metrics(list, lambda: 0.0),
            alive=lambda: True,
            stop=threading.Event(),
        )
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
        plain, _, query = path.partition("?")
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"spec_version": "2.3"},
            "scheme": "https" if self.tcp_access.secure else "http",
            "method": method,
            "path": plain,
            "raw_path": quote(plain).encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": (address or f"192.0.2.{next(self._addresses)}", 1),
        }
        return asyncio.run(self._answer(scope, body))

    async def _answer(self, scope: dict[str, Any], body: bytes) -> Answer:
        parts: list[Any] = []
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return waiting.pop() if waiting else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            parts.append(message)

        await self.application(scope, receive, send)
        headers = {name.decode(): value.decode("latin-1") for name, value in parts[0]["headers"]}
        return Answer(parts[0]["status"], headers, b"".join(part.get("body", b"") for part in parts[1:]))

    def log_in(self, secret: str) -> str:
        """The Cookie header of a new session."""
        answer = self.ask("POST", "/v1/session", body=b'{"token": "%s"}' % secret.encode())
        assert answer.status == 201, answer
        return answer.headers["set-cookie"].partition(";")[0]


def bearer(secret: str) -> dict[str, str]:
    """The header that names a token."""
    return {"authorization": f"Bearer {secret}"}

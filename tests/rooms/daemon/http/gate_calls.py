"""The real application behind its gate, within this process, and requests to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ckptguard_daemon.application import application, routes
from ckptguard_daemon.http.callers import Callers
from ckptguard_daemon.http.gate import Names, TcpAccess
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

"""The routes of a browser's session: how it begins, and how it ends."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.documents.build import document
from ckptguard.errors import NotFoundError, SettingsError
from ckptguard.records.who_and_when import utc_text
from ckptguard.values.access import Role
from ckptguard_daemon.http.gate import TcpAccess, address_of_client
from ckptguard_daemon.http.replies import read_body, refusal, reply
from ckptguard_daemon.http.routes import Route, Served
from ckptguard_daemon.log import log

_LONGEST_SECRET = 1024


class LoginBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body that begins a session: a token, or the secret of a link."""

    token: str


def _tcp_access_of(request: Request) -> TcpAccess:
    tcp_access: TcpAccess | None = request.scope.get("door")
    if tcp_access is None:
        raise NotFoundError("there are no sessions on this socket", hint="who can open it needs none")
    return tcp_access


async def _log_in(request: Request) -> Response:
    tcp_access = _tcp_access_of(request)
    token = (await read_body(request, LoginBody)).token.strip()
    if len(token) > _LONGEST_SECRET:
        raise SettingsError("this is no token")
    now = time.time()
    made = tcp_access.try_secret(request.scope, token, lambda: tcp_access.callers.log_in(token, now))
    if isinstance(made, Response):
        return made
    if made is None:
        log("login_refused", level="warning", address=address_of_client(request.scope))
        hint = "ask for a new link or token" if request.headers.get("origin") else None
        return refusal("unauthorized", "this token or link is wrong, was used, or has expired", 401, hint)
    secret, expires = made
    answer = reply(document("session", expires=utc_text(expires)), 201)
    _set_cookie(answer, tcp_access, secret, int(expires - now))
    return answer


async def _log_out(request: Request) -> Response:
    tcp_access = _tcp_access_of(request)
    session = tcp_access.session_of(request.headers)
    if session is not None:
        tcp_access.callers.log_out(session)
    answer = reply(document("session", expires=None))
    _set_cookie(answer, tcp_access, "", 0)
    return answer


def _set_cookie(answer: Response, tcp_access: TcpAccess, value: str, seconds: int) -> None:
    answer.set_cookie(
        tcp_access.cookie,
        value,
        max_age=seconds,
        path=tcp_access.path,
        secure=tcp_access.secure,
        httponly=True,
        samesite="strict",
    )


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""
    return [
        Route("/v1/session", _log_in, None, ["POST"]),
        Route("/v1/session", _log_out, Role.READER, ["DELETE"]),
    ]

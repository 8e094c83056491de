"""The gate of the TCP socket: it decides who asks, and refuses what a foreign web page could make a browser send."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptguard.values.access import digest_of
from ckptguard_daemon.http.attempts import Attempts
from ckptguard_daemon.http.callers import Callers
from ckptguard_daemon.http.connections import MOST
from ckptguard_daemon.http.page_files import POLICY
from ckptguard_daemon.http.replies import refusal
from ckptguard_daemon.http.routes import Caller

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
_SAFE = ("GET", "HEAD")
MOST_OF_CALLER = MOST // 4
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """By which names the socket may be asked. `url`: how browsers reach it through a proxy. `beyond`: it listens for
    other machines."""

    url: str | None = None
    names: tuple[str, ...] = ()
    beyond: bool = False

    def origin_of(self, host: str, scheme: str) -> str | None:
        """Return the origin of our own pages at this Host. None if it is not ours: then its name may lead anywhere."""
        match = _HOST.fullmatch(host)
        if match is None:
            return None
        if self.url is not None and host.lower() == urlsplit(self.url).netloc.lower():
            return self.url.lower()
        name = match[1].lower()
        return f"{scheme}://{host.lower()}" if name in ("localhost", *self.names) or self._is_address(name) else None

    def _is_address(self, name: str) -> bool:
        """True for a number of this machine: nobody can make it lead elsewhere, as names can be."""
        try:
            found = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self.beyond or found.is_loopback


def own_names(host: str, url: str | None, *, beyond: bool) -> Names:
    """Return by which names a socket at this host may be asked."""
    names = (host.lower(), socket.gethostname().lower()) if beyond else ()
    return Names(url=url, names=names, beyond=beyond)


class Door:
    """What the routes of sessions need to know of the gate by which a request came; it is `scope["door"]`."""

    def __init__(self, callers: Callers, *, secure: bool, port: int) -> None:
        self.callers, self.attempts, self.secure = callers, Attempts(), secure
        # Browsers send a cookie to every port of a host, so each port has its own.
        self.cookie = f"{'__Host-' if secure else ''}ckptguard-{port}"

    def session_of(self, headers: Headers) -> str | None:
        """Return the session that a request names."""
        return cookie_parser(headers.get("cookie", "")).get(self.cookie)  # lenient: others on this host set odd ones


def too_many(wait: float) -> Response:
    """Return the refusal of who tried too many secrets."""
    refused = refusal("too_many", "too many wrong tokens came from there", 429, f"try again in {int(wait) + 1} s")
    refused.headers["Retry-After"] = str(int(wait) + 1)
    return refused


class TcpGate:
    """Lets requests through with their caller, if they have one; the routes ask for its role.

    A caller has at most `MOST_OF_CALLER` under way, so that its long ones leave connections to others.
    """

    def __init__(self, application: ASGIApp, names: Names, door: Door) -> None:
        self._application, self._names, self._door = application, names, door
        self._under_way = Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        scope["door"] = self._door
        answer = self._refusal(scope, Headers(scope=scope)) or self._counted
        await answer(scope, receive, send_with_headers)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless too many of the caller's requests are under way. Streams are counted elsewhere."""
        caller: Caller | None = scope.get("caller")
        if caller is None:
            await self._application(scope, receive, send)
            return
        if self._under_way[caller.name] >= MOST_OF_CALLER:
            refused = refusal("busy", "too many of your requests are under way", 503, "wait for their answers")
            await refused(scope, receive, send)
            return
        counted, is_stream = [caller.name], scope.get("is_stream", lambda: None)

        def leave() -> None:
            while counted:
                self._under_way[counted.pop()] -= 1
            self._under_way = +self._under_way

        def note_stream() -> None:
            leave()
            is_stream()

        scope["is_stream"] = note_stream
        self._under_way[caller.name] += 1
        try:
            await self._application(scope, receive, send)
        finally:
            leave()

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return why a request is refused. Otherwise None, and `caller` in its scope."""
        own = self._names.origin_of(headers.get("host", ""), scope["scheme"])
        if own is None:
            return refusal("forbidden", "the Host is not a name of this daemon", 403, "--http-url names one more")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != own:
            return refusal("forbidden", "the Origin is not a page of this daemon", 403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not _is_a_link(scope, headers):
            return refusal("forbidden", "a page of another site may not ask", 403)
        if "authorization" in headers:
            return self._by_token(scope, headers["authorization"])
        session = self._door.session_of(headers)
        if session is not None:
            self._admit(scope, lambda: self._door.callers.by_session(session, time.time()))
        if scope.get("caller") is not None and origin is None and scope["method"] not in _SAFE:
            return refusal("forbidden", "a request with a session needs an Origin", 403, "send a token instead")
        return None

    def _by_token(self, scope: Scope, given: str) -> Response | None:
        door, address = self._door, address_of_client(scope)
        kind, _, secret = given.partition(" ")
        secret = secret.strip()
        is_guess = not door.attempts.is_repeated(digest_of(secret))
        wait = door.attempts.begin(address, time.monotonic()) if is_guess else 0.0
        if wait > 0:
            return too_many(wait)
        if kind.lower() == "bearer":
            self._admit(scope, lambda: door.callers.by_secret(secret, time.time()))
        if scope.get("caller") is None:
            door.attempts.was_wrong(digest_of(secret))
            refused = refusal("unauthorized", "this token is wrong, or it has expired", 401)
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused
        if is_guess:
            door.attempts.worked(address)
        return None

    def _admit(self, scope: Scope, who: Callable[[], Caller | None]) -> None:
        """Note who asks. A stream asks `still_in` now and then: its token or session may have ended."""
        caller = scope["caller"] = who()
        scope["still_in"] = lambda: caller is not None and who() == caller


def address_of_client(scope: Scope) -> str:
    """Return from where a request came."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _is_a_link(scope: Scope, headers: Headers) -> bool:
    """True if somebody followed a link to us, and the browser shows our answer as a page."""
    shown = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return shown and scope["method"] in _SAFE

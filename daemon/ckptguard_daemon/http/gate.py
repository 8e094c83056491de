"""The gates of the sockets: they decide who asks, and refuse what a foreign web page could make a browser send."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import Scope

from ckptguard.values.access import digest_of
from ckptguard_daemon.http.callers import Callers
from ckptguard_daemon.http.replies import refusal, unauthorized
from ckptguard_daemon.http.routes import OWNER, Caller

Admit = Callable[[Scope, Headers], Response | None]
_Found = TypeVar("_Found")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
_SAFE = ("GET", "HEAD")
MOST, SECONDS = 20, 60.0  # wrong secrets, and until each is forgotten
_MOST_ADDRESSES = 1024


def admit_owner(scope: Scope, headers: Headers) -> Response | None:
    """Admit who asks by the Unix socket: a process that can open it is its owner's. A browser could be made to send a
    foreign Host, or any Origin."""
    host = headers.get("host", "").partition(":")[0]
    if host.lower() not in ("", "localhost", "ckptguard") or "origin" in headers:
        return refusal("forbidden", "only programs on this machine may send requests", 403)
    scope["caller"] = OWNER
    return None


class Names:
    """By which names a socket may be asked. `url`: how browsers reach it through a proxy. `host`: where it listens, if
    other machines can connect."""

    def __init__(self, url: str | None = None, host: str | None = None) -> None:
        self._url, self._is_beyond = url, host is not None
        self._names = ("localhost",) if host is None else ("localhost", host.lower(), socket.gethostname().lower())

    def origin_of(self, host: str, scheme: str) -> str | None:
        """Return the origin of our own pages at this Host. None if it is not ours: then its name may lead anywhere."""
        match = _HOST.fullmatch(host)
        if match is None:
            return None
        if self._url is not None and host.lower() == (known := urlsplit(self._url.lower())).netloc:
            return f"{known.scheme}://{known.netloc}"
        name = match[1].lower()
        return f"{scheme}://{host.lower()}" if name in self._names or self._is_address(name) else None

    def _is_address(self, name: str) -> bool:
        """True for a number of this machine: nobody can make it lead elsewhere, as names can be."""
        try:
            found = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._is_beyond or found.is_loopback


class Attempts:
    """Remembers wrong secrets by their digests. A program that repeats an expired token guesses nothing. What was right
    does not wait for what others try from its address: behind a proxy all have the same."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wait(self, address: str, digest: str, now: float) -> float:
        """Return the seconds until a secret may be tried, 0 for now."""
        key = _network_of(address)
        if (key, digest) in self._right:
            return 0.0
        wrong = self._wrong.get(key, {})
        for old in [other for other, at in wrong.items() if at + SECONDS <= now]:
            del wrong[old]
        return 0.0 if digest in wrong or len(wrong) < MOST else min(wrong.values()) + SECONDS - now

    def was_wrong(self, address: str, digest: str, now: float) -> None:
        """Remember a secret that was tried."""
        key = _network_of(address)
        self._wrong.setdefault(key, {}).setdefault(digest, now)
        self._wrong.move_to_end(key)
        if len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)

    def was_right(self, address: str, digest: str) -> None:
        """Remember a secret that lets somebody in."""
        self._right[_network_of(address), digest] = None
        if len(self._right) > _MOST_ADDRESSES:
            self._right.popitem(last=False)


def _network_of(address: str) -> str:
    """Return what one user can choose addresses from: of IPv6 it is a network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address


class TcpAccess:
    """Who may come in by TCP: tokens and sessions. The routes of sessions find it as `scope["door"]`."""

    def __init__(self, callers: Callers, names: Names, *, secure: bool, port: int, path: str = "") -> None:
        """`path`: below which a proxy shows the page. Browsers send the cookie only there."""
        self.callers, self.secure, self.path = callers, secure, f"{path}/"
        # Browsers send a cookie to every port of a host, so each port has its own. With the prefix `__Host-` they let
        # nobody else set it, but it must be for the whole host.
        prefix = ("__Secure-" if path else "__Host-") if secure else ""
        self.cookie = f"{prefix}ckptguard-{port}"
        self._names, self._attempts = names, Attempts()

    def admit(self, scope: Scope, headers: Headers) -> Response | None:
        """Return why a request is refused. Otherwise None, and `caller` is in its scope if it has one."""
        scope["door"] = self
        own = self._names.origin_of(headers.get("host", ""), scope["scheme"])
        if own is None:
            return refusal("forbidden", "the Host is not a name of this daemon", 403, "--http-url names one more")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != own:
            return refusal("forbidden", "the Origin is not a page of this daemon", 403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not _is_a_link(scope, headers):
            return refusal("forbidden", "a page of another site may not ask", 403)
        if "authorization" in headers:
            kind, _, secret = headers["authorization"].partition(" ")
            return self._by_token(scope, secret.strip() if kind.lower() == "bearer" else "")
        session = self.session_of(headers)
        if session is not None:
            _note(scope, lambda: self.callers.by_session(session, time.time()))
        if scope.get("caller") is not None and origin is None and scope["method"] not in _SAFE:
            return refusal("forbidden", "a request with a session needs an Origin", 403, "send a token instead")
        return None

    def session_of(self, headers: Headers) -> str | None:
        """Return the session that a request names."""
        return cookie_parser(headers.get("cookie", "")).get(self.cookie)  # lenient: others on this host set odd ones

    def try_secret(self, scope: Scope, secret: str, find: Callable[[], _Found | None]) -> _Found | Response | None:
        """Return what `find` makes of a secret, or the refusal of an address from which too many wrong ones came."""
        address, digest, now = address_of_client(scope), digest_of(secret), time.monotonic()
        wait = self._attempts.wait(address, digest, now)
        if wait > 0:
            message, seconds = "too many wrong tokens came from there", int(wait) + 1
            return refusal("too_many", message, 429, f"try again in {seconds} s", {"Retry-After": str(seconds)})
        found = find()
        if found is None:
            self._attempts.was_wrong(address, digest, now)
        else:
            self._attempts.was_right(address, digest)
        return found

    def _by_token(self, scope: Scope, secret: str) -> Response | None:
        found = self.try_secret(scope, secret, lambda: self.callers.by_secret(secret, time.time()))
        if isinstance(found, Caller):
            _note(scope, lambda: self.callers.by_secret(secret, time.time()))
            return None
        return found or unauthorized("this token is wrong, or it has expired")


def address_of_client(scope: Scope) -> str:
    """Return from where a request came."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _note(scope: Scope, who: Callable[[], Caller | None]) -> None:
    """Note who asks. A stream asks `still_in` now and then: its token or session may have ended."""
    caller = scope["caller"] = who()
    scope["still_in"] = lambda: caller is not None and who() == caller


def _is_a_link(scope: Scope, headers: Headers) -> bool:
    """True if somebody followed a link to us, and the browser shows our answer as a page."""
    shown = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return shown and scope["method"] in _SAFE

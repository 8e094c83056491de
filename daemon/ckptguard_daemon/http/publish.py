"""How metrics leave the daemon besides its socket: by TCP to a scraper, and into a file for the textfile collector."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import socket
import tempfile
import threading
from collections.abc import Callable

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckptguard.errors import SettingsError
from ckptguard.runs.token_file import read_secret
from ckptguard_daemon.http.places import place_named
from ckptguard_daemon.log import log
from ckptguard_daemon.metrics import CONTENT_TYPE

_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 4096
_SOONEST, _LATEST = 10.0, 60.0  # seconds between two writings of the file


class MetricsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where metrics go: a TCP address with the file of a token, and a file."""

    address: str | None = None
    token_file: str | None = None
    file: str | None = None


NOWHERE = MetricsOptions()


def listen_for_scrapers(options: MetricsOptions) -> socket.socket | None:
    """Bind and listen at the address. None without one. Raises SettingsError, also for an address that other machines
    can reach if there is no token."""
    address, token_file = options.address, options.token_file
    if address is None:
        if token_file is not None:
            raise SettingsError("--metrics-token is only for --metrics", hint="give an address: --metrics HOST:PORT")
        return None
    if token_file is not None:
        read_token(token_file)
    place = place_named("--metrics", address)
    if token_file is None and not place.is_loopback:
        hint = "give --metrics-token FILE with a secret of 16 characters or more, or listen on 127.0.0.1"
        raise SettingsError(f"other machines could read the metrics at {address}", hint=hint)
    return place.listen()


def read_token(path: str) -> bytes:
    """Return the token in a file. Raises SettingsError if it cannot be read, or if every user can read it."""
    text, found = read_secret(path, "token", _LONGEST_TOKEN + 2)
    if found.st_mode & 0o007:
        raise SettingsError(f"every user can read the token in {path}", hint=f"chmod 600 {path}")
    token = text.strip()
    if not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN or not all(33 <= byte <= 126 for byte in token):
        hint = f"write {_SHORTEST_TOKEN} or more letters and digits into it, and nothing else"
        raise SettingsError(f"{path} holds no token", hint=hint)
    return token


class ScrapeAnswers:
    """An ASGI application that answers GET /metrics, and nothing else.

    Without a token only local names are taken for the Host, so no web page can make a browser ask.
    """

    def __init__(self, text: Callable[[], bytes], token_file: str | None) -> None:
        self._text, self._token_file = text, token_file
        self._told = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            answer = await run_in_threadpool(self._answer, Request(scope))
            await answer(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        headers = request.headers
        if "origin" in headers or (self._token_file is None and not _is_local(headers.get("host", ""))):
            return Response("only programs on this machine may ask\n", 403)
        if self._token_file is not None:
            try:
                wanted = b"Bearer " + read_token(self._token_file)  # again: it may be replaced
            except SettingsError as error:
                if self._told != error.message:  # anybody may ask, and must not fill the log
                    self._told = error.message
                    log("metrics_refused", level="error", reason=error.message)
                return Response("the token of this daemon cannot be read; its log says why\n", 503)
            if not hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), wanted):
                return Response("a token is needed\n", 401, {"WWW-Authenticate": "Bearer"})
        if request.url.path != "/metrics":
            return Response("there is only /metrics\n", 404)
        if request.method not in ("GET", "HEAD"):
            return Response("only GET\n", 405, {"Allow": "GET, HEAD"})
        return Response(self._text(), media_type=CONTENT_TYPE)


def _is_local(name: str) -> bool:
    """True if a Host is `localhost`, or an address of this machine alone."""
    host = name.rpartition(":")[0] if not name.endswith("]") and ":" in name else name
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host.lower() == "localhost"


class MetricsFile:
    """A file that always holds one whole set of metrics. A problem with it is logged once, and never raised."""

    def __init__(self, path: str) -> None:
        """Raises SettingsError if no collector would read a file at this path."""
        if not path.endswith(".prom"):
            raise SettingsError(f"`--metrics-file {path}`: the textfile collector reads only names that end in .prom")
        self._path = os.path.abspath(path)
        self._folder = os.path.dirname(self._path)
        if not os.path.isdir(self._folder):
            raise SettingsError(f"`--metrics-file {path}`: there is no folder {self._folder}")
        self._failing = False

    def keep_written(self, text: Callable[[], bytes], passed: threading.Event, stop: threading.Event) -> None:
        """Replace the file after each pass, though not all the time, and in the end."""
        while not stop.is_set():
            passed.wait(_LATEST)
            passed.clear()
            self.write(text())
            stop.wait(_SOONEST)
        self.write(text())

    def write(self, text: bytes) -> None:
        """Replace the file."""
        temporary = None
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=".ckptguard-", suffix=".tmp", dir=self._folder)
            with open(descriptor, "wb") as file:
                file.write(text)
                os.fchmod(descriptor, 0o644)  # the collector is another user
            os.replace(temporary, self._path)
        except OSError as error:
            if not self._failing:
                log("metrics_not_written", level="warning", file=self._path, reason=error.strerror)
            self._failing = True
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        else:
            self._failing = False

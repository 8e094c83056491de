"""Where metrics go: by TCP to those who scrape them, and into a file for the textfile collector of another program."""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from ckptguard.errors import SettingsError
from ckptguard.runs.token_file import read_secret
from ckptguard.storage.local.writes import replace_file
from ckptguard.values.access import Role
from ckptguard_daemon.http.gate import Names
from ckptguard_daemon.http.replies import refusal, unauthorized
from ckptguard_daemon.http.routes import Caller
from ckptguard_daemon.http.tcp_address import tcp_address
from ckptguard_daemon.log import log
from ckptguard_daemon.plan import ListenOptions

_SCRAPER = Caller(name="scraper", role=Role.READER)
_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 4096
_SOONEST, _LATEST = 10.0, 60.0  # seconds between two writings


def listen_for_scrapers(options: ListenOptions) -> socket.socket | None:
    """Bind and listen at the address. None without one. Raises SettingsError, also for an address that other machines
    can reach if there is no token."""
    address, token_file = options.metrics, options.metrics_token
    if address is None:
        if token_file is not None:
            raise SettingsError("--metrics-token is only for --metrics", hint="give an address: --metrics HOST:PORT")
        return None
    if token_file is not None:
        read_token(token_file)
    tcp = tcp_address("--metrics", address)
    if token_file is None and not tcp.is_loopback:
        hint = "give --metrics-token FILE with a secret of 16 characters or more, or listen on 127.0.0.1"
        raise SettingsError(f"other machines could read the metrics at {address}", hint=hint)
    return tcp.listen()


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


class Scrapers:
    """Admits who asks for /metrics, and for nothing else: with the token, or else by a local name of this machine, so
    that no web page can make a browser ask."""

    def __init__(self, token_file: str | None) -> None:
        self._token_file, self._reported = token_file, ""

    def admit(self, scope: Scope, headers: Headers) -> Response | None:
        """Return why a request is refused, or None."""
        own = self._token_file is not None or Names().origin_of(headers.get("host", ""), "http")
        if "origin" in headers or not own:
            return refusal("forbidden", "only programs on this machine may ask", 403)
        if self._token_file is not None:
            try:
                wanted = b"Bearer " + read_token(self._token_file)  # again: it may be replaced
            except SettingsError as error:
                if self._reported != error.message:  # anybody may ask, and must not fill the log
                    self._reported = error.message
                    log("metrics_refused", level="error", reason=error.message)
                return refusal("token", "the token of this daemon cannot be read; its log says why", 503)
            if not hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), wanted):
                return unauthorized("a token is needed")
        if scope["path"] != "/metrics":
            return refusal("not_found", "there is only /metrics", 404)
        scope["caller"] = _SCRAPER
        return None


class MetricsFile:
    """A file that always holds one whole set of metrics. A problem with it is logged once, and never raised."""

    def __init__(self, path: str) -> None:
        """Raises SettingsError if no collector would read a file at this path."""
        if not path.endswith(".prom"):
            raise SettingsError(f"`--metrics-file {path}`: the textfile collector reads only names that end in .prom")
        self._path = os.path.abspath(path)
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise SettingsError(f"`--metrics-file {path}`: there is no folder {folder}")
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
        try:
            replace_file(self._path, text, mode=0o644)  # the collector is another user
        except OSError as error:
            if not self._failing:
                log("metrics_not_written", level="warning", file=self._path, reason=error.strerror)
            self._failing = True
        else:
            self._failing = False

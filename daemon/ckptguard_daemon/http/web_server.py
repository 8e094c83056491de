"""The TCP socket for browsers and other machines: where it listens, with which certificate, and who may come in."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp

from ckptguard.errors import SettingsError
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.values.ids import short_digest
from ckptguard_daemon.http.callers import Callers, stamp_of
from ckptguard_daemon.http.gate import Names, TcpAccess
from ckptguard_daemon.http.server import HttpServer
from ckptguard_daemon.http.tcp_address import address_of, tcp_address
from ckptguard_daemon.log import log
from ckptguard_daemon.plan import ListenOptions

_PATH = re.compile(r"(/(?!\.+(/|$))[A-Za-z0-9._~-]+)*")  # below which a proxy shows the page; it takes this off


class WebServer:
    """A listening TCP socket and its door."""

    def __init__(self, options: ListenOptions) -> None:
        """Raises SettingsError, also where secrets would cross a network in clear text."""
        address = options.http or ""
        tcp = tcp_address("--http", address)
        self._options, self._seen = options, _stamps(options)
        self._tls = _tls(options)
        if self._tls is None and not tcp.is_loopback:
            raise SettingsError(
                f"other machines could listen to what is said at {address}",
                hint="give --tls-cert FILE and --tls-key FILE, or listen on 127.0.0.1 behind a proxy that has them",
            )
        if options.tokens is None and options.link is None:
            raise SettingsError("nobody could log in", hint="give --tokens FILE, or --link for a link that works once")
        url = None if options.http_url is None else _checked_url(options.http_url)
        callers = Callers(options.tokens, options.link)
        self._socket = tcp.listen()
        port = self._socket.getsockname()[1]
        secure = self._tls is not None or (url or "").startswith("https:")
        names = Names(url, None if tcp.is_loopback else tcp.host)
        self.tcp_access = TcpAccess(callers, names, secure=secure, port=port, path=urlsplit(url or "").path)
        host = socket.gethostname() if tcp.is_any else tcp.host
        shown = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
        self.url = url or f"{'https' if self._tls else 'http'}://{shown}"

    def remember(self, socket_path: str, environ: Mapping[str, str]) -> None:
        """Keep the sessions in this user's private folder, under a name that follows from the daemon's socket."""
        try:
            folder = private_runtime_folder(environ)
            self.tcp_access.callers.remember(os.path.join(folder, f"{short_digest(socket_path)}.sessions"))
        except OSError as error:
            log("sessions_not_kept", level="warning", reason=str(error))

    def server(self, application: ASGIApp) -> HttpServer:
        """Return the server of the application that asks `tcp_access`. It is not started."""
        link = self._options.link is not None
        log("http", address=address_of(self._socket), url=self.url, tls=self._tls is not None, link=link)
        return HttpServer(application, self._socket, self._tls)

    def show_link(self) -> None:
        """Print a link that logs in once, if one is wanted."""
        role = self._options.link
        if role is None:
            return
        link = f"{self.url}/login#{self.tcp_access.callers.new_link(role, time.time())}"
        with contextlib.suppress(OSError):  # nobody reads it
            print(link, flush=True)

    def look(self) -> None:
        """Take over changed tokens, and a changed certificate."""
        self.tcp_access.callers.look()
        if self._tls is None or (stamps := _stamps(self._options)) == self._seen:
            return
        self._seen = stamps
        try:
            _tls(self._options)  # first one of its own: a pair that does not fit would leave ours without a key
            _load(self._tls, self._options)
            log("certificate_read", file=self._options.tls_cert)
        except SettingsError as error:
            log("certificate_refused", level="error", reason=error.message)


def open_web_server(options: ListenOptions) -> WebServer | None:
    """Return the web server, or None if there is none. Raises SettingsError."""
    if options.http is not None:
        return WebServer(options)
    given = (options.tokens, options.tls_cert, options.tls_key, options.http_url, options.link)
    if any(one is not None for one in given):
        raise SettingsError("--tokens, --tls-cert, --tls-key, --http-url and --link are only for --http")
    return None


def _tls(options: ListenOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None and options.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    _load(context, options)
    return context


def _load(context: ssl.SSLContext, options: ListenOptions) -> None:
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None or key is None:
        raise SettingsError("TLS needs --tls-cert FILE and --tls-key FILE")
    try:
        if os.stat(key).st_mode & stat.S_IRWXO:
            raise SettingsError(f"every user can read the key {key}", hint=f"chmod 600 {key}")
        context.load_cert_chain(certificate, key, password=lambda: "")  # never asks on the terminal
    except OSError as error:
        reason = error.strerror if not isinstance(error, ssl.SSLError) else error.reason or "it is no such file"
        raise SettingsError(
            f"the certificate {certificate} with the key {key} cannot be used: {reason}",
            hint="both are PEM files, and the key has no password",
        ) from error


def _stamps(options: ListenOptions) -> list[object]:
    return [stamp_of(path or "") for path in (options.tls_cert, options.tls_key)]


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    path = parts.path.rstrip("/") if good else ""
    if not good or not _PATH.fullmatch(path) or parts.query or parts.fragment or parts.username is not None:
        raise SettingsError(
            f"`--http-url {url}` is not the address of a site", hint="for example https://ops.example.org/ckptguard"
        )
    return f"{parts.scheme}://{parts.netloc}{path}"

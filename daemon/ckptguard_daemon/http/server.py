"""The HTTP server: uvicorn in a thread, on a socket of ours."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ckptguard_daemon.log import log

MOST = 320  # open connections: for one more the oldest is ended
_BUSY, _FULL = MOST + 32, MOST + 64  # if they do not end: uvicorn answers 503, and then none is taken
_START_SECONDS, _STOP_SECONDS = 10.0, 2.0


class BoundedSocket(socket.socket):
    """A listening socket with a limited number of open connections: the daemon needs file descriptors for its runs. Who
    never says a whole request, or takes no answer, makes room in the end. asyncio takes connections by `accept`."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self.setblocking(False)
        self._taken: list[socket.socket] = []  # the oldest first

    def accept(self) -> tuple[socket.socket, Any]:
        """Take a connection. Raises ConnectionAbortedError if there are too many."""
        made, address = super().accept()
        self._taken = [one for one in self._taken if one.fileno() != -1]
        if len(self._taken) >= _FULL:
            made.close()
            raise ConnectionAbortedError
        if len(self._taken) >= MOST:
            with contextlib.suppress(OSError):  # it ended just now
                self._taken[len(self._taken) - MOST].shutdown(socket.SHUT_RDWR)  # the older ones were told already
        self._taken.append(made)
        return made, address


class HttpServer:
    """uvicorn in its own thread, on a socket that is already bound, until `close`."""

    def __init__(self, application: ASGIApp, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            log_level="critical",  # below that anybody could fill the log; the routes log their own mistakes
            lifespan="off",
            http="h11",
            ws="none",
            loop="asyncio",
            server_header=False,
            proxy_headers=False,  # anybody could send them
            limit_concurrency=_BUSY,
            backlog=128,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._server = uvicorn.Server(config)
        self._listening = BoundedSocket(listening)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> bool:
        """Start to serve. Returns whether that worked."""
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self._server.started

    def begin_to_close(self) -> None:
        """Take no more connections. Returns at once."""
        self._server.should_exit = True

    def close(self, seconds: float = _STOP_SECONDS) -> None:
        """Stop serving, and wait this long at most for the end. Waiting requests get a second."""
        self.begin_to_close()
        if self._thread.ident is not None:
            self._thread.join(timeout=max(0.0, seconds))

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listening])
        except (Exception, SystemExit) as error:
            log("http_failed", level="error", reason=f"{type(error).__name__}: {error}")

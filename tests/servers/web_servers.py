"""A web server in a thread of this process."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """Requests of which nothing is printed."""

    def log_message(self, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *arguments: object) -> None:
        pass  # a client that went away


@contextlib.contextmanager
def served(request: Callable[..., Any], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve by this class of requests, until the end; the URL."""
    server = _Server(("127.0.0.1", 0), request)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A web server of a test's own that notes what is posted to it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class Listener:
    """What was posted to `url`. It answers with the statuses in their order, the last one for ever."""

    def __init__(self, port: int, statuses: list[int]) -> None:
        self.url = f"http://127.0.0.1:{port}/hook"
        self.address = f"json://someone:s3cr3t-pass@127.0.0.1:{port}/hook"  # the same, as apprise writes it
        self.posted: list[Any] = []
        self.logins: list[str | None] = []
        self.statuses = statuses


@contextlib.contextmanager
def listening(*statuses: int) -> Iterator[Listener]:
    """A listener, until the end."""

    class Requests(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            listener.logins.append(self.headers["Authorization"])
            listener.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status = listener.statuses[0] if len(listener.statuses) == 1 else listener.statuses.pop(0)
            self.send_response(status)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Requests) as server:
        listener = Listener(server.server_address[1], list(statuses) or [200])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield listener
        finally:
            server.shutdown()
            thread.join()

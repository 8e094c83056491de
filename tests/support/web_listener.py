"""A web server of a test's own that notes what is posted to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from servers.web_servers import Quiet, served


class Listener:
    """What was posted to `url`. It answers with the statuses in their order, the last one for ever."""

    def __init__(self, origin: str, statuses: list[int]) -> None:
        self.url = f"{origin}/hook"
        self.address = self.url.replace("http://", "json://someone:s3cr3t-pass@")  # the same, as apprise writes it
        self.posted: list[Any] = []
        self.logins: list[str | None] = []
        self.statuses = statuses


@contextlib.contextmanager
def listening(*statuses: int) -> Iterator[Listener]:
    """A listener, until the end."""

    class Requests(Quiet):
        def do_POST(self) -> None:  # noqa: N802 - the library's name
            listener.logins.append(self.headers["Authorization"])
            listener.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status = listener.statuses[0] if len(listener.statuses) == 1 else listener.statuses.pop(0)
            self.send_response(status)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()

    with served(Requests) as url:
        listener = Listener(url, list(statuses) or [200])
        yield listener

"""Asking the daemon: JSON over HTTP over its Unix socket, with the standard library alone."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import urllib.parse
from collections.abc import Mapping
from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(
    address: str, run: Path, question: str, *, body: Mapping[str, object] | None = None, **query: float
) -> dict[str, object]:
    """The daemon's answer about a run: GET, or POST with a body."""
    run_id = hashlib.sha256(str(run).encode()).hexdigest()[:12]
    url = f"/v1/runs/{run_id}/{question}"
    if query:
        url += "?" + urllib.parse.urlencode(query)
    connection = UnixConnection(address, timeout=90)
    try:
        connection.request("GET" if body is None else "POST", url, json.dumps(body) if body is not None else None)
        response = connection.getresponse()
        answer: dict[str, object] = json.loads(response.read())
    finally:
        connection.close()
    if response.status >= 400:
        raise RuntimeError(f"the daemon answered {response.status}: {answer}")
    return answer

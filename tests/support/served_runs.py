"""Runs as a daemon has them, without its threads, and its application, asked within this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import quote

from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.http.routes import Served
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import Loop, Waiters
from ckptguard_daemon.metrics import Metrics
from ckptguard_daemon.run_set import RunSet
from starlette.types import ASGIApp

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.records.who_and_when import this_host, this_process, utc_now
from ckptguard.reporting.notify import Hooks, Log
from ckptguard.values.ids import run_id_of
from ckptguard.values.settings import Settings


def watched(
    url: object,
    settings: Settings,
    *,
    log: Log = log,
    presence: DaemonRecord | None = None,
    feed: CatalogueFeed | None = None,
) -> WatchedRun:
    """A run as a daemon watches it."""
    return WatchedRun(str(url), run_id_of(str(url)), settings, Hooks(settings, log), presence, feed)


def of_this_process(address: str = "/nowhere") -> DaemonRecord:
    """What a daemon in this process records in a run. Nobody listens at the address."""
    host, boot = this_host()
    return DaemonRecord(address=address, host=host, boot_id=boot, pid=this_process().pid, started_at=utc_now())


def served(runs: Iterable[WatchedRun] | RunSet, **parts: Any) -> Served:
    """What the routes answer about."""
    run_set, stop = runs if isinstance(runs, RunSet) else RunSet(runs), threading.Event()
    usual: dict[str, Any] = {
        "loop": Loop(run_set, stop, lambda run: None),
        "passes": Waiters(),
        "presence": DaemonRecord(address="", host="", boot_id="", pid=0, started_at=""),
        "feed": CatalogueFeed(),
        "metrics": Metrics(list, lambda: 0.0),
        "alive": lambda: True,
        "stop": stop,
    }
    return Served(runs=run_set, **{**usual, **parts})


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.body)


async def answer_of(
    application: ASGIApp,
    path: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    **more: object,
) -> Answer:
    """What an application answers to one request. `more` is put into its scope. The caller never hangs up."""
    parts: list[Any] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    plain, _, query = path.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "asgi": {"spec_version": "2.3"},
        "scheme": "http",
        "method": method,
        "path": plain,
        "raw_path": quote(plain).encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
        **more,
    }

    async def receive() -> Any:
        return waiting.pop() if waiting else await asyncio.Future()

    async def send(message: Any) -> None:
        parts.append(message)

    await application(scope, receive, send)
    found = {name.decode(): value.decode("latin-1") for name, value in parts[0]["headers"]}
    return Answer(parts[0]["status"], found, b"".join(part.get("body", b"") for part in parts[1:]))

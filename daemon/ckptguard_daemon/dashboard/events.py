"""Server-sent events: what happens in the runs, as soon as the catalogue has noted it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckptguard.catalogue.questions import events_after
from ckptguard.catalogue.rows import NumberedEvent
from ckptguard.errors import SettingsError
from ckptguard.values.access import Role
from ckptguard.values.record_text import encoded
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.dashboard.pages import event_fields
from ckptguard_daemon.http.routes import Caller, Route, Served, caller_of
from ckptguard_daemon.roster import Roster

MOST_QUEUED = 256  # events that wait for one client, and that are replayed
PING_SECONDS = 15.0
_LARGEST = 2**63 - 1
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""
    hub = EventHub(served.feed, served.runs, served.stop)

    async def events(request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after")
        return EventStream(hub, caller_of(request), None if after is None else _number(after))

    return [Route("/v1/events", events, Role.READER, stream=True)]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= _LARGEST):
        raise SettingsError("`Last-Event-ID` must be the number of an event")
    return int(text[:20])


class Client:
    """One stream, in the task that made it: what waits to be sent. All but `put` belongs to the thread of its loop."""

    def __init__(self, caller: Caller) -> None:
        self.caller, self._task = caller, asyncio.current_task()
        self.waiting: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.has_ended = False
        self._loop = asyncio.get_running_loop()

    def put(self, texts: Iterable[bytes]) -> None:
        """Queue some texts. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # its loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._add, tuple(texts))

    def end(self) -> None:
        """End the stream after what is queued. Any thread may call it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _add(self, texts: tuple[bytes, ...]) -> None:
        if len(self.waiting) + len(texts) > MOST_QUEUED:
            self.waiting.clear()  # it reads too slowly; when it comes back it names the last event that it got
            self._end()
            if self._task is not None:
                self._task.cancel()  # it waits for a client that takes nothing
            return
        self.waiting += texts
        self.news.set()

    def _end(self) -> None:
        self.has_ended = True
        self.news.set()


class EventHub:
    """Gives each new event to every client that may see its run. Without clients nothing is asked."""

    def __init__(self, feed: CatalogueFeed, runs: Roster, stop: threading.Event) -> None:
        self._feed, self._runs, self._stop = feed, runs, stop
        self._lock = threading.Lock()
        self._clients: set[Client] = set()
        self._last = 0
        feed.listen(self.wake)

    def wake(self) -> None:
        """Deliver what is new, or end all streams if the daemon ends. Never raises."""
        with self._lock:
            if self._stop.is_set():
                for client in self._clients:
                    client.end()
            elif self._clients:
                self._deliver()

    def join(self, client: Client, after: int | None) -> None:
        """Add a client. It gets the events after a number, and then all that follow, without a gap."""
        with self._lock:
            if self._clients:
                self._deliver()
            else:
                newest = self._feed.ask(events_after, 0, most=0)
                self._last = newest.last if newest is not None else self._last
            missed = None if after is None else self._feed.ask(events_after, after, most=MOST_QUEUED)
            if after is None:
                client.put([_text("hello", self._last)])
            elif missed is None or missed.reset or missed.last < self._last:
                client.put([_text("reset", self._last)])
            else:
                client.put(self._texts(client, (e for e in missed.events if e.number <= self._last)))
            if self._stop.is_set():
                client.end()
            self._clients.add(client)

    def leave(self, client: Client) -> None:
        """Remove a client."""
        with self._lock:
            self._clients.discard(client)

    def _deliver(self) -> None:
        page = self._feed.ask(events_after, self._last, most=MOST_QUEUED)
        if page is None:
            return  # it is being made anew: the next write tells
        newest = self._feed.ask(events_after, 0, most=0)
        self._last = page.last
        if page.reset or (newest is not None and newest.last > page.last):
            # More than one client may have waiting: all are told to ask for everything again.
            self._last = page.last if newest is None else newest.last
            for client in self._clients:
                client.put([_text("reset", self._last)])
        elif page.events:
            for client in self._clients:
                client.put(self._texts(client, page.events))

    def _texts(self, client: Client, events: Iterable[NumberedEvent]) -> list[bytes]:
        return [_text("happened", e.number, event_fields(e)) for e in events if self._may_see(client.caller, e.run)]

    def _may_see(self, caller: Caller, run_id: str) -> bool:
        run = self._runs.get(run_id)
        return caller.runs is None if run is None else caller.sees(run)


def _text(event: str, number: int, data: object = None) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, event.encode(), encoded({} if data is None else data))


class EventStream(Response):
    """The answer that does not end while both sides live."""

    media_type = "text/event-stream"

    def __init__(self, hub: EventHub, caller: Caller, after: int | None) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._hub, self._caller, self._after = hub, caller, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client goes, is too slow, or the daemon ends."""
        client = Client(self._caller)
        still_in: Callable[[], bool] = scope.get("still_in", lambda: True)
        listening = asyncio.create_task(_until_gone(receive, client))
        try:
            await run_in_threadpool(self._hub.join, client, self._after)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send(send, b"retry: 1000\n\n")
            while not client.has_ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PING_SECONDS):
                        await client.news.wait()
                client.news.clear()
                if not still_in():
                    break
                text = b"".join(client.waiting) or b": ping\n\n"
                client.waiting.clear()
                await _send(send, text)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            listening.cancel()
            await run_in_threadpool(self._hub.leave, client)


async def _send(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": True})


async def _until_gone(receive: Receive, client: Client) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.has_ended = True
    client.news.set()

"""Server-sent events: what happens in the runs, as soon as the catalogue has noted it."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckptguard.errors import SettingsError
from ckptguard.values.access import Role
from ckptguard.values.record_text import encoded
from ckptguard_daemon.dashboard.pages import event_fields
from ckptguard_daemon.http.routes import Caller, Route, Served, caller_of
from ckptguard_daemon.loop import Waiters

PING_SECONDS = 15.0
LONGEST_SEND = 60.0  # seconds in which a client takes nothing; when it comes back it names the last event that it got
_LARGEST = 2**63 - 1
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""
    streams = Waiters()
    served.feed.listen(streams.wake)

    async def events(request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after")
        return EventStream(served, streams, caller_of(request), None if after is None else _number(after))

    return [Route("/v1/events", events, Role.READER, stream=True)]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= _LARGEST):
        raise SettingsError("`Last-Event-ID` must be the number of an event")
    return int(text[:20])


class EventStream(Response):
    """The answer that does not end while both sides live. It remembers the last event that it sent, and nothing else:
    a client that reads slowly costs no memory, and is told to ask for everything again if it missed too much."""

    media_type = "text/event-stream"

    def __init__(self, served: Served, streams: Waiters, caller: Caller, after: int | None) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._served, self._streams, self._caller, self._after = served, streams, caller, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client goes, takes nothing for too long, or the daemon ends."""
        catalogue, still_in = self._served.feed.catalogue, scope.get("still_in", lambda: True)
        with self._streams.woken() as news, contextlib.suppress(TimeoutError):
            gone = asyncio.create_task(_until_gone(receive, news))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await _send(send, b"retry: 1000\n\n")
                last = catalogue.newest if self._after is None else self._after
                text = _text("hello", last) if self._after is None else b""
                while True:
                    page = catalogue.events_after(last)
                    seen = [e for e in page.events if self._may_see(e.run)]
                    text += b"".join(_text("happened", e.number, event_fields(e)) for e in seen)
                    last, text = page.last, _text("reset", page.last) if page.reset else text
                    if text:
                        await _send(send, text)
                    if gone.done() or self._served.stop.is_set():
                        break
                    text = b"" if await Waiters.wait(news, PING_SECONDS) else b": ping\n\n"
                    news.clear()
                    if not still_in():
                        break
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                gone.cancel()

    def _may_see(self, run_id: str) -> bool:
        run = self._served.runs.get(run_id)
        return self._caller.runs is None if run is None else self._caller.sees(run)


async def _send(send: Send, text: bytes) -> None:
    async with asyncio.timeout(LONGEST_SEND):
        await send({"type": "http.response.body", "body": text, "more_body": True})


async def _until_gone(receive: Receive, news: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    news.set()


def _text(event: str, number: int, data: object = None) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, event.encode(), encoded({} if data is None else data))

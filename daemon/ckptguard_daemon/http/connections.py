"""Connections that cannot block the daemon: each step has a time limit, and who only waits makes room for others."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from asyncio.sslproto import SSLProtocol
from collections import defaultdict
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # from the connection, or from the previous answer
ANSWER_SECONDS = 660.0  # from the head: the longest that a caller may choose to wait, and some more
WRITE_SECONDS = 30.0  # for a caller that does not read its answer
MOST = 256  # connections at a time, besides streams
MOST_OF_ONE = 128  # of them, those of one process or one address
_PEER = struct.Struct("3i")  # from the kernel: pid, uid, gid


class Crowd:
    """The connections of one server besides streams, in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[BoundedConnection, None] = {}
        self._by_peer: defaultdict[object, dict[BoundedConnection, None]] = defaultdict(dict)

    def join(self, one: BoundedConnection) -> bool:
        """Take one more. The oldest that waits for its caller goes instead; False if none waits."""
        of_one = self._by_peer[one.peer]
        self._all[one] = of_one[one] = None
        for group, most in ((of_one, MOST_OF_ONE), (self._all, MOST)):
            if len(group) > most:
                slow = next((member for member in group if member is not one and member.waits), None)
                if slow is None:
                    return False
                self.leave(slow)
                slow.make_room()
        return True

    def leave(self, one: BoundedConnection) -> None:
        """Count one no more."""
        self._all.pop(one, None)
        of_one = self._by_peer.get(one.peer, {})
        of_one.pop(one, None)
        if not of_one:
            self._by_peer.pop(one.peer, None)


class BoundedConnection(H11Protocol):
    """One connection. A problem is answered in one sentence, and then it is closed."""

    peer: object = None
    _crowd: Crowd | None = None
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _application: Any
    _below: Any = None  # the transport without TLS

    @property
    def waits(self) -> bool:
        """True while it is the caller's turn: a head or the rest of a body must come."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)

    @property
    def is_stream(self) -> bool:
        """True while an answer is sent that has no end."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and bool(cycle.scope.get("stream"))

    def enter(self, transport: Any, crowd: Crowd) -> None:
        """Count the connection, before anything is known of it."""
        self._below, self._crowd = transport, crowd
        self.peer = _peer_of(transport.get_extra_info("socket"))
        if not crowd.join(self):
            self.make_room()

    def make_room(self) -> None:
        """Close it for others."""
        transport: Any = self.transport
        cycle: Any = self.cycle
        if transport is not None and (cycle is None or cycle.response_complete):
            self._end(503, "busy", "too many connections at a time")
        else:
            self._below.abort()

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        super().connection_made(transport)
        self._application, self.app = self.app, self._answer
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        if self._crowd is not None:
            self._crowd.leave(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._await_head()

    def pause_writing(self) -> None:
        """Give a caller that does not read some time."""
        super().pause_writing()
        self._stall = self.loop.call_later(WRITE_SECONDS, self._below.abort)

    def resume_writing(self) -> None:
        """Go on."""
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def shutdown(self) -> None:
        """End with the server. A stream ends as if it had said all."""
        if self.is_stream and self.cycle.response_started:
            self.cycle.disconnected = True  # the route says no more
            self.cycle.message_event.set()
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._end(400, "request", "this is not a valid HTTP request")

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a stream end its connection at once, also one whose client reads nothing any more, and not count."""
        scope["abort"], scope["is_stream"] = self.transport.abort, self._is_stream
        await self._application(scope, receive, send)

    def _is_stream(self) -> None:
        if self._crowd is not None:
            self._crowd.leave(self)

    def _await_head(self) -> None:
        self._look_after(HEAD_SECONDS)

    def _look_after(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._look, seconds == ANSWER_SECONDS)

    def _look(self, late: bool) -> None:
        if self.cycle is None:
            self._end(408, "timeout", "the request did not arrive in time")
        elif self.cycle.response_complete:
            self.transport.close()
        elif not late:
            self._look_after(ANSWER_SECONDS)
        elif not self.is_stream:
            self._below.abort()

    def _end(self, status: int, kind: str, message: str) -> None:
        if self.transport.is_closing():
            return
        text = msgspec.json.encode({"error": {"kind": kind, "message": message, "hint": None}}) + b"\n"
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + text)
        self.transport.close()


class _CountedPlain(BoundedConnection):
    """A connection of HTTP alone."""

    crowd: Crowd

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.enter(transport, self.crowd)


class _CountedTls(SSLProtocol):
    """The TLS below a connection. It counts from the first packet, and its handshake has a time limit, too."""

    def __init__(self, inner: BoundedConnection, crowd: Crowd, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        nobody: Any = None  # who would wait for the handshake
        limits: dict[str, Any] = {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": 2.0}
        super().__init__(loop, inner, context, nobody, server_side=True, **limits)
        self._inner, self._crowd = inner, crowd

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._inner.enter(transport, self._crowd)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._crowd.leave(self._inner)
        super().connection_lost(exc)


class Connections:
    """Makes the connections of one server, with TLS if there is a context."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._crowd, self._context = Crowd(), context

    def __call__(self, **given: Any) -> asyncio.BaseProtocol:
        """Make one."""
        if self._context is not None:
            return _CountedTls(BoundedConnection(**given), self._crowd, self._context)
        made = _CountedPlain(**given)
        made.crowd = self._crowd
        return made


def _peer_of(connection: socket.socket | None) -> object:
    """Return the process at the other end, or its address; None if the system does not report it."""
    if connection is None:
        return None
    try:
        if connection.family != socket.AF_UNIX:
            return connection.getpeername()[0]
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return None
    return int(_PEER.unpack(found)[0])

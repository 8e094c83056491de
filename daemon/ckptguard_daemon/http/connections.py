"""Connections that cannot block the daemon: a head must arrive in time, and each process has a limit of connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # from the connection, or from the previous answer
MOST = 256  # connections at a time
MOST_OF_ONE = 128  # of them, those of one process
_PEER = struct.Struct("3i")  # from the kernel: pid, uid, gid


class BoundedConnection(H11Protocol):
    """One connection. A problem is answered in one sentence, and then it is closed."""

    peer: int | None = None
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin, unless there are too many already."""
        super().connection_made(transport)
        self.app = _abortable(self.app, transport)
        self.peer = _process_of(transport.get_extra_info("socket"))
        self._await_head()
        others = [one for one in self.connections if isinstance(one, BoundedConnection)]
        if len(others) > MOST or sum(one.peer == self.peer for one in others) > MOST_OF_ONE:
            self._end(503, "busy", "too many connections at a time")

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._end(400, "request", "this is not a valid HTTP request")

    def _await_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._look)

    def _look(self) -> None:
        if self.cycle is None:
            self._end(408, "timeout", "the request did not arrive in time")
        elif self.cycle.response_complete:
            self.transport.close()

    def _end(self, status: int, kind: str, message: str) -> None:
        if self.transport.is_closing():
            return
        text = msgspec.json.encode({"error": {"kind": kind, "message": message, "hint": None}}) + b"\n"
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + text)
        self.transport.close()


def _abortable(application: ASGIApp, transport: Any) -> ASGIApp:
    """Let an answer end its connection at once, also one whose client reads nothing any more."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["abort"] = transport.abort
        await application(scope, receive, send)

    return answer


def _process_of(connection: socket.socket | None) -> int | None:
    """Return the id of the process at the other end, or None if the system does not report it."""
    if connection is None or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return None
    return int(_PEER.unpack(found)[0])

"""Connections: whoever sends half a question, or very many, holds up nobody else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon.http import answers, connections, replies
from ckptguard_daemon.http.server import HttpServer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

WHOLE = b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALVES = (b"", b"G", b"GET /now HT", b"GET /now HTTP/1.1\r\nHost: loc", b"GET /now HTTP/1.1\r\nHost: localhost\r\n")


@pytest.fixture
def release() -> threading.Event:
    """What ``/wait`` waits for."""
    return threading.Event()


@pytest.fixture
def address(short_folder: Path, release: threading.Event) -> Iterator[str]:
    """A server's socket: ``/now`` answers at once, ``/wait`` when it is released, ``/post`` when it has a body."""

    async def now(request: Request) -> Response:
        return PlainTextResponse("now")

    async def wait(request: Request) -> Response:
        await run_in_threadpool(release.wait)
        return PlainTextResponse("waited")

    async def post(request: Request) -> Response:
        await replies.read_body(request, answers.VerifyBody)
        return PlainTextResponse("posted")

    listening = socket.socket(socket.AF_UNIX)
    path = str(short_folder / "s")
    listening.bind(path)
    listening.listen(512)
    listening.setblocking(False)
    routes = [Route("/now", now), Route("/wait", wait), Route("/post", post, methods=["POST"])]
    server = HttpServer(Starlette(routes=routes), listening)
    assert server.start()
    yield path
    release.set()
    server.close()
    listening.close()


def caller(address: str, text: bytes = b"") -> socket.socket:
    """A connection over which this was sent."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(address)
    made.sendall(text)
    return made


def answer(made: socket.socket) -> bytes:
    """All that comes until the server closes."""
    with made, made.makefile("rb") as reading:
        return reading.read()


def test_half_a_head_is_given_up(address: str, release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it came, the connection ends with one sentence; a question that arrived whole may take longer."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    waiting = caller(address, b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for half in HALVES:
        said = answer(caller(address, half))
        assert said.startswith(b"HTTP/1.1 408 ")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["kind"] == "timeout"
    release.set()
    assert b"waited" in answer(waiting)  # and then it is closed, for no other question comes


def test_half_a_second_head_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer the next question has the same time, and one byte of it is no question."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    for half in HALVES[1:]:
        assert answer(caller(address, WHOLE + half)).endswith(b"now")


def test_an_unread_body_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that nobody asked for and that never comes whole holds nothing either."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    assert b"now" in answer(caller(address, b"GET /now HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"))


def test_half_a_body_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a body waits so long, however it drips."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(replies, "BODY_SECONDS", 0.05)
    for half in (b"", b"{", b'{"path": "a"'):
        said = answer(caller(address, b"POST /post HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n" + half))
        assert said.startswith(b"HTTP/1.1 408 ")
        assert said.endswith(b"the body did not arrive in time")


OTHER = """
import socket, sys
made = []
for _ in range(int(sys.argv[2])):
    made.append(socket.socket(socket.AF_UNIX))
    made[-1].connect(sys.argv[1])
print(made[0].recv(12).decode(), flush=True)
sys.stdin.read()
"""


def test_one_process_cannot_take_all_connections(address: str) -> None:
    """Who waits longest makes room for what it opens beyond its part; other processes are answered."""
    command = [sys.executable, "-c", OTHER, address, str(connections.MOST_OF_ONE + 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "HTTP/1.1 503\n"
        made = caller(address, WHOLE)
        assert made.recv(12) == b"HTTP/1.1 200"
        made.close()
        other.communicate("")
    assert other.pid != os.getpid()


def test_what_is_no_http_gets_a_sentence(address: str) -> None:
    """In the form of every other refusal."""
    said = answer(caller(address, b"\0\r\n\r\n"))
    assert said.startswith(b"HTTP/1.1 400 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["kind"] == "request"

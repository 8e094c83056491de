"""Connections: whoever sends half a question, or very many, takes neither memory nor file descriptors without bound."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon.http import replies, server
from ckptguard_daemon.http.server import HttpServer
from ckptguard_daemon.run_routes import VerifyBody
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.daemon_process import until

ROOT = Path(__file__).resolve().parents[4]
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
        await replies.read_body(request, VerifyBody)
        return PlainTextResponse("posted")

    listening = socket.socket(socket.AF_UNIX)
    path = str(short_folder / "s")
    listening.bind(path)
    listening.listen(512)
    listening.setblocking(False)
    routes = [Route("/now", now), Route("/wait", wait), Route("/post", post, methods=["POST"])]
    made = HttpServer(Starlette(routes=routes, exception_handlers=replies.REFUSALS), listening)
    assert made.start()
    yield path
    release.set()
    made.close()


def caller(address: str, text: bytes = b"") -> socket.socket:
    """A connection over which this was sent."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(address)
    made.sendall(text)
    return made


def answered(address: str) -> bool:
    """Whether one question is answered. One that is ended or told to come back may ask again."""
    try:
        with caller(address, WHOLE) as made:
            return made.recv(12) == b"HTTP/1.1 200"
    except OSError:
        return False


def test_half_a_body_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a body waits so long, however it drips."""
    monkeypatch.setattr(replies, "BODY_SECONDS", 0.05)
    for half in (b"", b"{", b'{"path": "a"'):
        made = caller(address, b"POST /post HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n" + half)
        assert made.recv(12) == b"HTTP/1.1 408"
        made.close()


@pytest.mark.parametrize("half", HALVES)
def test_slow_callers_make_room(address: str, half: bytes) -> None:
    """However many wait, and at whatever point: the oldest is ended for a new one, which is answered."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(caller(address, half)) for _ in range(2 * server.MOST)]
        until(lambda: answered(address), "an answer")
        assert slow[0].recv(1) == b""


OTHER = """
import contextlib, socket, sys
made = []
for _ in range(int(sys.argv[2])):
    made.append(socket.socket(socket.AF_UNIX))
    made[-1].connect(sys.argv[1])
    with contextlib.suppress(OSError):  # it was ended already
        made[-1].sendall(sys.argv[3].encode())
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("text", ["", "GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2 + "x" * 20_000])
def test_connections_are_bounded(address: str, text: str) -> None:
    """Another process opens many, also with questions that take for ever and more of them behind: this one keeps its
    file descriptors, and answers again when the other has gone."""
    before = len(os.listdir("/proc/self/fd"))
    command = [sys.executable, "-c", OTHER, address, "1000", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "connected\n"
        assert len(os.listdir("/proc/self/fd")) - before < 2 * server.MOST
        other.communicate("")
    until(lambda: answered(address), "an answer")


def test_uvicorn_is_one_of_those_that_are_tested() -> None:
    """Its limits and its shutdown are ours, and it promises nothing of them: the requirement has an upper bound, below
    the next release."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (said,) = (one for one in requirements if one.startswith("uvicorn"))
    found = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", said)
    assert found is not None
    oldest, beyond = map(int, found.groups())
    installed = importlib.metadata.version("uvicorn").split(".")
    assert installed[0] == "0"
    assert int(installed[1]) in (oldest, beyond - 1)  # one environment has the oldest, the usual one the newest

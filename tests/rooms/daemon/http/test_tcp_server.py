"""The TCP socket itself: slow and hostile connections, paths as they are sent, TLS, streams and their end."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import resource
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon.dashboard import events, page_files
from ckptguard_daemon.http import routes, server, tcp_address, web_server
from ckptguard_daemon.http.web_server import WebServer
from ckptguard_daemon.plan import ListenOptions
from gate_calls import SECRETS, TOKEN, Site, rest_of, unfinished
from support.certificates import make_certificate
from support.daemon_process import PATIENCE, Starter, save, until

from ckptguard.errors import SettingsError
from ckptguard.values.access import Role

MANY = server.MOST + 50


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site on loopback without TLS."""
    made = Site(tmp_path)
    yield made
    made.close()


def test_slow_callers_hold_up_no_pass(start: Starter, run: Path, tmp_path: Path) -> None:
    """However many connections wait, also with much said: a save gets its verdict, with few file descriptors to spare,
    in little memory, and the daemon ends in time."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    daemon = start(run, arguments=("--http", "127.0.0.1:0", "--tokens", str(tokens)))
    port = int(daemon.logged("http")["url"].rpartition(":")[2])
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (512, 512))
    before = resident(daemon.process.pid)
    slow = unfinished("localhost", 60_000)
    with contextlib.ExitStack() as stack:
        for number in range(4 * server.MOST):
            made = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            with contextlib.suppress(OSError):
                made.sendall(slow["half a body" if number % 2 else "half a head"])
        save(run, 1)
        assert daemon.outcome(1) == "good"
        assert resident(daemon.process.pid) - before < 128 * 1024**2
        assert daemon.stop() == 0


def resident(pid: int) -> int:
    """The memory that a process has, in bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_a_large_body_is_refused_and_not_kept(site: Site) -> None:
    """5 MB are refused after the first part, and the connection ends."""
    size = 5_000_000
    head = f"POST /v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    with site.connect() as made:
        made.sendall(head.encode())
        with contextlib.suppress(OSError):  # it may have closed already
            made.sendall(b"x" * size)
        assert rest_of(made)[:13] in (b"HTTP/1.1 413 ", b"")  # it may be reset while more arrives
    assert site.works()


def test_a_caller_that_reads_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that nobody takes ends the connection."""
    monkeypatch.setattr(tcp_address, "WRITE_SECONDS", 0.5)
    site = Site(tmp_path)
    line = f"GET /page/vendor/uPlot.mjs HTTP/1.1\r\nHost: localhost\r\n{TOKEN}\r\n"
    with site.connect() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises(OSError):  # noqa: PT012 - it is reset while more is sent, or while it is read
            for _ in range(10_000):
                made.sendall(line.encode() * 10)
            rest = rest_of(made)
            raise ConnectionResetError(len(rest))
    assert site.works()


PATHS = (
    "/page/../guarded.py",
    "/page/%2e%2e/guarded.py",
    "/page/..%2fguarded.py",
    "/page/..%5cguarded.py",
    "/page//etc/passwd",
    "/page/%2fetc%2fpasswd",
    "/page/%00",
    "/page/login.js%00",
    "/page/.",
    "/page/",
    "/page/vendor",
    "/page/%ff",
    "//etc/passwd",
    "/../../etc/passwd",
    "/page/" + "a" * 8000,
)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:30])
def test_no_path_leads_out_of_the_page(site: Site, path: str) -> None:
    """Only the page's own files are there, however a path is written."""
    said = site.get(path)
    assert said.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    assert b"root:" not in said
    assert b"import" not in said


def test_the_page_is_cached_by_its_digest(site: Site) -> None:
    """An unchanged file is not sent again; who takes gzip gets less."""
    said = site.get("/page/login.js")
    head, _, text = said.partition(b"\r\n\r\n")
    assert text == (page_files.FOLDER / "login.js").read_bytes()
    tag = next(line for line in head.decode().lower().splitlines() if line.startswith("etag: ")).removeprefix("etag: ")
    same = site.get("/page/login.js", f"If-None-Match: {tag}\r\n")
    assert same.startswith(b"HTTP/1.1 304 ")
    assert same.endswith(b"\r\n\r\n")
    packed = site.get("/page/vendor/uPlot.mjs", "Accept-Encoding: gzip\r\n")
    assert len(packed) < len(site.get("/page/vendor/uPlot.mjs")) / 2


def test_forwarded_headers_are_nobodys(site: Site) -> None:
    """Who claims another address or scheme gains nothing: neither an Origin nor fresh tries."""
    claims = "X-Forwarded-Proto: https\r\nX-Forwarded-For: 192.0.2.{}\r\nForwarded: for=192.0.2.{}\r\n"
    own = f"Origin: https://localhost:{site.port}\r\n"
    assert site.get("/v1/me", TOKEN + own + claims.format(1, 1)).startswith(b"HTTP/1.1 403 ")
    said = [site.get("/v1/me", f"Authorization: Bearer x{n}\r\n" + claims.format(n, n))[9:12] for n in range(40)]
    assert said[-1] == b"429"


def test_tls_is_served_and_renewed(tmp_path: Path) -> None:
    """A client that checks the certificate is answered; a new certificate is taken over without a restart."""
    certificate, key = make_certificate(tmp_path, "first")
    site = Site(tmp_path / "site", tls_cert=certificate, tls_key=key)
    try:
        assert site.web_server.url.startswith("https://")
        site.context = ssl.create_default_context(cafile=certificate)
        assert site.works()
        said = site.get("/v1/me", TOKEN + f"Origin: https://localhost:{site.port}\r\n")
        assert said.startswith(b"HTTP/1.1 200 ")
        body = json.dumps({"token": SECRETS[Role.READER]})
        head = f"POST /v1/session HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        said = site.say(f"{head}\r\n{body}")
        assert b"; secure" in said.lower()
        second, second_key = make_certificate(tmp_path, "second")
        shutil.move(second, certificate)
        site.web_server.look()  # the certificate came before its key: what worked goes on
        assert site.works()
        shutil.move(second_key, key)
        site.web_server.look()
        with pytest.raises(ssl.SSLCertVerificationError):
            site.connect()
        site.context = ssl.create_default_context(cafile=certificate)
        assert site.works()
        Path(key).write_text("no key")
        site.web_server.look()  # logged; what worked goes on
        assert site.works()
    finally:
        site.close()


def test_half_handshakes_make_room(tmp_path: Path) -> None:
    """Who never says a word of TLS holds nobody up for long; plain HTTP gets no answer."""
    certificate, key = make_certificate(tmp_path, "only")
    site = Site(tmp_path / "site", tls_cert=certificate, tls_key=key)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(MANY):
                stack.enter_context(site.connect())
            site.context = ssl.create_default_context(cafile=certificate)
            until(site.works, "an answer")
        site.context = None
        assert b"HTTP" not in site.get("/v1/me", TOKEN)
    finally:
        site.close()


def test_half_handshakes_hold_up_no_stop(run: Path, start: Starter, tmp_path: Path) -> None:
    """TLS clients that say nothing, half a hello, or nothing after the handshake: nothing is forced to end."""
    certificate, key = make_certificate(tmp_path, "only")
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    words = ("--http", "127.0.0.1:0", "--tokens", str(tokens), "--tls-cert", certificate, "--tls-key", key)
    daemon = start(run, arguments=words)
    place = ("127.0.0.1", int(daemon.logged("http")["url"].rpartition(":")[2]))
    context, hello = ssl.create_default_context(cafile=certificate), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    with contextlib.ExitStack() as stack:
        for text in (b"", hello.read()[:40]) * 10:
            stack.enter_context(socket.create_connection(place, timeout=PATIENCE)).sendall(text)
        last = stack.enter_context(socket.create_connection(place, timeout=PATIENCE))
        stack.enter_context(context.wrap_socket(last, server_hostname="localhost"))  # the others were taken by now
        assert daemon.stop() == 0
    assert "stop_forced" not in daemon.log_path.read_text()


def test_streams_leave_connections_to_others(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One more than there may be is refused, and others are answered. The end of the daemon ends them whole."""
    monkeypatch.setattr(routes, "STREAMS", 20)
    ask = f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n{TOKEN}\r\n".encode()
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        streams = []
        for _ in range(20):
            streams.append(stack.enter_context(site.connect()))
            streams[-1].sendall(ask)
            assert streams[-1].recv(12) == b"HTTP/1.1 200"
        assert site.get("/v1/events", TOKEN).startswith(b"HTTP/1.1 503 ")
        assert site.works()
        site.close()
        assert all(rest_of(made).endswith(b"0\r\n\r\n") for made in streams)
    assert caplog.records == []
    assert routes.STREAMS < server.MOST


def test_a_stream_ends_with_its_token(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is locked out hears no more, though nothing else ended the stream."""
    monkeypatch.setattr(events, "PING_SECONDS", 0.05)
    with site.connect() as made:
        made.sendall(f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{TOKEN}\r\n".encode())
        assert made.recv(12) == b"HTTP/1.1 200"
        site.behind.tokens.write_text("")
        site.behind.callers.look()
        site.web_server.look()
        assert rest_of(made).endswith(b"0\r\n\r\n")
    assert site.say("HEAD /v1/events HTTP/1.0\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 4")


def test_strangers_cannot_fill_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """What needs no token writes no line, however wrong it is."""
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\n"
    with caplog.at_level(logging.INFO):
        for text in ("\0\r\n\r\n", "GET /\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
            assert b" 40" in site.say(text)[:14]
        site.get("/v1/me", upgrade)
        site.get("/v1/runs/\xff", "Authorization: Bearer \xff\r\nCookie: \xff=\xfe\r\n")
        site.get("/v1/me", "Host: evil.example\r\n")
    assert caplog.records == []


def test_no_secret_is_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """However it is said, and whether it is right: in no line, of whatever level, of us or of a library."""
    secrets = (SECRETS[Role.OPERATOR], "a-wrong-guess")
    with caplog.at_level(logging.DEBUG):
        for secret in secrets:
            site.get("/v1/me", f"Authorization: Bearer {secret}\r\n")
            site.get(f"/v1/me?token={secret}", f"Cookie: {site.web_server.tcp_access.cookie}={secret}\r\n")
            body = json.dumps({"token": secret})
            head = "POST /v1/session HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            site.say(f"{head}Content-Length: {len(body)}\r\n\r\n{body}")
    lines = [repr(vars(record)) for record in caplog.records]
    assert any("login_refused" in line for line in lines)
    assert not [line for line in lines for secret in secrets if secret in line]


REFUSED = {
    "another machine could listen": ({}, "0.0.0.0:0", "other machines could listen"),
    "a certificate alone": ({"tls_cert": "c.pem"}, "127.0.0.1:0", "TLS needs"),
    "no certificate there": ({"tls_cert": "c.pem", "tls_key": "k.pem"}, "127.0.0.1:0", "cannot be used"),
    "no such file of tokens": ({"tokens": "nothing"}, "127.0.0.1:0", "cannot be read"),
    "a url with dots": ({"http_url": "https://a.example/x/.."}, "127.0.0.1:0", "is not the address of a site"),
    "a url with two slashes": ({"http_url": "https://a.example/x//y"}, "127.0.0.1:0", "is not the address of a site"),
    "a url with a semicolon": ({"http_url": "https://a.example/x;y"}, "127.0.0.1:0", "is not the address of a site"),
    "a url with a query": ({"http_url": "https://a.example/x?y"}, "127.0.0.1:0", "is not the address of a site"),
    "a url with a name": ({"http_url": "https://me:x@a.example"}, "127.0.0.1:0", "is not the address of a site"),
    "no port": ({}, "127.0.0.1", "is not HOST:PORT"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_not_be_safe_is_refused(tmp_path: Path, why: str) -> None:
    """In one sentence, before anything listens."""
    options, address, message = REFUSED[why]
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    with pytest.raises(SettingsError, match=message):
        WebServer(ListenOptions(**{"http": address, "tokens": str(tokens), **options}))


def test_nobody_could_log_in(tmp_path: Path) -> None:
    """A socket without tokens and without a link is refused, options for none, and a key that everybody reads."""
    with pytest.raises(SettingsError, match="nobody could log in"):
        WebServer(ListenOptions(http="127.0.0.1:0"))
    with pytest.raises(SettingsError, match="only for --http"):
        web_server.open_web_server(ListenOptions(tokens=str(tmp_path)))
    assert web_server.open_web_server(ListenOptions()) is None
    certificate, key = make_certificate(tmp_path, "open")
    Path(key).chmod(0o644)
    with pytest.raises(SettingsError, match="every user can read the key"):
        WebServer(ListenOptions(http="127.0.0.1:0", tls_cert=certificate, tls_key=key, link=Role.READER))

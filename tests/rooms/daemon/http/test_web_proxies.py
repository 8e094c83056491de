"""nginx and Caddy before the daemon, with the files that it prints: TLS, slow clients, sizes, streams and rates."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon.command import command
from click.testing import CliRunner
from gate_calls import SECRETS
from servers.fixtures import skip_or_fail
from servers.processes import NotInstalledError, free_port
from servers.web_proxies import PROXIES, fitted
from sites import TOKEN, UNFINISHED, Site, rest_of, unfinished
from support.certificates import make_certificate

from ckptguard.values.access import Role


class Proxied(Site):
    """A site, asked through a proxy with TLS."""

    def __init__(self, folder: Path, port: int, certificate: str) -> None:
        super().__init__(folder, url=f"https://localhost:{port}")
        self.behind_port, self.port = self.port, port
        self.context = ssl.create_default_context(cafile=certificate)


@pytest.fixture(params=PROXIES)
def name(request: pytest.FixtureRequest) -> str:
    """The proxy."""
    return str(request.param)


@pytest.fixture
def proxied(name: str, tmp_path: Path) -> Iterator[Proxied]:
    """The proxy with its printed file: only the places, and the time of a slow client, are others."""
    certificate, key = make_certificate(tmp_path, "proxy")
    site = Proxied(tmp_path / "site", free_port(), certificate)
    text = CliRunner().invoke(command, ["--example", name]).output
    places = {
        "/etc/ssl/ckpt.pem": certificate,
        "/etc/ssl/ckpt.key": key,
        "127.0.0.1:8080": f"127.0.0.1:{site.behind_port}",
    }
    times = {"header_timeout 10s": "header_timeout 1s", "body_timeout 10s": "body_timeout 1s"}
    if name == "caddy":
        times = {"read_header 10s": "read_header 1s", "read_body 10s": "read_body 1s"}
    folder = tmp_path / "proxy"
    folder.mkdir()
    try:
        with PROXIES[name](folder, fitted(text, {**places, **times}), site.port):
            yield site
    except NotInstalledError as error:
        skip_or_fail(error)
    finally:
        site.close()


def test_a_browser_logs_in_and_acts(proxied: Proxied) -> None:
    """By the proxy's name, with a cookie for TLS alone. Another Origin is refused, as without a proxy."""
    assert proxied.works()
    body = json.dumps({"token": SECRETS[Role.OPERATOR]})
    origin = f"Origin: https://localhost:{proxied.port}\r\n"
    head = f"POST /v1/session HTTP/1.1\r\nHost: localhost:{proxied.port}\r\nConnection: close\r\n"
    said = proxied.say(f"{head}{origin}Content-Length: {len(body)}\r\n\r\n{body}").decode()
    assert said.startswith("HTTP/1.1 201 ")
    cookie = next(line for line in said.splitlines() if line.lower().startswith("set-cookie: "))
    assert {"secure", "httponly"} <= {part.strip().lower() for part in cookie.split(";")}
    session = f"Cookie: {cookie.partition(': ')[2].partition(';')[0]}\r\n"
    verify = f"POST /v1/runs/{proxied.behind.shown.run_id}/verify HTTP/1.1\r\nHost: localhost:{proxied.port}\r\n"
    for sent, status in ((origin, "202"), ("Origin: https://evil.example\r\n", "403")):
        said = proxied.say(f"{verify}Connection: close\r\nContent-Length: 0\r\n{session}{sent}\r\n").decode()
        assert said.startswith(f"HTTP/1.1 {status} ")


@pytest.mark.parametrize("half", UNFINISHED)
def test_slow_clients_cost_nobody_anything(proxied: Proxied, half: str) -> None:
    """However many of them wait, another is answered at once. Each is ended after its time."""
    text = unfinished(f"localhost:{proxied.port}")[half]
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(proxied.connect()) for _ in range(60)]
        for one in slow:
            one.sendall(text)
        assert proxied.works()
        if half != "nothing":
            for one in slow:
                rest_of(one)


def test_a_large_body_is_refused(proxied: Proxied) -> None:
    """It does not reach the daemon whole. Caddy 2.6 says 502, as it reads while it asks."""
    head = f"POST /v1/session HTTP/1.1\r\nHost: localhost:{proxied.port}\r\nConnection: close\r\n"
    with proxied.connect() as made:
        made.sendall(f"{head}Content-Length: 5000000\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            made.sendall(b"x" * 5_000_000)
        assert rest_of(made)[9:12] in (b"413", b"502")
    assert proxied.works()


def test_events_come_at_once_and_end(proxied: Proxied) -> None:
    """A stream is not held back, and ends with the daemon."""
    head = f"GET /v1/events HTTP/1.1\r\nHost: localhost:{proxied.port}\r\nConnection: close\r\n"
    with proxied.connect() as made:
        made.sendall(f"{head}{TOKEN}\r\n".encode())
        said = b""
        while b"event: hello" not in said:
            part = made.recv(4096)
            assert part, said
            said += part
        proxied.close()
        rest_of(made)


@pytest.mark.parametrize("name", ["nginx"])
def test_one_address_has_a_rate(proxied: Proxied) -> None:
    """Logins have a smaller one: guesses end in 429, and the page goes on."""
    body = '{"token": "a guess"}'
    head = f"POST /v1/session HTTP/1.1\r\nHost: localhost:{proxied.port}\r\nConnection: close\r\n"
    statuses = [proxied.say(f"{head}Content-Length: {len(body)}\r\n\r\n{body}")[9:12] for _ in range(40)]
    assert statuses[0] == b"401"
    assert b"429" in statuses
    assert proxied.works()
    ask = f"GET /login HTTP/1.1\r\nHost: localhost:{proxied.port}\r\n"
    said = proxied.say(f"{ask}\r\n" * 600 + f"{ask}Connection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 429 " in said

"""nginx and Caddy before the daemon, with the files that it prints: TLS, slow clients, sizes, streams and rates."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
from gate_calls import SECRETS, TOKEN, UNFINISHED, Site, rest_of, unfinished
from servers.fixtures import skip_or_fail
from servers.processes import NotInstalledError, free_port
from servers.web_proxies import PROXIES, fitted
from support.certificates import make_certificate
from support.daemon_process import printed

from ckptguard.values.access import Role


class Proxied(Site):
    """A site, asked through a proxy with TLS."""

    def __init__(self, folder: Path, port: int, certificate: str, prefix: str) -> None:
        self.prefix = prefix
        super().__init__(folder, http_url=f"https://localhost:{port}{prefix}")
        self.behind_port, self.port = self.port, port
        self.context = ssl.create_default_context(cafile=certificate)

    def works(self) -> bool:
        with contextlib.suppress(OSError):
            return b'"name"' in self.get(f"{self.prefix}/v1/me", TOKEN)
        return False


@pytest.fixture(params=PROXIES)
def name(request: pytest.FixtureRequest) -> str:
    """The proxy."""
    return str(request.param)


@pytest.fixture
def prefix() -> str:
    """Below which path the page is."""
    return ""


def below(prefix: str, text: str) -> str:
    """A printed file, changed as its first lines say."""
    if not prefix:
        return text
    if "reverse_proxy" in text:
        before, mark, rest = text.partition("\treverse_proxy")
        return f"{before}\tredir {prefix} {prefix}/\n\thandle_path {prefix}/* {{\n{mark}{rest.rstrip()}\n}}\n"
    return re.sub(r"(?m)^( *location (?:= )?)/", rf"\1{prefix}/", text)


@pytest.fixture
def proxied(name: str, prefix: str, tmp_path: Path) -> Iterator[Proxied]:
    """The proxy with its printed file: only the places, and the time of a slow client, are others."""
    certificate, key = make_certificate(tmp_path, "proxy")
    site = Proxied(tmp_path / "site", free_port(), certificate, prefix)
    text = below(prefix, printed(name))
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


@pytest.mark.parametrize("prefix", ["", "/ckptguard", "/a/b-c.d"])
def test_a_browser_logs_in_and_acts(proxied: Proxied, prefix: str) -> None:
    """By the proxy's name, with a cookie for TLS and this path alone. Another Origin is refused, as without a proxy."""
    assert proxied.works()
    body = json.dumps({"token": SECRETS[Role.OPERATOR]})
    origin = f"Origin: https://localhost:{proxied.port}\r\n"
    head = f"POST {prefix}/v1/session HTTP/1.1\r\nHost: localhost:{proxied.port}\r\nConnection: close\r\n"
    said = proxied.say(f"{head}{origin}Content-Length: {len(body)}\r\n\r\n{body}").decode()
    assert said.startswith("HTTP/1.1 201 ")
    cookie = next(line for line in said.splitlines() if line.lower().startswith("set-cookie: "))
    assert {"secure", "httponly", f"path={prefix}/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert cookie.startswith(("set-cookie: __Host-", "Set-Cookie: __Host-")) is (prefix == "")
    session = f"Cookie: {cookie.partition(': ')[2].partition(';')[0]}\r\n"
    verify = (
        f"POST {prefix}/v1/runs/{proxied.behind.shown.run_id}/verify HTTP/1.1\r\nHost: localhost:{proxied.port}\r\n"
    )
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


def test_200_pages_of_one_address_all_connect(proxied: Proxied) -> None:
    """Each has its stream, and all else is answered meanwhile."""
    head = f"GET /v1/events HTTP/1.1\r\nHost: localhost:{proxied.port}\r\nConnection: close\r\n"
    with contextlib.ExitStack() as stack:
        pages = []
        for _ in range(200):
            pages.append(stack.enter_context(proxied.connect()))
            pages[-1].sendall(f"{head}{TOKEN}\r\n".encode())  # at once, for who says nothing is ended
        for page in pages:
            said = b""
            while b"event: hello" not in said:
                part = page.recv(4096)
                assert part, said
                said += part
        assert all(proxied.works() for _ in range(20))


@pytest.mark.parametrize("prefix", ["/ckptguard"])
def test_all_that_the_page_refers_to_is_below_the_prefix(proxied: Proxied, prefix: str) -> None:
    """Its files, what these import and load, and its stream; and nothing at the site's root is ours."""
    asked: set[str] = set()
    left = [f"{prefix}/", f"{prefix}/login"]
    while left:
        path = left.pop()
        asked.add(path)
        said = proxied.get(path)
        assert said.startswith(b"HTTP/1.1 200 "), path
        text = said.decode(errors="replace") if path.rpartition(".")[2] not in ("mjs", "svg") else ""
        found = re.findall(r"""(?:src=|href=|from |import |url\()["']?([\w./-]+\.(?:js|mjs|css|svg))""", text)
        found += re.findall(r'": "(\./page/[\w./]+)"', text)
        left += [where for one in set(found) if (where := urljoin(path, one)) not in asked and where not in left]
    assert all(path.startswith(f"{prefix}/") for path in asked)
    assert asked >= {
        f"{prefix}/page/{name}" for name in ("js/live.js", "vendor/preact.mjs", "css/base.css", "icon.svg")
    }
    assert proxied.works()
    assert proxied.get(f"{prefix}/v1/runs/", TOKEN)[9:12] == b"404"  # and no redirect to a place without the prefix
    assert b'"name"' not in proxied.get("/v1/me", TOKEN)
    bare = proxied.get(prefix)
    assert bare[9:10] == b"3"
    assert f"{prefix}/".encode() in bare


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
    said = b"".join(proxied.say(f"{ask}\r\n" * 800 + f"{ask}Connection: close\r\n\r\n") for _ in range(3))
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 429 " in said

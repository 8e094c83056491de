"""How long an answer takes while others attack the daemon's TCP socket.

    python -m benchmarks.bench_access [--seconds 3]

For each attack a real daemon is asked `GET /v1/me` one after another, and the median and the slowest time are printed.
The attacks are slow heads, slow bodies, bodies of 5 MB, wrong tokens, and foreign Hosts, up to 200 a second. All come
from the same address as the one who is measured, which is the worst case.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.measuring import daemon, options, seconds
from ckptguard.runs.token_file import add_token
from ckptguard.values.access import Role, Token

HEAD = "POST /v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
# Runs in a process of its own, so that it takes no time from the one who measures.
ATTACKER = """
import socket, sys, time
port, slow, text, repeat = int(sys.argv[1]), sys.argv[2] == "slow", sys.argv[3].encode(), int(sys.argv[4])
print(flush=True)
held = []
while True:
    try:
        made = socket.create_connection(("127.0.0.1", port), timeout=5)
        made.sendall(text + b"x" * repeat)
        if slow:
            held = [*held[-300:], made]
        else:
            made.recv(4096)
            made.close()
    except OSError:
        pass
    time.sleep(0.005)
"""
ATTACKS: dict[str, tuple[str, str, int] | None] = {
    "nothing": None,
    "slow heads": ("slow", "GET / HTTP/1.1\r\nHost: loc", 0),
    "slow bodies": ("slow", HEAD.format(50) + "{", 0),
    "5 MB bodies": ("fast", HEAD.format(5_000_000), 5_000_000),
    "wrong tokens": ("fast", "GET /v1/me HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer no\r\n\r\n", 0),
    "foreign Host": ("fast", "GET /v1/me HTTP/1.1\r\nHost: evil.example\r\n\r\n", 0),
}


@contextlib.contextmanager
def attack(port: int, how: tuple[str, str, int] | None) -> Iterator[None]:
    """Attack meanwhile."""
    if how is None:
        yield
        return
    command = [sys.executable, "-c", ATTACKER, str(port), how[0], how[1], str(how[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def times(ask: Callable[[], None], until: float) -> list[float]:
    """The times of answers, in milliseconds."""
    found = []
    while time.perf_counter() < until:
        found.append(seconds(ask) * 1e3)
    return found


def main() -> None:
    """Print a line for each attack."""
    lasts = options(__doc__, seconds=3.0).seconds
    with tempfile.TemporaryDirectory(prefix="cg-") as name:
        folder = Path(name)
        run = folder / "run"
        run.mkdir()
        _, secret = add_token(str(folder / "tokens"), Token(name="a", role=Role.READER, digest=""))
        with daemon(folder, run, arguments=("--http", "127.0.0.1:0", "--tokens", str(folder / "tokens"))) as asked:
            port = urlsplit(asked.logged("http")["url"]).port
            assert port is not None
            session = log_in(port, secret)

            def ask() -> None:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("GET", "/v1/me", headers={"Cookie": session})
                assert connection.getresponse().status == 200
                connection.close()

            for attacked, how in ATTACKS.items():
                with attack(port, how):
                    found = times(ask, time.perf_counter() + lasts)
                print(
                    f"{attacked}: median {statistics.median(found):.1f} ms, slowest {max(found):.0f} ms of {len(found)}"
                )


def log_in(port: int, secret: str) -> str:
    """The Cookie of a session."""
    body = b'{"token": "%s"}' % secret.encode()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as made:
        made.sendall(HEAD.format(len(body)).encode() + body)
        answer = made.recv(65536).decode()
    return answer.partition("set-cookie: ")[2].partition(";")[0]


if __name__ == "__main__":
    main()

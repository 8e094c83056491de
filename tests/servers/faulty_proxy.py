"""A proxy in front of an HTTP server: it notes every request, and of every hundred some fail, break off or take
long."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from urllib.parse import urlsplit

from servers.web_servers import Quiet, served

_SLOW_SECONDS = 1.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_BUSY = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>'


class FaultyProxy:
    """What the proxy does: `share` of all requests have one of `faults`, and those whose path holds `held` wait for
    `released`. Headers in `unheard` never reach the server, and what a GET brings has none of `unsaid`."""

    def __init__(
        self,
        target: str,
        *,
        share: float = 0.0,
        faults: Sequence[str] = ("busy", "broken", "slow"),
        held: str = "",
        seed: int = 0,
        unheard: Collection[str] = (),
        unsaid: Collection[str] = (),
    ) -> None:
        self._target, self._share, self._held = urlsplit(target).netloc, share, held
        self._faults = faults
        self._unheard, self._unsaid = {name.lower() for name in unheard}, {name.lower() for name in unsaid}
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.released = threading.Event()
        self.counts: Counter[str] = Counter()  # of "ok", "busy", "broken", "slow" and "held"
        self.asked: list[tuple[str, str]] = []  # the method and the path of each request, with its query
        self.received = 0  # bytes in the bodies of requests
        self.url = ""

    def fate_of(self, path: str) -> str:
        """What happens to the next request."""
        with self._lock:
            fate = "ok"
            if self._held and self._held in path and not self.released.is_set():
                fate = "held"
            elif self._random.random() < self._share:
                fate = self._random.choice(self._faults)
            self.counts[fate] += 1
            return fate

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        """Serve at `url`."""
        proxy = self

        class Request(Quiet):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.asked.append((self.command, self.path))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.received += len(body)
                fate = proxy.fate_of(self.path)
                if fate == "held":
                    proxy.released.wait()
                elif fate == "slow":
                    threading.Event().wait(_SLOW_SECONDS)
                elif fate == "broken":
                    self.close_connection = True
                    return
                elif fate == "busy":
                    self.answer(503, [("Content-Type", "application/xml")], _BUSY)
                    return
                behind = http.client.HTTPConnection(proxy._target, timeout=60)
                heard = {name: value for name, value in self.headers.items() if name.lower() not in proxy._unheard}
                try:
                    behind.request(self.command, self.path, body=body, headers=heard)
                    found = behind.getresponse()
                    self.answer(found.status, found.getheaders(), found.read(), found.getheader("Content-Length"))
                finally:
                    behind.close()

            def answer(
                self, status: int, headers: list[tuple[str, str]], body: bytes, length: str | None = None
            ) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    hidden = _HOP_BY_HOP | proxy._unsaid if self.command == "GET" else _HOP_BY_HOP
                    if name.lower() not in hidden:
                        self.send_header(name, value)
                # Of a HEAD it is the length of what a GET would bring.
                self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815 - the library's names

        with served(Request) as self.url:
            try:
                yield self
            finally:
                self.released.set()

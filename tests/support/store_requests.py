"""What was asked of an S3 server, as a bill would name it."""

from __future__ import annotations

import math
from collections import Counter
from urllib.parse import parse_qs, unquote, urlsplit

from servers.faulty_proxy import FaultyProxy

_LISTS = {"list-type", "prefix", "uploads", "versions"}
# S3 in us-east-1: dollars for a thousand requests. Removing is free.
PRICES = {"LIST": 0.005, "PUT": 0.005, "POST": 0.005, "GET": 0.0004, "HEAD": 0.0004, "DELETE": 0.0}


def kind_of(method: str, path: str) -> str:
    """LIST, or the request's method."""
    asked = parse_qs(urlsplit(path).query, keep_blank_values=True)
    return "LIST" if method == "GET" and asked.keys() & _LISTS else method


def key_of(path: str) -> str:
    """The key that a request names, in its bucket."""
    return unquote(urlsplit(path).path).lstrip("/").partition("/")[2]


class Bill:
    """The requests that a proxy noted since the bill was begun, apart from those that read `data`: what lies in the
    run, and outside of its records."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self._proxy = proxy
        self._begin = len(proxy.asked)
        self._end: int | None = None

    def end(self) -> None:
        """Count no later requests."""
        self._end = len(self._proxy.asked)

    @property
    def asked(self) -> list[tuple[str, str]]:
        """The kind of each request, and the key that it names."""
        return [(kind_of(*one), key_of(one[1])) for one in self._proxy.asked[self._begin : self._end]]

    def counts(self) -> Counter[str]:
        """How many of each kind, without those that read bytes of checkpoints."""
        return Counter(kind for kind, key in self.asked if not _reads_data(kind, key))

    def reads(self) -> int:
        """How many read bytes of checkpoints."""
        return sum(_reads_data(*one) for one in self.asked)

    def dollars(self) -> float:
        """What all of them cost."""
        return math.fsum(PRICES[kind] / 1000 for kind, _ in self.asked)


def _reads_data(kind: str, key: str) -> bool:
    return kind == "GET" and "/_ckptguard/" not in key

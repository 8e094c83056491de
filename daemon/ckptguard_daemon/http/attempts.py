"""How many different wrong secrets may come from one address."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

MOST, SECONDS = 20, 60.0  # wrong secrets, and until each is forgotten
_MOST_ADDRESSES = 1024


class Attempts:
    """Remembers wrong secrets by their digests. A program that repeats an expired token guesses nothing. What was right
    does not wait for what others try from its address: behind a proxy all have the same."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wait(self, address: str, digest: str, now: float) -> float:
        """Return the seconds until a secret may be tried, 0 for now."""
        key = _network_of(address)
        if (key, digest) in self._right:
            return 0.0
        wrong = self._wrong.get(key, {})
        for old in [other for other, at in wrong.items() if at + SECONDS <= now]:
            del wrong[old]
        return 0.0 if digest in wrong or len(wrong) < MOST else min(wrong.values()) + SECONDS - now

    def was_wrong(self, address: str, digest: str, now: float) -> None:
        """Remember a secret that was tried."""
        key = _network_of(address)
        self._wrong.setdefault(key, {}).setdefault(digest, now)
        self._wrong.move_to_end(key)
        if len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)

    def was_right(self, address: str, digest: str) -> None:
        """Remember a secret that lets somebody in."""
        self._right[_network_of(address), digest] = None
        if len(self._right) > _MOST_ADDRESSES:
            self._right.popitem(last=False)


def _network_of(address: str) -> str:
    """Return what one user can choose addresses from: of IPv6 it is a network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address

"""How often secrets may be tried: a little per address, and in all."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

_BURST, _EVERY = 20.0, 3.0  # of one address: tries at once, and the seconds until one more
_BURST_OF_ALL, _EVERY_OF_ALL = 200.0, 0.5
_MOST_ADDRESSES, _MOST_WRONG = 4096, 4096


class _Bucket:
    """Holds `burst` tries, and gains one every `every` seconds."""

    def __init__(self, burst: float, every: float, now: float) -> None:
        self._burst, self._every = burst, every
        self._left, self._at = burst, now

    def wait(self, now: float) -> float:
        """Return the seconds until a try is free, 0 if one is."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) / self._every)
        self._at = now
        return max(0.0, (1.0 - self._left) * self._every)

    def add(self, tries: float) -> None:
        """Take tries, or give them back."""
        self._left = min(self._burst, self._left + tries)


class Attempts:
    """Counts wrong secrets. An address that came in before does not suffer from what others try."""

    def __init__(self) -> None:
        self._all = _Bucket(_BURST_OF_ALL, _EVERY_OF_ALL, 0.0)
        self._one: OrderedDict[str, _Bucket] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._wrong: OrderedDict[str, None] = OrderedDict()

    def is_repeated(self, digest: str) -> bool:
        """True for a secret that was wrong before. A program that repeats an expired token guesses nothing."""
        return digest in self._wrong

    def was_wrong(self, digest: str) -> None:
        """Remember a secret that was wrong, by its digest."""
        self._wrong[digest] = None
        while len(self._wrong) > _MOST_WRONG:
            self._wrong.popitem(last=False)

    def begin(self, address: str, now: float) -> float:
        """Count a try as wrong until `worked` says otherwise. Returns the seconds to wait first; then nothing was
        tried."""
        key = _network_of(address)
        bucket = self._one.pop(key, None) or _Bucket(_BURST, _EVERY, now)
        self._one[key] = bucket
        while len(self._one) > _MOST_ADDRESSES:
            self._one.popitem(last=False)
        wait = max(bucket.wait(now), 0.0 if key in self._known else self._all.wait(now))
        if wait == 0.0:
            bucket.add(-1.0)
            self._all.add(-1.0 if key not in self._known else 0.0)
        return wait

    def worked(self, address: str) -> None:
        """Give a try back: its secret was right."""
        key = _network_of(address)
        if key in self._one:
            self._one[key].add(1.0)
        if key not in self._known:
            self._all.add(1.0)
        self._known[key] = None
        self._known.move_to_end(key)
        while len(self._known) > _MOST_ADDRESSES:
            self._known.popitem(last=False)


def _network_of(address: str) -> str:
    """Return what one user can choose addresses from: of IPv6 it is a network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address

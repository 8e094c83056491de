"""Clocks that only pass when a test says so, and storage whose folders' times follow them."""

from __future__ import annotations

import math
import time

import msgspec

from ckptguard.storage.local.local_storage import LocalStorage


class Clock:
    """Clocks that stand still but for what passes; what happens in truth lies before."""

    def __init__(self):
        self.passed = self.put_forward = 0.0
        self._start = float(int(time.time())) + 600

    def monotonic(self):
        return 1e3 + self.passed

    def wall(self):
        return self._start + self.passed + self.put_forward


class CoarseTimes:
    """Storage whose folders' times go in steps of two seconds, by the clock."""

    def __init__(self, clock, monkeypatch):
        self.clock, self.stamp = clock, 0
        real = LocalStorage.list

        def coarse(*arguments, **more):
            return [
                msgspec.structs.replace(e, ctime_ns=self.stamp, mtime_ns=self.stamp) if e.kind == "folder" else e
                for e in real(*arguments, **more)
            ]

        monkeypatch.setattr(LocalStorage, "list", coarse)

    def changed(self):
        """Something was, just now."""
        self.stamp = math.floor(self.clock.wall() / 2) * 2 * 10**9

"""The time limit of ``--once``."""

from __future__ import annotations

import os
import threading

from ckptguard.values.retention_policy import span_text
from ckptguard_daemon.log import log

GOOD, BAD, UNDECIDED = 0, 3, 4  # the command line's exit codes
_GRACE = 10.0  # seconds in which work that storage does not hold up ends


class TimeLimit:
    """Ends the work after some seconds by setting `stop`. What has no verdict then stays pending.

    Work that hangs in dead storage cannot be stopped: the process then ends all the same.
    """

    def __init__(self, seconds: float, stop: threading.Event) -> None:
        self._seconds, self._stop = seconds, stop
        self.is_over = False
        threading.Thread(target=self._wait, name="limit", daemon=True).start()

    @staticmethod
    def code_of(code: int) -> int:
        """Return the exit code of work that was cut off: what it could not tell is undecided, not a failure."""
        return code if code in (GOOD, BAD) else UNDECIDED

    def _wait(self) -> None:
        never = threading.Event()
        never.wait(self._seconds)
        self.is_over = True
        log("limit", level="warning", limit=span_text(self._seconds))
        self._stop.set()
        never.wait(_GRACE)
        log("limit_forced", level="error")
        os._exit(UNDECIDED)

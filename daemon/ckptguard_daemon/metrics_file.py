"""The metrics in a file, for the textfile collector of another program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ckptguard.errors import SettingsError
from ckptguard_daemon.log import log
from ckptguard_daemon.whole_file import replace_file

_SOONEST, _LATEST = 10.0, 60.0  # seconds between two writings


class MetricsFile:
    """A file that always holds one whole set of metrics. A problem with it is logged once, and never raised."""

    def __init__(self, path: str) -> None:
        """Raises SettingsError if no collector would read a file at this path."""
        if not path.endswith(".prom"):
            raise SettingsError(f"`--metrics-file {path}`: the textfile collector reads only names that end in .prom")
        self._path = os.path.abspath(path)
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise SettingsError(f"`--metrics-file {path}`: there is no folder {folder}")
        self._failing = False

    def keep_written(self, text: Callable[[], bytes], passed: threading.Event, stop: threading.Event) -> None:
        """Replace the file after each pass, though not all the time, and in the end."""
        while not stop.is_set():
            passed.wait(_LATEST)
            passed.clear()
            self.write(text())
            stop.wait(_SOONEST)
        self.write(text())

    def write(self, text: bytes) -> None:
        """Replace the file."""
        try:
            replace_file(self._path, text, mode=0o644)  # the collector is another user
        except OSError as error:
            if not self._failing:
                log("metrics_not_written", level="warning", file=self._path, reason=error.strerror)
            self._failing = True
        else:
            self._failing = False

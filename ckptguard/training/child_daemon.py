"""The daemon as training's own child, for those who start none: it ends with its parent."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys

from ckptguard.errors import SettingsError
from ckptguard.names import RECORDS_FOLDER
from ckptguard.records.run import Run
from ckptguard.training.client import daemon_answers

_STOP_SECONDS = 10.0
_log = logging.getLogger("ckptguard")


class ChildDaemon:
    """A daemon process of ours. `close` stops it; it also stops when this process ends, however it ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """Stop it, within seconds; calling it again does nothing."""
        atexit.unregister(self.close)
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_daemon(run: Run, daemon: str | None, *, settle: float | None = None) -> ChildDaemon | None:
    """Start a child daemon for a run that nobody guards (`daemon="auto"`); None with "off" or None, or when one
    answers already. Failing to start one is a warning: the records do without."""
    if daemon in (None, "off"):
        return None
    if daemon != "auto":
        raise SettingsError(f'daemon must be "auto" or "off", not {daemon!r}')
    if daemon_answers(run):
        return None
    command = [sys.executable, "-m", "ckptguard_daemon", run.url, "--parent", str(os.getpid())]
    if run.records_inside and run.storage.root is not None:
        os.makedirs(os.path.join(run.storage.root, RECORDS_FOLDER), exist_ok=True)
        command += ["--log-file", os.path.join(run.storage.root, RECORDS_FOLDER, "daemon.log")]
    elif not run.records_inside:
        command += ["--records", run.records.url]
    if settle is not None:
        command += ["--settle", str(settle)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for training; the daemon follows its parent
            env=_environment(),
        )
    except OSError as error:
        _log.warning("ckptguard: no daemon could be started for %s: %s", run.url, error)
        return None
    return ChildDaemon(process)


def _environment() -> dict[str, str]:
    """Ours, less what torchrun sets: the daemon is no rank."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks}

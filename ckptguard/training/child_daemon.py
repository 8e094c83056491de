"""A daemon of our own where none guards the run: started beside training, never waited for, ending with it."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import subprocess
import sys

import msgspec

from ckptguard.records.run import Run
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.training.client import is_alive
from ckptguard.values.settings import ENVIRONMENT_PREFIX, Settings
from ckptguard.values.storage_options import StorageOptions

_log = logging.getLogger("ckptguard")
# What torchrun sets: the daemon is no rank.
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = 10.0  # seconds that a daemon has to stop


class ChildDaemon:
    """The running child; `stop` ends it, and so does the end of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def stop(self) -> None:
        """Ask it to stop, and wait a little; calling it again does nothing."""
        atexit.unregister(self.stop)
        if self._process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it loses nothing: storage is the truth
            self._process.wait()


def ensure_daemon(run: Run, settings: Settings) -> ChildDaemon | None:
    """Start a daemon unless one answers already. Any failure is a warning: everything works without one too."""
    try:
        if is_alive(run):
            return None
        if importlib.util.find_spec("ckptguard_daemon") is None:
            raise ModuleNotFoundError("the package ckptguard_daemon is not installed")
        log = os.path.join(private_runtime_folder(os.environ), f"{run.run_id}.log")
        command = [sys.executable, "-m", "ckptguard_daemon", run.url, "--parent", str(os.getpid()), "--log-file", log]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for training; the daemon follows its parent
            env={k: v for k, v in os.environ.items() if k not in _RANK} | _as_environment(settings),
        )
    except Exception as error:
        _log.warning(
            "no daemon could be started for %s (%s): checkpoints are verified only when they are needed", run.url, error
        )
        return None
    return ChildDaemon(process)


def _as_environment(settings: Settings) -> dict[str, str]:
    """The settings that differ from the defaults, the way the daemon reads them."""
    found = {}
    for field in msgspec.structs.fields(Settings):
        value = getattr(settings, field.name)
        if value != field.default and value is not None:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            if isinstance(value, StorageOptions):  # only this user may read a process's environment
                text = msgspec.json.encode(value.revealed()).decode()
            found[ENVIRONMENT_PREFIX + field.name.upper()] = text
    return found

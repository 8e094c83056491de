"""Ask the run's daemon, always with a deadline, or start one beside training if none runs.

A daemon of our own ends with training, which never waits for it. Nothing here raises or hangs. An answer is only an
id: the caller checks it against the run's own records.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import socket
import stat
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urlencode

from ckptguard.records.daemon_record import read_daemon_record
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import this_host
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.values.ids import CheckpointId, parse_id
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import Settings, environment_of

LONGEST_ANSWER = 1 << 20  # bytes
# The variables of torchrun: the daemon is not a rank.
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = 10.0  # seconds in which a daemon must stop


def is_alive(run: Run, *, deadline: float = 2.0) -> bool:
    """True if a daemon of this host answers for the run."""
    answer = _ask(run, "GET", "/healthz", None, deadline)
    return answer is not None and answer[0] == 200


def let_daemon_verify(run: Run, *, before_step: int | None, series: str, wait_seconds: float) -> CheckpointId | None:
    """Give the daemon `wait_seconds` to verify what is pending in this series.

    Returns the id that it then holds for known-good, or None if it does not say. Only the records count.
    """
    query: dict[str, Any] = {"wait_seconds": f"{wait_seconds:g}", "series": series}
    if before_step is not None:
        query["before_step"] = before_step
    path = f"/v1/runs/{run.run_id}/known-good?{urlencode(query)}"
    answer = _ask(run, "GET", path, None, wait_seconds + 2.0)
    if answer is None or answer[0] != 200 or answer[1].get("series") != series:
        return None
    found = answer[1].get("id")
    return parse_id(series, found) if isinstance(found, str) else None


def report_incident(
    run: Run,
    *,
    step: int | None,
    cause: str,
    reason: str,
    evidence: dict[str, object],
    source: str = "guard",
    deadline: float = 2.0,
) -> str | None:
    """Ask the daemon to record an incident and to notify people. Returns the incident's id, or None."""
    spoken = {
        k: v if isinstance(v, str | int | bool) or (isinstance(v, float) and abs(v) < float("inf")) else repr(v)
        for k, v in evidence.items()
    }
    body = {"step": step, "cause": cause, "reason": reason, "evidence": spoken, "source": source}
    answer = _ask(run, "POST", f"/v1/runs/{run.run_id}/incidents", body, deadline)
    if answer is None or not 200 <= answer[0] < 300:
        return None
    incident = answer[1].get("incident")
    found = incident.get("id") if isinstance(incident, dict) else None
    return found if isinstance(found, str) else None


def _ask(
    run: Run, method: str, path: str, body: dict[str, Any] | None, deadline: float
) -> tuple[int, dict[str, Any]] | None:
    """Return the status and the document of an answer that came in time, else None."""
    from http.client import HTTPConnection  # loaded only when needed

    try:
        end = time.monotonic() + deadline
        address = _address(run)
        if address is None:
            return None
        with contextlib.closing(HTTPConnection("ckptguard")) as connection:
            connection.sock = _TimedSocket(end)
            connection.sock.connect(address)
            text = json.dumps(body, allow_nan=False) if body is not None else None
            connection.request(method, path, text, {"Connection": "close", "Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read(LONGEST_ANSWER + 1)
        if len(answer) > LONGEST_ANSWER:
            raise ValueError("the answer is too long")
        document = json.loads(answer or b"{}")
        return response.status, document if isinstance(document, dict) else {}
    except Exception as error:  # no failure here may reach training
        _log.debug("the daemon of %s did not answer: %r", run.url, error)
        return None


def _address(run: Run) -> str | None:
    """Return the socket of the daemon that the run names, if it belongs to this host and user."""
    record = read_daemon_record(run)
    if record is None or (record.host, record.boot_id) != this_host():
        return None
    found = os.lstat(record.address)
    return record.address if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid() else None


class _TimedSocket(socket.socket):
    """A Unix socket whose waits all end at one time, even if a server sends single bytes."""

    def __init__(self, end: float) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._end = end

    def connect(self, address: Any) -> None:
        self._wait_at_most()
        super().connect(address)

    def sendall(self, *arguments: Any) -> None:
        self._wait_at_most()
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._wait_at_most()
        return super().recv_into(*arguments)

    def _wait_at_most(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self.settimeout(left)


class ChildDaemon:
    """A running child daemon. `stop` ends it, and so does the end of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ask it to stop, and wait a little. A second call does nothing."""
        atexit.unregister(self.stop)
        if self._process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            self._process.terminate()
        try:
            self._process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it loses nothing: its state is in the storage
            self._process.wait()


def ensure_daemon(run: Run, settings: Settings) -> ChildDaemon | None:
    """Start a daemon unless one answers. A failure is only a warning: everything works without a daemon."""
    try:
        if is_alive(run):
            return None
        if importlib.util.find_spec("ckptguard_daemon") is None:
            raise ModuleNotFoundError("the package ckptguard_daemon is not installed")
        log = os.devnull  # if another user owns the folder
        with contextlib.suppress(OSError):
            log = os.path.join(private_runtime_folder(os.environ), f"{run.run_id}.log")
        # Without -P, Python would import what lies in the current folder.
        command = [sys.executable, "-P", "-m", "ckptguard_daemon", run.url, "--parent", str(os.getpid())]
        command += ["--log-file", log]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C is for training; the daemon ends with its parent. In a session of its own, Linux would give it as
            # much of the processors as all of training.
            process_group=0,
            env=environment_of(settings, {k: v for k, v in os.environ.items() if k not in _RANK}),
        )
    except Exception as error:
        _log.warning(
            "no daemon could be started for %s (%s): checkpoints are verified only when they are needed", run.url, error
        )
        return None
    return ChildDaemon(process)

"""Asking the daemon, from inside training: with a deadline, over its Unix socket, and never raising.

The daemon is a convenience. Its address is a hint that is checked (this host, this boot, our own socket), its answer
is only an id, and whoever gets no answer looks at the records.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from ckptguard.errors import CkptguardError
from ckptguard.records.presence import read_daemon_record, this_host
from ckptguard.records.run import Run

_LARGEST_ANSWER = 1 << 20
_log = logging.getLogger("ckptguard")


def daemon_address(run: Run) -> str | None:
    """The socket of the daemon that guards this run, if it is on this host, of this boot, and ours."""
    try:
        record = read_daemon_record(run)
    except CkptguardError:
        return None
    if record is None or (record.host, record.boot_id) != this_host():
        return None
    try:
        info = os.lstat(record.address)
    except OSError:
        return None
    return record.address if stat.S_ISSOCK(info.st_mode) and info.st_uid == os.geteuid() else None


def daemon_answers(run: Run, *, deadline: float = 2.0) -> bool:
    """Whether a daemon answers for this run within `deadline` seconds."""
    answer = _ask(run, "GET", f"/v1/runs/{run.run_id}/checkpoints", deadline=deadline)
    return answer is not None


def ask_known_good(run: Run, *, before_step: int | None, wait_seconds: float) -> str | None:
    """The id that the daemon holds for known-good, after it verified what is pending (for at most `wait_seconds`);
    None when nobody answers or nothing is good."""
    query = {"wait_seconds": f"{wait_seconds:g}"}
    if before_step is not None:
        query["before_step"] = str(before_step)
    path = f"/v1/runs/{run.run_id}/known-good?{urlencode(query)}"
    answer = _ask(run, "GET", path, deadline=wait_seconds + 5.0)
    found = answer.get("id") if answer is not None else None
    return found if isinstance(found, str) else None


def wake_daemon(run: Run) -> bool:
    """Tell the daemon that a save is finished, so that it need not wait for its timer; whether it heard."""
    return _ask(run, "POST", f"/v1/runs/{run.run_id}/verify", body={}, deadline=2.0) is not None


def report_incident(
    run: Run, *, step: int | None, cause: str, reason: str, evidence: Mapping[str, Any], source: str
) -> bool:
    """Have the daemon record an incident and tell people; whether it did. (Else the caller records it.)"""
    body = {"step": step, "cause": cause, "reason": reason, "evidence": _plain(evidence), "source": source}
    return _ask(run, "POST", f"/v1/runs/{run.run_id}/incidents", body=body, deadline=5.0) is not None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _ask(
    run: Run, method: str, path: str, *, deadline: float, body: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The answer's JSON object, or None for every kind of failure."""
    address = daemon_address(run)
    if address is None:
        return None
    ends = time.monotonic() + deadline
    connection = _UnixConnection(address, deadline)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, body=text, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        data = bytearray()
        while block := response.read1(65536):
            data += block
            if len(data) > _LARGEST_ANSWER or time.monotonic() > ends:
                return None
        answer = json.loads(bytes(data)) if response.status < 300 else None
        return answer if isinstance(answer, dict) else None
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        _log.debug("the daemon of %s did not answer: %s", run.url, error)
        return None
    finally:
        connection.close()


def _plain(value: Any) -> Any:
    """Evidence as JSON can say it: non-finite numbers and foreign objects as words."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else repr(value)
    return str(value)

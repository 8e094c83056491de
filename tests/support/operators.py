"""An operator of one run, within this process: plans and actions in the thread of the test."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from ckptguard_daemon.dashboard import actions
from ckptguard_daemon.dashboard.verbs import VERBS
from ckptguard_daemon.http.routes import Caller, Role
from ckptguard_daemon.jobs import ActionJob

from ckptguard.errors import CkptguardError
from ckptguard.values.settings import Settings
from support.records_on_disk import files_of
from support.served_runs import served, watched
from support.tiny_run import inline

ALICE = Caller(name="alice", role=Role.OPERATOR)


class InlineScanner:
    """Reads in the thread of its caller."""

    def __init__(self, stop: threading.Event) -> None:
        pass

    def by(self, settings: Settings) -> Any:
        """The scanner."""
        return inline

    def close(self) -> None:
        """Nothing is open."""


class Operator:
    """Who may do everything to a run."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        self.run = watched(url, settings)
        self.served = served([self.run])

    def plan(self, verb: str, **arguments: object) -> dict[str, Any]:
        """What a dry run answers."""
        return self._act(verb, **arguments)

    def do(self, verb: str, token: str, *, reason: str = "it is right", **arguments: object) -> dict[str, Any]:
        """What a real run answers."""
        return self._act(verb, dry_run=False, token=token, reason=reason, **arguments)

    def plan_if_any(self, verb: str, **arguments: object) -> dict[str, Any] | None:
        """What a dry run answers; None if it says why there can be no plan."""
        try:
            return self.plan(verb, **arguments)
        except CkptguardError:
            return None

    def _act(self, verb: str, **said: object) -> dict[str, Any]:
        asking = msgspec.convert(said, VERBS[verb].arguments)
        job = ActionJob("", self.run.run_id, verb, threading.Event(), exclusive=True)
        with mock.patch.object(actions, "LaneScanner", InlineScanner):
            return actions.act(self.served, self.run, verb, asking, ALICE, job)


def all_files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes and the times of everything below a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else (b"", 0)
        for path in sorted(folder.rglob("*"))
    }


def without_records(url: str) -> dict[str, bytes]:
    """What the trainer's own files hold."""
    return {key: data for key, data in files_of(url).items() if not key.startswith("_ckptguard/")}

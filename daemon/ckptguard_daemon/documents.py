"""The JSON documents of the HTTP answers; `daemon/README.md` shows one example of each."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.documents.build import Document, document, fields
from ckptguard.errors import (
    BusyError,
    CkptguardError,
    CouldNotTellError,
    NoKnownGoodError,
    NotFoundError,
    ObjectExistsError,
    RecordsError,
    RefusedError,
    SettingsError,
)
from ckptguard.inspect.list_states import CheckpointState
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.records.incidents import Incident
from ckptguard.runs.find_known_good import KnownGood
from ckptguard.version import __version__
from ckptguard_daemon.guarded import WatchedRun

_STATUS: tuple[tuple[type[CkptguardError], int], ...] = (
    (SettingsError, 400),
    (NotFoundError, 404),
    (NoKnownGoodError, 404),
    (BusyError, 423),
    (RefusedError, 409),
    (ObjectExistsError, 409),
    (CouldNotTellError, 503),
    (RecordsError, 503),
)


def error_document(kind: str, message: str, hint: str | None = None) -> Document:
    """What every refusal and failure answers with."""
    return {"error": {"kind": kind, "message": message, "hint": hint}}


def status_of(error: CkptguardError) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def health_document(presence: DaemonRecord, runs: int, *, alive: bool) -> Document:
    """`GET /healthz`."""
    status = "ok" if alive else "the loop has ended"
    return document("healthz", status=status, version=__version__, **fields(presence, "healthz"), runs=runs)


def runs_document(runs: Sequence[WatchedRun]) -> Document:
    """`GET /v1/runs`."""
    return document("runs", runs=[fields(run) for run in runs])


def checkpoints_document(run: WatchedRun, states: Sequence[CheckpointState]) -> Document:
    """`GET /v1/runs/{run}/checkpoints`."""
    return document("checkpoints", run=run.run_id, target=run.url, checkpoints=states)


def known_good_document(run: WatchedRun, known_good: KnownGood, *, waited: bool, pending: Sequence[str]) -> Document:
    """`GET /v1/runs/{run}/known-good`. `pending`: newer checkpoints that may still turn out good."""
    answer = fields(known_good, "known-good of the daemon")
    return document("known-good", run=run.run_id, **answer, waited=waited, pending=pending)


def incident_document(run: WatchedRun, incident: Incident) -> Document:
    """`POST /v1/runs/{run}/incidents`."""
    return document("incident", run=run.run_id, incident=incident)


def verify_document(run: WatchedRun, path: str | None) -> Document:
    """`POST /v1/runs/{run}/verify`."""
    return document("verify", run=run.run_id, path=path, accepted=True)

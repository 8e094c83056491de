"""The JSON documents of the HTTP answers; `daemon/README.md` shows one example of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

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
from ckptguard.records.clock import utc_text
from ckptguard.records.daemon_record import DaemonRecord
from ckptguard.records.incidents import Incident
from ckptguard.runs.find_known_good import KnownGood
from ckptguard.version import __version__
from ckptguard_daemon.guarded import GuardedRun
from ckptguard_daemon.scrub_state import PlaceAt, ScrubState

SCHEMA = 1
Document = dict[str, Any]

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


def document(command: str, /, **fields: Any) -> Document:
    """The start that every document has, then its own keys. A number that is not finite is null."""
    return {"schema": SCHEMA, "command": command, **{k: _finite(msgspec.to_builtins(v)) for k, v in fields.items()}}


def error_document(kind: str, message: str, hint: str | None = None) -> Document:
    """What every refusal and failure answers with."""
    return {"error": {"kind": kind, "message": message, "hint": hint}}


def status_of(error: CkptguardError) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def health_document(presence: DaemonRecord, runs: int, *, alive: bool) -> Document:
    """`GET /healthz`."""
    return document(
        "healthz",
        status="ok" if alive else "the loop has ended",
        version=__version__,
        host=presence.host,
        boot_id=presence.boot_id,
        pid=presence.pid,
        started_at=presence.started_at,
        runs=runs,
    )


def runs_document(runs: Sequence[GuardedRun]) -> Document:
    """`GET /v1/runs`."""
    return document("runs", runs=[_run_fields(run) for run in runs])


def _run_fields(run: GuardedRun) -> Document:
    trouble = run.trouble
    return {
        "id": run.run_id,
        "url": run.url,
        "state": run.state,
        "trouble": None if trouble is None else {"kind": trouble.kind, "message": trouble.message},
        "passes": run.passes,
        "last_pass_at": run.last_pass_at,
        "pending": [
            {"path": w.path, "series": w.series, "step": w.step, "reason": w.reason} for w in run.last_pass.pending
        ],
        "scrub": None if run.scrub is None else _scrub_fields(run.scrub),
        "replicas": [
            {"url": r.url, "behind": r.behind, "last_good": r.last_good, "trouble": r.trouble} for r in run.replicas
        ],
    }


def _scrub_fields(scrub: ScrubState) -> Document:
    return {
        "every_seconds": scrub.every,
        "bytes_per_second": scrub.rate,
        "reading": _place_fields(scrub.reading),
        "last": _place_fields(scrub.last),
        "next": _place_fields(scrub.next),
    }


def _place_fields(place: PlaceAt | None) -> Document | None:
    if place is None:
        return None
    text = None if place.at is None else utc_text(place.at)
    return {"path": place.path, "id": place.id, "place": place.place, "at": text}


def checkpoints_document(run: GuardedRun, states: Sequence[CheckpointState]) -> Document:
    """`GET /v1/runs/{run}/checkpoints`."""
    return document("checkpoints", run=run.run_id, target=run.url, checkpoints=list(states))


def known_good_document(run: GuardedRun, known_good: KnownGood, *, waited: bool, pending: Sequence[str]) -> Document:
    """`GET /v1/runs/{run}/known-good`. `pending`: newer checkpoints that may still turn out good."""
    fields = msgspec.structs.asdict(known_good)
    return document("known-good", run=run.run_id, **fields, waited=waited, pending=list(pending))


def incident_document(run: GuardedRun, incident: Incident) -> Document:
    """`POST /v1/runs/{run}/incidents`."""
    return document("incident", run=run.run_id, incident=incident)


def verify_document(run: GuardedRun, path: str | None) -> Document:
    """`POST /v1/runs/{run}/verify`."""
    return document("verify", run=run.run_id, path=path, accepted=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value

"""Seal what somebody's own code has just saved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptguard.api.report import Report, incidents_of
from ckptguard.errors import NotFoundError, RefusedError, SettingsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.manifests import checked_metrics, forget_metrics, write_metrics
from ckptguard.records.run import begin_run
from ckptguard.runs.run_view import RunView
from ckptguard.runs.target import resolve_target
from ckptguard.runs.work import Work
from ckptguard.scan import scanner_of
from ckptguard.storage import normalise_url
from ckptguard.values.ids import CheckpointId, escape
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint

_WRITTEN_HERE = Verification(trusted=True)


def seal_saved(place: str, run: str | None, metrics: Mapping[str, Any] | None, settings: Settings) -> Report:
    """See `ckptguard.seal`."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise SettingsError(f"metrics must be a dict of numbers, not {metrics!r:.80}")
    numbers = None if metrics is None else checked_metrics(metrics)
    url = normalise_url(place)
    url = url if "://" in url else os.path.realpath(url)
    found = resolve_target(url, settings)  # NotFoundError for what is not there
    if run is None and found.view is not None and found.checkpoint is not None:
        view, path = RunView(found.view.run, settings), found.checkpoint.path
    else:
        outside = normalise_url(run) if run is not None else url.rpartition("/")[0]
        view = RunView(begin_run(outside if "://" in outside else os.path.realpath(outside), settings), settings)
        path = url.removeprefix(view.run.url.rstrip("/") + "/")
    checkpoint = view.look_again(path) if path != url else None
    if checkpoint is None:
        raise NotFoundError(
            f"{escape(place)} is no checkpoint of the run {escape(view.run.url)}",
            hint="name a file such as step-500.pt, or a folder with model files, in the run's folder",
        )
    with incidents_of(settings) as incidents, _metrics_of(view, checkpoint, numbers) as sealed:
        checked = verify_checkpoint(view, checkpoint, _WRITTEN_HERE, work=Work(scanner=scanner_of(settings)))
        sealed.append(checked.id)
        incidents.judged(view.run, checked)
    if checked.outcome is not Outcome.GOOD:
        heaviest = next((f.message for f in checked.findings), "it is not good")
        raise RefusedError(
            f"{escape(place)} is {checked.outcome.value}: {escape(heaviest)}",
            outcome=checked.outcome.value,
            hint=f"see: ckptguard verify {escape(place)}",
        )
    return Report(target=url, kind=found.kind, checkpoints=(checked,))


@contextmanager
def _metrics_of(
    view: RunView, checkpoint: Checkpoint, numbers: Mapping[str, float] | None
) -> Iterator[list[CheckpointId | None]]:
    """Have these metrics recorded with what is sealed meanwhile; it goes into the list. Whatever is not sealed under
    the id that comes next leaves no metrics to the one that is, some day."""
    sealed: list[CheckpointId | None] = []
    if numbers is None:
        yield sealed
        return
    id = view.new_id(checkpoint)
    write_metrics(view.run, id, numbers)
    try:
        yield sealed
    finally:
        if sealed != [id]:
            forget_metrics(view.run, id)
    if sealed != [id]:
        _log.warning("%s was sealed before: its metrics stay as they were", checkpoint.path)

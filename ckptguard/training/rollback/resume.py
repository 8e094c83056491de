"""Resuming: the newest known-good checkpoint that loads and, if a probe is given, still trains."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ckptguard.errors import CkptguardError, NoKnownGoodError
from ckptguard.keep.quarantine import quarantine
from ckptguard.recover.roll_back import verify_pending
from ckptguard.runs.find_known_good import Wanted
from ckptguard.runs.run_view import RunView
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import Ranks, together
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.rollback.lead_and_follow import Loaded, load_together
from ckptguard.training.rollback.load_known_good import load_newest_good
from ckptguard.training.rollback.trial_batch import Probe, sick_because
from ckptguard.training.saving.stores import Store
from ckptguard.values.ids import CheckpointId

_log = logging.getLogger("ckptguard")


def load_checked(view: RunView, store: Store, parts: TrainingParts, ranks: Ranks, probe: Probe | None) -> Loaded | None:
    """Load the newest known-good checkpoint with which the probe is finite on every rank; None if there is none.

    What the probe refused is sick, for it was finite with an older one: it is quarantined. NoKnownGoodError if it
    refused all; then nothing is moved, for the probe itself may be at fault.
    """
    refused: dict[CheckpointId, tuple[Loaded, str]] = {}
    while True:
        try:
            loaded = load_together(ranks, store, lambda: _load(view, store, refused))
        except NoKnownGoodError as error:
            if not refused:
                raise
            reasons = "; ".join(f"{found.path}: {why}" for found, why in refused.values())
            raise NoKnownGoodError(
                f"no checkpoint of {view.run.url} passes the probe ({reasons})",
                hint="if this cannot be, look at the probe's own batch and precision",
            ) from error
        if loaded is None or probe is None:
            return loaded
        answers = _probed(ranks, parts, probe)
        sick = [f"rank {rank}: {why}" if ranks.size > 1 else why for rank, why in enumerate(answers) if why]
        if not sick:
            break
        _log.warning("%s is not resumed from: %s", loaded.path, sick[0])
        refused[loaded.id] = (loaded, sick[0])
    if ranks.rank == 0:
        for found, why in refused.values():
            _put_aside(view, found, why)
    return loaded


def _load(view: RunView, store: Store, refused: Collection[CheckpointId]) -> Loaded | None:
    """Load the newest of the run; what it has lost is brought back from a replica."""
    view.forget()  # a probe may have taken long
    if view.settings.replicas and not refused:
        from ckptguard.replicas.start_run import regain  # only those with replicas pay for it

        verify_pending(view, Wanted(series=store.series))
        back = regain(view, series=store.series)
        if back is not None:
            lost = "%s had lost its newest good checkpoint; %s came back from %s"
            _log.warning(lost, view.run.url, back.id, back.source)
            view.forget()
    return load_newest_good(view, store, refused=refused)


def _probed(ranks: Ranks, parts: TrainingParts, probe: Probe) -> list[str | None]:
    """What the probe said on each rank."""
    model = getattr(parts.model, "module", parts.model)
    if ranks.size == 1:
        return [sick_because(model, probe)]  # what it raises is the caller's own
    return together(ranks, "the probe", lambda: sick_because(model, probe))


def _put_aside(view: RunView, found: Loaded, why: str) -> None:
    reason = f"a checked resume refused it: {why}"
    evidence: dict[str, object] = {"checkpoint": str(found.id)}
    incident = begin_incident(view.run, step=found.step, cause="probe", reason=reason, evidence=evidence)
    action = "quarantined; an older checkpoint with which the same batch is finite was taken"
    try:
        quarantine(view, found.path.removeprefix(view.run.url.rstrip("/") + "/"), reason=reason)
    except CkptguardError as error:
        action = f"an older one was taken; it could not be quarantined: {error.message}"
        _log.warning("%s could not be quarantined: %s", found.path, error.message)
    end_incident(view.run, incident, action=action)

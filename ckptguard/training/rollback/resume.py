"""Resuming: the newest known-good checkpoint that loads and, if a probe is given, still trains."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ckptguard.errors import CkptguardError, NoKnownGoodError
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.run import Run
from ckptguard.recover.roll_back import verify_pending
from ckptguard.training.content.training_parts import Parts
from ckptguard.training.ranks import Ranks, together
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.rollback.lead_and_follow import load_together
from ckptguard.training.rollback.load_known_good import Loaded, load_newest_good
from ckptguard.training.rollback.trial_batch import Probe, sick_because
from ckptguard.training.saving.stores import Store
from ckptguard.training.state.resume_gaps import Gap
from ckptguard.training.state.skipped_batches import leave_out_again
from ckptguard.values.incident import Resumed
from ckptguard.values.settings import Settings

_MOST_NAMES = 100  # of keys that do not fit, in a record
_log = logging.getLogger("ckptguard")


def load_checked(
    run: Run, settings: Settings, store: Store, parts: Parts, ranks: Ranks, probe: Probe | None
) -> Loaded | None:
    """Load the newest known-good checkpoint with which the probe is finite on every rank; None if there is none.
    Batches that did harm after it was saved are left out again.

    What the probe refused is sick, for it was finite with an older one: it is quarantined. NoKnownGoodError if it
    refused all; then nothing is moved, for the probe itself may be at fault.
    """
    loaded = _load_accepted(run, settings, store, parts, ranks, probe)
    if loaded is not None:
        leave_out_again(run, ranks, loaded.extra)
    return loaded


def _load_accepted(
    run: Run, settings: Settings, store: Store, parts: Parts, ranks: Ranks, probe: Probe | None
) -> Loaded | None:
    refused: dict[str, tuple[Loaded, str]] = {}
    while True:
        try:
            loaded = load_together(ranks, store, lambda: _load(run, settings, store, refused))
        except NoKnownGoodError as error:
            if not refused:
                raise
            told = "; ".join(f"{found.path}: {why}" for found, why in refused.values())
            raise NoKnownGoodError(
                f"no checkpoint of {run.url} passes the probe ({told})",
                hint="if this cannot be, look at the probe's own batch and precision",
            ) from error
        if loaded is None or probe is None:
            return loaded
        answers = _probed(ranks, parts, probe)
        reasons = [f"rank {rank}: {why}" if ranks.size > 1 else why for rank, why in enumerate(answers) if why]
        if not reasons:
            break
        _log.warning("%s is not resumed from: %s", loaded.path, reasons[0])
        refused[loaded.id] = (loaded, reasons[0])
    if ranks.rank == 0:
        for found, why in refused.values():
            _put_aside(run, found, why)
    return loaded


def _load(run: Run, settings: Settings, store: Store, refused: Collection[str]) -> Loaded | None:
    """Load the newest of the run; what it has lost is brought back from a replica."""
    if settings.replicas and not refused:
        from ckptguard.replicas.start_run import regain  # only those with replicas pay for it

        verify_pending(run, settings, series=store.series)
        back = regain(run, settings, series=store.series)
        if back is not None:
            _log.warning("%s had lost its newest good checkpoint; %s came back from %s", run.url, back.id, back.source)
    return load_newest_good(run, settings, store, refused=refused)


def _probed(ranks: Ranks, parts: Parts, probe: Probe) -> list[str | None]:
    """What the probe said on each rank."""
    model = getattr(parts.model, "module", parts.model)
    if ranks.size == 1:
        return [sick_because(model, probe)]  # what it raises is the caller's own
    return together(ranks, "the probe", lambda: sick_because(model, probe))


def resumed_from(loaded: Loaded, gap: Gap) -> Resumed:
    """What training goes on from, for the report of an incident that comes later."""
    return Resumed(
        step=loaded.step,
        id=loaded.id,
        path=loaded.path,
        world_size=gap.world_size,
        anew=gap.anew,
        missing=gap.missing[:_MOST_NAMES],
        unexpected=gap.unexpected[:_MOST_NAMES],
    )


def _put_aside(run: Run, found: Loaded, why: str) -> None:
    reason = f"a checked resume refused it: {why}"
    incident = begin_incident(run, step=found.step, cause="probe", reason=reason, evidence={"checkpoint": found.id})
    action = "quarantined; an older checkpoint with which the same batch is finite was taken"
    try:
        quarantine(run, found.path.removeprefix(run.url.rstrip("/") + "/"), reason=reason)
    except CkptguardError as error:
        action = f"an older one was taken; it could not be quarantined: {error.message}"
        _log.warning("%s could not be quarantined: %s", found.path, error.message)
    end_incident(run, incident, action=action)

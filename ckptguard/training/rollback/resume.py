"""Resuming: the newest known-good checkpoint that loads and, if a probe is given, still trains."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ckptguard.decisions.error_texts import cause_of_error
from ckptguard.errors import CkptguardError, NoKnownGoodError, SettingsError, StateError
from ckptguard.keep.quarantine import quarantine
from ckptguard.recover.roll_back import verify_pending
from ckptguard.runs.find_known_good import Wanted
from ckptguard.runs.run_view import RunView
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import Ranks, together
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.rollback.lead_and_follow import Loaded, load_together
from ckptguard.training.rollback.load_known_good import load_newest_good
from ckptguard.training.saving.stores import Store
from ckptguard.training.signals.weights import first_of
from ckptguard.training.state.rng import capture_rng, restore_rng
from ckptguard.values.ids import CheckpointId

_log = logging.getLogger("ckptguard")
Probe = Callable[[], Any]


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
        model = getattr(parts.model, "module", parts.model)
        if ranks.size == 1:
            answers = [sick_because(model, probe)]  # what it raises is the caller's own
        else:
            answers = together(ranks, "the probe", functools.partial(sick_because, model, probe))
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


def sick_because(model: Any, probe: Probe) -> str | None:
    """Run `probe`, which computes a loss of a small batch and may go backward by itself: what is not finite, or None.
    The model was just loaded.

    Gradients, buffers, training mode and random numbers are afterwards what they were. SettingsError if it gives
    neither a loss nor gradients, StateError if it changed a parameter: then the model must be loaded again. An
    exception of the probe's own that speaks of no sickness is raised.
    """
    parameters = dict(model.named_parameters()) if hasattr(model, "named_parameters") else {}
    before = {name: parameter._version for name, parameter in parameters.items()}
    with _undone(model, parameters):
        try:
            found = _judge(parameters, probe())
        except Exception as error:
            if cause_of_error(f"{type(error).__name__}: {error}") is None:
                raise
            found = f"the probe raised: {error}"
    for name, parameter in parameters.items():
        if parameter._version != before[name]:
            raise StateError(f"the probe changed {name}", hint="it must compute a loss, and not update the model")
    return found


def _judge(parameters: dict[str, Any], loss: Any) -> str | None:
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    has_gradients = any(parameter.grad is not None for parameter in parameters.values())
    if getattr(loss, "requires_grad", False) and not has_gradients:
        loss.sum().backward()
    gradients = [(name, p.grad) for name, p in parameters.items() if p.grad is not None]
    if loss is None and not gradients:
        raise SettingsError("the probe gave neither a loss nor gradients", hint="return the loss of a small batch")
    if loss is not None:
        number = float(loss.detach().sum() if hasattr(loss, "detach") else loss)
        if not math.isfinite(number):
            return f"the loss of the probe is {number}"
    bad = first_of([(name, g.to_local() if hasattr(g, "to_local") else g) for name, g in gradients if g.numel()])
    return f"the gradient of {bad} is not finite in the probe" if bad is not None else None


@contextlib.contextmanager
def _undone(model: Any, parameters: dict[str, Any]) -> Iterator[None]:
    import torch

    modules = list(model.modules()) if hasattr(model, "modules") else []
    modes = [module.training for module in modules]
    buffers = [(m, n, b, b.detach().clone()) for m in modules for n, b in m.named_buffers(recurse=False)]
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    generators = capture_rng()
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                buffer.copy_(content)
                setattr(module, name, buffer)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        restore_rng(generators)

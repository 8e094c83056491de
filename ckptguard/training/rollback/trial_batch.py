"""One small batch through a model that was just loaded, as if nothing had happened afterwards."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from ckptguard.decisions.health import cause_of_error
from ckptguard.errors import SettingsError, StateError
from ckptguard.training.signals.weights import first_of
from ckptguard.training.state.rng import capture_rng, restore_rng

Probe = Callable[[], Any]


def sick_because(model: Any, probe: Probe) -> str | None:
    """Run `probe`, which computes a loss of a small batch and may go backward by itself: what is not finite, or None.

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

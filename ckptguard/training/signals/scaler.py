"""The loss scale of a scaler with torch's interface."""

from __future__ import annotations

import logging
from typing import Any

from ckptguard.training.signals.device_signals import on_device

_log = logging.getLogger("ckptguard")


def loss_scale(scaler: Any) -> Any:
    """The scale now: a float, or a tensor where it lies on a device. None without a scaler that is enabled."""
    if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
        return None
    # get_scale() reads the device, and training would wait for it at every update.
    tensor: Any = getattr(scaler, "_scale", None)
    return tensor.detach().reshape(()) if on_device(tensor) else float(scaler.get_scale())


def raise_loss_scale(scaler: Any, lowest: float) -> None:
    """Bring a scale that collapsed back to `lowest`, with the scaler's own state; a higher one stays as it is."""
    if loss_scale(scaler) is None or scaler.get_scale() >= lowest:
        return
    state = scaler.state_dict()
    if "scale" not in state:
        return  # a scaler of its own kind
    _log.warning("the loss scale is raised from %s to %s", state["scale"], lowest)
    scaler.load_state_dict({**state, "scale": lowest})

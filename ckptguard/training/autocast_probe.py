"""Sees once, at the model's first forward pass, in which dtype autocast computes. Afterwards nothing is left of it."""

from __future__ import annotations

from typing import Any


class AutocastProbe:
    """A hook for one call. `seen` is a dtype's name, "off", or None as long as nothing was seen.

    A compiled model is left alone: a hook that comes and goes would have it compiled again.
    """

    def __init__(self, model: Any) -> None:
        self.seen: str | None = None
        self._handle: Any = None
        register = getattr(model, "register_forward_pre_hook", None)
        compiled = getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod")
        if register is not None and not compiled:
            self._handle = register(self)

    def __call__(self, module: Any, arguments: Any) -> None:
        """Look, and go."""
        try:
            self.seen = _autocast(module)
        finally:
            self.remove()

    def remove(self) -> None:
        """Leave the model as it was."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def _autocast(module: Any) -> str | None:
    import torch

    first = next(iter(module.parameters()), None)
    if first is None:
        return None
    kind = first.device.type
    try:
        if not torch.is_autocast_enabled(kind):
            return "off"
        return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    except (RuntimeError, TypeError):  # a device that autocast does not know
        return None

"""Sees once, inside of the model's first forward pass, in which dtype autocast computes. Afterwards nothing is left."""

from __future__ import annotations

from typing import Any


class AutocastProbe:
    """A hook for one call. `seen` is a dtype's name, "off", or None as long as nothing was seen.

    It sits on the first layer, not on the model: a trainer may switch autocast on inside of the model's own forward.
    A compiled model is left alone: a hook that comes and goes would have it compiled again.
    """

    def __init__(self, model: Any) -> None:
        self.seen: str | None = None
        self._handle: Any = None
        layer = _first_layer(model)
        compiled = getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod")
        if layer is not None and not compiled:
            self._handle = layer.register_forward_pre_hook(self)

    def __call__(self, module: Any, arguments: Any) -> None:
        """Look, and go."""
        import torch

        if torch.compiler.is_compiling():
            return
        try:
            self.seen = _autocast(module)
        finally:
            self.remove()

    def remove(self) -> None:
        """Leave the model as it was."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def _first_layer(model: Any) -> Any:
    """The first module with parameters of its own and none inside; None in what is no module."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((m for m in modules if not any(m.children()) and any(True for _ in m.parameters())), None)


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

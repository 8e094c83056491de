"""Are all weights and buffers finite? Exact, one pass, one answer from the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any


def first_non_finite(model: Any, allow: Iterable[str] = ()) -> str | None:
    """The name of the first parameter or buffer that holds NaN or Inf, or None.

    A mask is no sickness (no NaN, no +Inf, -Inf beside one single finite value), nor is a name that `allow` matches.
    """
    import torch

    with torch.no_grad():
        named = list(_float_tensors(model))
        by_device: dict[Any, list[tuple[str, Any, Any]]] = {}
        for name, tensor in named:
            # Extremes instead of isfinite().all(): 25 times as fast on a CPU, no temporary, and NaN carries through.
            low, high = torch.aminmax(_readable(tensor))
            by_device.setdefault(tensor.device, []).append((name, tensor, (high - low).float() + low.float()))
        suspects = []
        for found in by_device.values():
            finite = torch.stack([value for _, _, value in found]).isfinite().tolist()
            suspects += [(name, tensor) for (name, tensor, _), fine in zip(found, finite, strict=True) if not fine]
        patterns = tuple(allow)
        for name, tensor in suspects:
            allowed = any(fnmatchcase(name, pattern) for pattern in patterns)
            if not allowed and not _readable(tensor).isfinite().all().item() and not _is_mask(tensor):
                return name
    return None


def first_non_finite_state(optimizer: Any, allow: Iterable[str] = ()) -> str | None:
    """The same for the tensors of an optimizer's state (moments, momenta); None without an optimizer."""
    import torch

    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return None
    named = {
        f"optimizer.state.{number}.{key}": value
        for number, entry in enumerate(state.values())
        if isinstance(entry, Mapping)
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }
    return first_non_finite(_Named(named), allow)


class _Named:
    """Tensors by name, to be looked at like a model's."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return self._tensors


def _float_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(model, torch.nn.Module):
        named: Iterable[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    else:
        named = model.state_dict().items()
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            yield name, tensor.detach()


def _readable(tensor: Any) -> Any:
    """The tensor in a type that can be compared: complex as pairs, 8-bit floats widened."""
    import torch

    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor


def _is_mask(tensor: Any) -> bool:
    import torch

    values = torch.unique(_readable(tensor).float())
    finite = values[values.isfinite()]
    return bool(len(finite) == 1 and not values.isnan().any() and not (values == float("inf")).any())

"""Are a module's parameters and buffers finite?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def first_nonfinite(module: torch.nn.Module) -> str | None:
    """The name of the first parameter or buffer that holds NaN or Inf; None if all are finite.

    Exact, whatever the dtype, and one synchronisation per device. Buffers count: batch-norm statistics are poisoned
    even when the optimizer step was skipped. A buffer of -Inf beside one single finite value is a mask, as in
    `ckptguard.checks.finite`.
    """
    import torch

    parameters = {name for name, _ in module.named_parameters()}
    names: list[str] = []
    extremes: dict[torch.device, list[torch.Tensor]] = {}
    order: dict[torch.device, list[str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.numel() == 0 or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            names.append(name)
            tensors[name] = tensor
            extremes.setdefault(tensor.device, []).append(_extreme(tensor.detach()))
            order.setdefault(tensor.device, []).append(name)
        bad: set[str] = set()
        for device, values in extremes.items():
            finite = torch.isfinite(torch.stack(values)).tolist()
            bad |= {name for name, ok in zip(order[device], finite, strict=True) if not ok}
        return next((n for n in names if n in bad and (n in parameters or not _is_mask(tensors[n]))), None)


def _extreme(tensor: torch.Tensor) -> torch.Tensor:
    """One float64 that is finite exactly when all elements are: NaN runs through aminmax, Inf is an extreme."""
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)  # fp8 has no reductions
    low, high = torch.aminmax(tensor)
    # Halved, so that two finite extremes never overflow.
    return low.to(torch.float64) * 0.5 - high.to(torch.float64) * 0.5


def _is_mask(tensor: torch.Tensor) -> bool:
    import torch

    finite = tensor[torch.isfinite(tensor)]
    lone = finite.numel() == 0 or bool((finite == finite.flatten()[0]).all())
    return lone and not bool(torch.isnan(tensor).any()) and not bool((tensor == float("inf")).any())

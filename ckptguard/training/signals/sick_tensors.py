"""Which tensors in memory are not finite, and how much of them: for an incident's report, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ckptguard.training.signals.weights import Named, first_of, model_tensors, state_tensors
from ckptguard.values.incident import SickTensor

MOST = 50
_CHUNK = 1 << 22  # elements that are counted at once: the count's temporary stays small
_GRADIENTS_FIRST = ("grad_norm", "loss_scale")


def sick_tensors(
    model: Any, optimizer: Any, *, cause: str = "", allow: Iterable[str] = (), seconds: float = 0.1
) -> tuple[tuple[SickTensor, ...], int]:
    """(What is not finite, how many more): gradients first where they made the trouble, else weights, buffers,
    gradients and optimizer state, each in its own order. After `seconds` it looks no further."""
    deadline, patterns = time.monotonic() + seconds, tuple(allow)
    sick: list[tuple[str, str, Any]] = []
    for kind, named in _kinds(model, optimizer, cause):
        sick += [(kind, name, tensor) for name, tensor in _not_finite(named, patterns, deadline)]
    shown = tuple(_counted(kind, name, tensor, deadline) for kind, name, tensor in sick[:MOST])
    return shown, len(sick) - len(shown)


def _kinds(model: Any, optimizer: Any, cause: str) -> list[tuple[str, Named]]:
    parameters = {name for name, _ in model.named_parameters()} if hasattr(model, "named_parameters") else None
    tensors = model_tensors(model)
    weights = [(n, t) for n, t in tensors if parameters is None or n in parameters]
    buffers = [(n, t) for n, t in tensors if parameters is not None and n not in parameters]
    gradients = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None] if parameters else []
    gradients = [(n, g.to_local() if hasattr(g, "to_local") else g) for n, g in gradients if not g.is_sparse]
    kinds: list[tuple[str, Named]] = [("weight", weights), ("buffer", buffers), ("gradient", gradients)]
    if cause in _GRADIENTS_FIRST:
        kinds.insert(0, kinds.pop())
    return [*kinds, ("optimizer", _by_parameter(model, optimizer))]


def _by_parameter(model: Any, optimizer: Any) -> Named:
    """The optimizer's tensors, named by the parameters that they belong to, where that can be told."""
    state = getattr(optimizer, "state", None)
    numbered = state_tensors(optimizer)
    if not numbered or not isinstance(state, dict) or not hasattr(model, "named_parameters"):
        return numbered
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {str(number): names.get(id(parameter)) for number, parameter in enumerate(state)}
    named = []
    for full, tensor in numbered:
        number, _, key = full.removeprefix("optimizer.state.").partition(".")
        name = own.get(number)
        named.append((f"{name} ({key})" if name is not None else full, tensor))
    return named


def _not_finite(named: Named, allow: tuple[str, ...], deadline: float) -> Named:
    sick = []
    for one in named:
        if time.monotonic() > deadline:
            break
        if first_of([one], allow) is not None:
            sick.append(one)
    return sick


def _counted(kind: str, name: str, tensor: Any, deadline: float) -> SickTensor:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    nan = inf = 0
    pieces = tensor.reshape(-1).split(_CHUNK) if tensor.is_contiguous() and not tensor.is_complex() else ()
    with torch.no_grad():
        for piece in pieces:
            if time.monotonic() > deadline:
                pieces = ()
                break
            readable = piece.float() if piece.element_size() == 1 else piece
            nan += int(readable.isnan().sum())
            inf += int(readable.isinf().sum())
    if not pieces:
        return SickTensor(name=name, kind=kind, dtype=dtype, elements=tensor.numel())
    return SickTensor(name=name, kind=kind, dtype=dtype, nan=nan, inf=inf, elements=tensor.numel())

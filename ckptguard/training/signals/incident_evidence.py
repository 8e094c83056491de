"""What a guard can say for an incident's report: the last updates, how training computes, what is not finite.

Nothing here raises, and nothing initialises a device.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals.autocast_probe import AutocastProbe
from ckptguard.training.signals.sample_buffer import SampleBuffer, learning_rate
from ckptguard.training.signals.sick_tensors import sick_tensors
from ckptguard.values.incident import Details, Resumed, SickTensor, Training

_log = logging.getLogger("ckptguard")
_VERSIONS = ("torch", "transformers", "accelerate", "deepspeed", "lightning", "peft")
_NOTHING: tuple[tuple[SickTensor, ...], int] = ((), 0)
_T = TypeVar("_T")


class IncidentEvidence:
    """Gathers what is known, when it is asked. `recent` are the last updates, `resumed` is what training began from;
    `allow` are patterns of tensors that may be infinite."""

    def __init__(self, parts: TrainingParts, recent: SampleBuffer, *, allow: Iterable[str] = ()) -> None:
        self._parts, self._allow = parts, tuple(allow)
        self.recent = recent
        self.resumed: Resumed | None = None
        self._autocast: AutocastProbe | None = None

    def begin(self) -> None:
        """Training begins. Not before does anything hang on the model: ``torch.jit.script`` takes no such hook."""
        if self._autocast is None:
            self._autocast = _tried(lambda: AutocastProbe(self._parts.model), None)

    def gather(self, onset: int | None, cause: str, *, through: int | None = None) -> Details:
        """Everything that is known now, before anything is put back; what cannot be told is left out. `through`: see
        `Diagnosis.onset_through`."""
        parts = self._parts
        autocast = self._autocast.seen if self._autocast is not None else None
        sick, omitted = _tried(
            lambda: sick_tensors(parts.model, parts.optimizer, cause=cause, allow=self._allow), _NOTHING
        )
        return Details(
            onset=onset,
            onset_through=through,
            samples=_tried(self.recent.samples, ()),
            training=_tried(lambda: describe_training(parts, autocast=autocast), None),
            resumed=self.resumed,
            tensors=sick,
            tensors_omitted=omitted,
            tensors_from="memory" if sick else None,
        )

    def close(self) -> None:
        """Leave the model as it was."""
        if self._autocast is not None:
            self._autocast.remove()


def describe_training(parts: TrainingParts, *, autocast: str | None = None) -> Training:
    """How training computes, by its own objects; what cannot be told is None."""
    unknown: dict[str, Any] = {}
    group = _tried(lambda: dict(_inner(parts.optimizer).param_groups[0]), unknown)
    return Training(
        dtypes=_tried(lambda: _dtypes(parts.model), unknown),
        autocast=autocast,
        loss_scaler=_tried(lambda: _scaler_name(parts.scaler), None),
        device=_tried(lambda: _device(parts.model), None),
        hardware_bf16=_tried(_hardware_bf16, None),
        optimizer=_name(_inner(parts.optimizer)),
        eps=_number(group.get("eps")),
        lr=learning_rate(parts.optimizer),
        weight_decay=_number(group.get("weight_decay")),
        scheduler=_name(parts.scheduler),
        world_size=_tried(_world_size, None),
        versions={name: str(v) for name in _VERSIONS if (v := getattr(sys.modules.get(name), "__version__", None))},
    )


def _tried(ask: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return ask()
    except Exception as error:  # evidence is worth having, and never worth the training
        _log.debug("evidence could not be gathered: %r", error)
        return otherwise


def _dtypes(model: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            name = str(parameter.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + parameter.numel()
    return counts


def _device(model: Any) -> str:
    import torch

    device = next(iter(model.parameters())).device
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return str(device.type)


def _hardware_bf16() -> bool | None:
    """Whether the device computes in bf16 by itself; None without one, or where nothing used it yet."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _world_size() -> int:
    import torch

    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ranks else 1


def _scaler_name(scaler: Any) -> str:
    if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
        return "none"
    return type(scaler).__name__


def _inner(optimizer: Any) -> Any:
    """The optimizer inside a framework's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if hasattr(inner, "param_groups") else optimizer


def _name(part: Any) -> str | None:
    return None if part is None else type(part).__name__


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

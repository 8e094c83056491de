"""What a guard knows for an incident's report: the last updates, how training computes, what is not finite.

Nothing here raises or initialises a device.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ckptguard.decisions.health import Diagnosis, Signal
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals.curve_recorder import CurveRecorder
from ckptguard.training.signals.device_signals import scaler_in_use
from ckptguard.training.signals.weights import Named, first_of, model_tensors, state_tensors
from ckptguard.values.curve import Row
from ckptguard.values.incident import Details, Sample, SickTensor, Training, worded
from ckptguard.values.own_log import log as _log

MOST = 50  # tensors in a report
_NEAR = 256  # the last updates one by one
_STRIDE = 16  # of older updates, every 16th
_FAR = 256 * _STRIDE
_MOST_EXACT = 16384  # updates whose numbers a replay can be compared with
_CHUNK = 1 << 22  # elements counted at once, so that the temporary stays small
_GRADIENTS_FIRST = ("grad_norm", "loss_scale")
_VERSIONS = ("torch", "transformers", "accelerate", "deepspeed", "lightning", "peft")
_NOTHING: tuple[tuple[SickTensor, ...], int] = ((), 0)
_T = TypeVar("_T")


def gather(
    found: Diagnosis, parts: TrainingParts, recent: SampleBuffer, *, autocast: str | None = None, allow: Sequence[str]
) -> Details:
    """Return everything known of a sickness now, before anything is restored. Unknown facts are left out.

    `recent` has the last updates, `allow` patterns of tensors that may be infinite.
    """
    sick, omitted = tried(
        lambda: sick_tensors(parts.model, parts.optimizer, cause=found.cause or "", allow=allow), _NOTHING
    )
    return Details(
        onset=found.onset_step,
        onset_through=found.onset_through,
        samples=tried(recent.samples, ()),
        training=tried(lambda: describe_training(parts, autocast=autocast, cause=found.cause), None),
        tensors=sick,
        tensors_omitted=omitted,
        tensors_from="memory" if sick else None,
    )


class SampleBuffer:
    """The numbers of the last updates, exactly. Takes plain numbers, at about a microsecond each.

    `curve` gets all of them.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self.optimizer = optimizer  # learning rates come from it
        self.curve = CurveRecorder(None)
        self._rows: deque[Row] = deque(maxlen=_MOST_EXACT)

    def append(self, signal: Signal) -> None:
        """Remember an update with the current learning rate, unless it has no numbers."""
        if signal.loss is None and signal.grad_norm is None and signal.scale is None:
            return
        row = (signal.step, signal.loss, signal.grad_norm, signal.scale, learning_rate(self.optimizer))
        self._rows.append(row)
        self.curve.append(row)

    def restart(self, step: int, *, onset: int | None = None) -> None:
        """Go back to update `step`: forget later updates. `onset`: the first sick one."""
        self.curve.begin(next((row for row in self._rows if row[0] == onset), None))
        while self._rows and self._rows[-1][0] > step:
            self._rows.pop()

    def after(self, step: int) -> tuple[Row, ...]:
        """Return the updates after `step`, oldest first."""
        return tuple(row for row in self._rows if row[0] > step)

    def samples(self) -> tuple[Sample, ...]:
        """Return the last 256 updates, and every 16th of the 4096 before them, oldest first."""
        rows = list(self._rows)
        far = [row for row in rows[-_NEAR - _FAR : -_NEAR] if row[0] % _STRIDE == 0]
        return tuple(Sample(step, *map(worded, values)) for step, *values in (*far, *rows[-_NEAR:]))


class AutocastProbe:
    """A hook that reads once, inside the model's first forward pass, in which dtype autocast computes.

    `seen` is a dtype's name, "off", or None so far. Then the hook removes itself. It is on the first layer, because a
    trainer may enable autocast inside the model's own forward. A compiled model gets no hook, because it would be
    compiled again.
    """

    def __init__(self, model: Any) -> None:
        self.seen: str | None = None
        self._handle: Any = None
        modules = model.modules() if hasattr(model, "modules") else ()
        layer = next((m for m in modules if not any(m.children()) and any(True for _ in m.parameters())), None)
        compiled = getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod")
        if layer is not None and not compiled:
            self._handle = layer.register_forward_pre_hook(self)

    def __call__(self, module: Any, arguments: Any) -> None:
        """Read the dtype, and remove the hook."""
        import torch

        if torch.compiler.is_compiling():
            return
        self.remove()
        first = next(iter(module.parameters()), None)
        if first is not None:
            kind = first.device.type
            try:
                on = torch.is_autocast_enabled(kind)
                self.seen = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else "off"
            except (RuntimeError, TypeError):
                pass  # a device that autocast does not know

    def remove(self) -> None:
        """Remove the hook from the model."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def sick_tensors(
    model: Any, optimizer: Any, *, cause: str = "", allow: Sequence[str] = (), seconds: float = 0.1
) -> tuple[tuple[SickTensor, ...], int]:
    """Return the tensors in memory that are not finite, and how many more there are.

    Gradients come first if they caused it, then weights, buffers, gradients and optimizer state, each in its own order.
    It stops after `seconds`.
    """
    deadline = time.monotonic() + seconds
    sick: list[tuple[str, str, Any]] = []
    for kind, named in _kinds(model, optimizer, cause):
        for name, tensor in named:
            if time.monotonic() > deadline:
                break
            if first_of([(name, tensor)], allow) is not None:
                sick.append((kind, name, tensor))
    shown = tuple(_counted(kind, name, tensor, deadline) for kind, name, tensor in sick[:MOST])
    return shown, len(sick) - len(shown)


def describe_training(parts: TrainingParts, *, autocast: str | None = None, cause: str | None = None) -> Training:
    """Describe how training computes, from its own objects. Unknown facts are None.

    Only for a `cause` that a scaler could explain, look for one that the guard was not given.
    """
    unknown: dict[str, Any] = {}
    inner = getattr(parts.optimizer, "optimizer", None)  # inside a framework's wrapper
    optimizer: Any = inner if hasattr(inner, "param_groups") else parts.optimizer
    group = tried(lambda: dict(optimizer.param_groups[0]), unknown)
    return Training(
        dtypes=tried(lambda: _dtypes(parts.model), unknown),
        autocast=autocast,
        loss_scaler=tried(lambda: _scaler_name(parts.scaler), None),
        scaler_not_given=tried(lambda: _name(scaler_in_use()), None) if _may_be_skipped(parts, cause) else None,
        device=tried(lambda: _device(parts.model), None),
        hardware_bf16=tried(_hardware_bf16, None),
        optimizer=_name(optimizer),
        eps=_number(group.get("eps")),
        lr=learning_rate(parts.optimizer),
        weight_decay=_number(group.get("weight_decay")),
        scheduler=_name(parts.scheduler),
        world_size=tried(_world_size, None),
        framework=_framework(parts),
        versions={name: str(v) for name in _VERSIONS if (v := getattr(sys.modules.get(name), "__version__", None))},
    )


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of the first group, or None if it is not a plain number (reading a tensor would
    wait)."""
    try:
        rate = optimizer.param_groups[0]["lr"]
    except Exception:  # an optimizer of the user's
        return None
    return float.__float__(rate) if isinstance(rate, float) else None


def tried(ask: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return ask()
    except Exception as error:  # a failure here must not affect training
        _log.debug("evidence could not be gathered: %r", error)
        return otherwise


def _kinds(model: Any, optimizer: Any, cause: str) -> list[tuple[str, Named]]:
    parameters = dict(model.named_parameters()) if hasattr(model, "named_parameters") else None
    tensors = model_tensors(model)
    weights = [(n, t) for n, t in tensors if parameters is None or n in parameters]
    buffers = [(n, t) for n, t in tensors if parameters is not None and n not in parameters]
    gradients = [(n, p.grad) for n, p in (parameters or {}).items() if p.grad is not None]
    gradients = [(n, g.to_local() if hasattr(g, "to_local") else g) for n, g in gradients if not g.is_sparse]
    kinds: list[tuple[str, Named]] = [("weight", weights), ("buffer", buffers), ("gradient", gradients)]
    if cause in _GRADIENTS_FIRST:
        kinds.insert(0, kinds.pop())
    return [*kinds, ("optimizer", _by_parameter(parameters, optimizer))]


def _by_parameter(parameters: dict[str, Any] | None, optimizer: Any) -> Named:
    """Return the optimizer's tensors, named by their parameters where possible."""
    state = getattr(optimizer, "state", None)
    numbered = state_tensors(optimizer)
    if not isinstance(state, dict) or parameters is None:
        return numbered
    names = {id(parameter): name for name, parameter in parameters.items()}
    own = {str(number): names.get(id(parameter)) for number, parameter in enumerate(state)}
    named = []
    for full, tensor in numbered:
        number, _, key = full.removeprefix("optimizer.state.").partition(".")
        name = own.get(number)
        named.append((f"{name} ({key})" if name is not None else full, tensor))
    return named


def _counted(kind: str, name: str, tensor: Any, deadline: float) -> SickTensor:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    found = SickTensor(name=name, kind=kind, dtype=dtype, elements=tensor.numel())
    if not tensor.is_contiguous() or tensor.is_complex():
        return found
    nan = inf = 0
    with torch.no_grad():
        for piece in tensor.reshape(-1).split(_CHUNK):
            if time.monotonic() > deadline:
                return found
            readable = piece.float() if piece.element_size() == 1 else piece
            nan += int(readable.isnan().sum())
            inf += int(readable.isinf().sum())
    return msgspec.structs.replace(found, nan=nan, inf=inf)


def _dtypes(model: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad:
            counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(counts)


def _device(model: Any) -> str:
    import torch

    device = next(iter(model.parameters())).device
    return f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device.type)


def _hardware_bf16() -> bool | None:
    """Return whether the device computes bf16 in hardware; None without one, or before it is used."""
    import torch

    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(torch.cuda.is_bf16_supported(including_emulation=False)) if used else None


def _framework(parts: TrainingParts) -> str:
    wrapped = type(parts.optimizer).__module__.partition(".")[0] == "accelerate"
    return "accelerate" if wrapped and parts.framework == "plain" else parts.framework


def _world_size() -> int:
    import torch

    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ranks else 1


def _may_be_skipped(parts: TrainingParts, cause: str | None) -> bool:
    return parts.scaler is None and cause in ("grad_norm", "skipped")


def _scaler_name(scaler: Any) -> str:
    enabled = scaler is not None and getattr(scaler, "is_enabled", lambda: True)()
    return type(scaler).__name__ if enabled else "none"


def _name(part: Any) -> str | None:
    return None if part is None else type(part).__name__


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

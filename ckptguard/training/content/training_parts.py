"""What is saved and restored: model, optimizer, scheduler and scaler, as trees of values and named tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckptguard.errors import CkptguardError, StateError
from ckptguard.training.content.safetensors_file import plan_file
from ckptguard.training.content.tagged_json import decode_state, encode_state, to_text
from ckptguard.values.own_log import log as _log

_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DataParallel or another wrapper"}


@dataclass(frozen=True)
class Captured:
    """The state of training at one moment. The tensors are the live ones: write them before training continues."""

    model: dict[str, Any]
    others: dict[str, Any]
    sections: dict[str, Any]
    full: bool  # the optimizer is in it, if there is one


@dataclass
class TrainingParts:
    """The objects of a training. Each has ``state_dict`` and ``load_state_dict``.

    Without `strict`, a mismatch between a checkpoint and them is a warning, and the rest is loaded. `framework` is what
    they belong to, if known. Names of the model's state were `missing` in the last loaded checkpoint, and
    `unexpected` ones only it has. Of the parts in `restarted` it held no state.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    strict: bool = True
    framework: str = "plain"
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()

    def capture(self, *, full: bool = True) -> Captured:
        """Return the current state, without the optimizer's unless it is to be `full`. Raises StateError if a part
        cannot be saved exactly."""
        import torch

        others: dict[str, Any] = {}

        def take(path: str, tensor: Any) -> str:
            name = path.removeprefix("optimizer.")
            while name in others:
                name += "'"
            others[name] = tensor
            return name

        state = self.model.state_dict()
        model = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        more = {name: value for name, value in state.items() if name not in model}
        sections = {"model": encode_state(more, path="model", take_tensor=take)}
        own = [(name, part) for name, part in self._others() if full or name != "optimizer"]
        for name, part in own:
            sections[name] = encode_state(part.state_dict(), path=name, take_tensor=take)
        return Captured(model=model, others=others, sections=sections, full=full or self.optimizer is None)

    def check(self) -> None:
        """Refuse now what could not be saved later. StateError names it."""
        for name, part in [("model", self.model), *self._others()]:
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise StateError(
                    f"the {name} is a {type(part).__name__}, which has no state_dict() and load_state_dict()",
                    hint="put several of them into one object that has both methods",
                )
        captured = self.capture()
        for tensor_name in (*captured.model, *captured.others):
            if any("\ud800" <= character <= "\udfff" for character in tensor_name):
                raise StateError(f"a tensor cannot be stored under the name {tensor_name!a}: it is not Unicode text")
        for tensor_name, tensor in captured.model.items():
            if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise StateError(
                    (
                        f"{tensor_name} is expanded: several of its elements share memory, so nothing can be loaded "
                        "into it"
                    ),
                    hint="register it as tensor.expand(...).contiguous()",
                )
        plan_file(captured.model)
        plan_file(captured.others)
        to_text(captured.sections)

    def model_tensors(self) -> dict[str, Any]:
        """Return the model's tensors by their saved names, to be loaded in place."""
        import torch

        return {n: v for n, v in self.model.state_dict().items() if isinstance(v, torch.Tensor)}

    def other_tensors(self) -> dict[str, Any]:
        """Return the other current tensors by their saved names."""
        return {name: tensor.detach() for name, tensor in self.capture().others.items()}

    def restore(self, sections: Mapping[str, Any], model: dict[str, Any], others: Mapping[str, Any]) -> None:
        """Restore everything, the model first. Raises StateError if an object refuses its state, or with `strict` if
        names differ."""
        self.restarted = ()
        try:
            own = set(self.model_tensors())
            self.compare(missing=own - set(model), unexpected=set(model) - own)
            loose = {} if self.strict else {"strict": False}
            self.model.load_state_dict({**model, **decode_state(sections["model"], others)}, **loose)
            for name, part in self._others():
                if name not in sections:
                    self.restart(name, part)
                    continue
                state = decode_state(sections[name], others)
                part.load_state_dict(state)
                if name == "optimizer":
                    put_dtypes_back(part, state)
        except (CkptguardError, MemoryError):
            raise
        except Exception as error:
            raise StateError(f"the saved state does not fit: {type(error).__name__}: {error}") from error

    def compare(self, *, missing: Collection[str], unexpected: Collection[str]) -> None:
        """Record which of the model's names a checkpoint lacks, and which it has in addition. With `strict` they are a
        StateError."""
        self.missing, self.unexpected = first, second = tuple(sorted(missing)), tuple(sorted(unexpected))
        if first or second:
            what = f"{first[0]} is missing in it" if first else f"{second[0]} is not in the model"
            counts = f"({len(first)} missing, {len(second)} unexpected)"
            self._refuse(f"the checkpoint does not fit the model: {what} {counts}{_about_prefix(first, second)}")

    def restart(self, name: str, part: Any) -> None:
        """Go on without the saved state of a part. What an optimizer holds is of other weights, and goes. Raises
        StateError with `strict`."""
        self._refuse(f"the checkpoint holds no state of the {name}")
        self.restarted = (*self.restarted, name)
        state = getattr(part, "state", None)
        if name == "optimizer" and isinstance(state, dict):
            state.clear()

    def drop_gradients(self) -> None:
        """Drop unused gradients: they belong to the replaced state, and may be NaN."""
        for parameter in self.parameters():
            parameter.grad = None

    def parameters(self) -> list[Any]:
        """Return the model's parameters; none of a model of the user's own that means something else by that name."""
        import torch

        given = getattr(self.model, "parameters", None)
        try:
            return [one for one in given() if isinstance(one, torch.Tensor)] if callable(given) else []
        except TypeError:
            return []

    def _refuse(self, why: str) -> None:
        if self.strict:
            raise StateError(why, hint="strict=False loads what fits")
        _log.warning("%s; everything that fits is loaded", why)

    def _others(self) -> list[tuple[str, Any]]:
        named = (("optimizer", self.optimizer), ("scheduler", self.scheduler), ("scaler", self.scaler))
        return [(name, part) for name, part in named if part is not None]


def _about_prefix(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Explain names that differ only by a wrapper's prefix; "" if they differ otherwise."""
    for prefix, wrapper in _WRAPPERS.items():
        for names, others, which in ((unexpected, missing, "the saved"), (missing, unexpected, "the present")):
            # torch.compile of a part of the model puts it in the middle
            if names and {name.replace(prefix, "") for name in names} == set(others):
                return (
                    f'; only {which} names have "{prefix}", which {wrapper} adds: give the guard the same kind of model'
                )
    return ""


def put_dtypes_back(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Give the optimizer the saved tensors. ``load_state_dict`` would cast them to the parameter's dtype, and fp32
    moments of a bf16 weight would lose half their digits."""
    import torch

    if "state" not in saved or "param_groups" not in saved:
        return  # another kind of optimizer
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(device=now.device)


def rates_to_start_from(optimizer: Any, scheduler: Any) -> tuple[object, ...]:
    """Return what only `scale_learning_rate` and the user's own code change: how many groups there are, and the rates
    that the scheduler starts from. Without a scheduler of torch's kind these are the rates of the groups: another kind
    may set them to what it likes."""
    groups = getattr(optimizer, "param_groups", None) or ()
    known = hasattr(scheduler, "_last_lr")
    return len(groups), *(getattr(scheduler, "base_lrs", ()) if known else [group.get("lr") for group in groups])


def scale_learning_rate(optimizer: Any, scheduler: Any, factor: float) -> None:
    """Multiply every learning rate, including those that the scheduler starts from."""
    if factor == 1.0:
        return
    groups = getattr(optimizer, "param_groups", None)
    if optimizer is not None and groups is None:
        _log.warning("the learning rate does not change: the %s has no param_groups", type(optimizer).__name__)
    for group in groups or ():
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if key in group:
                group[key] = group[key] * factor
    waiting = [scheduler] if scheduler is not None else []
    while waiting:
        current = waiting.pop()
        for name in ("base_lrs", "max_lrs", "_last_lr", "min_lrs"):
            rates = getattr(current, name, None)
            if isinstance(rates, list):
                setattr(current, name, [rate * factor for rate in rates])
        waiting += getattr(current, "_schedulers", [])

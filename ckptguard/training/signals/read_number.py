"""Read the numbers that a training loop reports. Nothing here raises, and nothing waits forever.

A value whose reading runs code that is neither torch's nor Python's own is read in a thread, which gets some seconds.
Whatever that code raises belongs to the value. In training's own thread only an Exception does. KeyboardInterrupt and
SystemExit are meant for training there, and pass.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.records.manifests import MOST_METRICS, checked_metrics
from ckptguard.values.own_log import log as _log

_SECONDS = 10.0  # for the code of one value
_MOST_STALLS = 3  # of one class: the code of a fourth value is not run
_MOST_ELEMENTS = 1 << 28  # whose mean is computed: some tenths of a second
_MOST_SAID = 50
_LONGEST_REASON = 100
_KNOWN = frozenset(("builtins", "decimal", "fractions", "numpy", "torch"))  # modules whose code is run as it is
_T = TypeVar("_T")


class UnreadableError(CkptguardError):
    """A value is no number, or its own code failed."""


class NoAnswerError(CkptguardError):
    """It did not come in time. The `thread`, if there is one, still waits for it."""

    thread: threading.Thread | None = None


class _Silent(NamedTuple):
    """A class whose code did not end in time, how often, and the thread that still waits for it."""

    kind: type
    thread: threading.Thread | None
    times: int


class NumberReader:
    """Reads what one training reports. What cannot be read counts as not reported, which is said once for each kind."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()
        self._silent: dict[int, _Silent] = {}  # by the identity of the class

    def read(self, name: str, value: Any) -> Any:
        """Return a float, or a detached tensor of one number on a device; None if the value is not readable."""
        kind = type(value)
        if value is None or kind is float:
            return value
        silent = self._silent.get(id(kind), _Silent(kind, None, 0))
        if silent.times >= _MOST_STALLS or (silent.thread is not None and silent.thread.is_alive()):
            return None
        try:
            if _is_known(kind):
                return _number(value)
            return aside(lambda: _number(value))
        except NoAnswerError as error:
            # Perhaps the whole process was suspended: it counts again once its code has ended.
            self._silent[id(kind)] = _Silent(kind, error.thread, silent.times + 1)
            self.say(name, kind, error)
        except Exception as error:  # whatever it is, it is not a number
            self.say(name, kind, error)
        return None

    def read_metrics(self, given: Any) -> dict[str, float]:
        """Return the named numbers that can be recorded with a checkpoint, without the rest."""

        def first() -> list[tuple[Any, Any]]:
            return list(islice(given.items(), MOST_METRICS + 1))

        found: dict[str, float] = {}
        try:
            items = first() if type(given) is dict else aside(first)
            if len(items) > MOST_METRICS:
                self.say("metric", type(given), UnreadableError(f"at most {MOST_METRICS} can be recorded"))
            for name, value in items[:MOST_METRICS]:
                # The methods of a class derived from str are the user's.
                name = str.__str__(name) if issubclass(type(name), str) else type(name)
                number = self.read("metric", value)
                if number is not None and type(number) is not float:
                    number = aside(lambda number=number: float(number))  # type: ignore[misc]
                if number is None and value is not None:
                    continue  # the log says so already
                try:
                    found |= checked_metrics({name: number})
                except SettingsError as error:
                    self.say("metric", type(value), error)
        except Exception as error:  # a mapping of the user's
            self.say("metric", type(given), error)
        return found

    def say(self, name: str, kind: type, why: Exception) -> None:
        """Log, once for each name and kind, that something counts as not reported. Never raises."""
        try:
            of = str(type.__getattribute__(kind, "__qualname__"))[:_LONGEST_REASON]
            if (name, of) in self._said or len(self._said) >= _MOST_SAID:
                return
            self._said.add((name, of))
            _log.warning("%s of type %s counts as not reported: %s", name, of, reason_of(why))
        except Exception:  # a handler of the user's
            _log.debug("a warning could not be logged")


def aside(work: Callable[[], _T], seconds: float = _SECONDS) -> _T:
    """Return what `work` returns in a thread of its own. UnreadableError for whatever it raises.

    NoAnswerError if it takes longer than `seconds`. Then the thread is left alone.
    """
    done: list[tuple[Any, str | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:  # the value's own, also one that would end a process
            done.append((None, reason_of(error)))

    thread = threading.Thread(target=run, name="ckptguard-number", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        late = NoAnswerError(f"reading it takes more than {seconds:g} s")
        late.thread = thread
        raise late
    result, failed = done[0]
    if failed is not None:
        raise UnreadableError(failed)
    found: _T = result
    return found


def reason_of(error: BaseException) -> str:
    """Return one short line about an exception, also if its own text cannot be had."""
    if isinstance(error, CkptguardError):
        return error.message
    name = type(error).__name__
    try:
        text = str(error).strip().partition("\n")[0][:_LONGEST_REASON]
    except BaseException:  # its __str__ is the user's
        text = ""
    return f"{name}: {text}" if text else name


def _is_known(kind: type) -> bool:
    """True if a class is of one of the known modules, and is found there: what it says of itself may be wrong."""
    module, path = (type.__getattribute__(kind, name) for name in ("__module__", "__qualname__"))
    if not isinstance(module, str) or module.partition(".")[0] not in _KNOWN:
        return False
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is kind


def _number(value: Any) -> Any:
    import torch

    if issubclass(type(value), torch.Tensor):
        return _number_of_tensor(_plain(value))
    if issubclass(type(value), str | bytes):
        raise UnreadableError("one real number is expected")
    if hasattr(value, "dtype") and _is_known(type(value)):  # numpy's
        # Where numpy masks elements, their numbers mean nothing.
        if value.dtype.kind not in "fiub" or hasattr(value, "mask") or not 0 < value.size <= _MOST_ELEMENTS:
            raise UnreadableError("one real number is expected")
        return float(value.item() if value.size == 1 else value.mean(dtype="float64"))
    return float.__float__(float(value))  # never an instance of a class derived from float


def _plain(value: Any) -> Any:
    """Return a tensor without the ``__torch_function__`` of its class, and this rank's part of a distributed one."""
    import torch

    kind = type(value)
    if kind is torch.Tensor:
        return torch.Tensor.detach(value) if vars(value) else value  # an attribute of its own may hide a method
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.as_subclass(value, torch.Tensor)
    # It sends no message to other ranks from here.
    return _plain(value.to_local()) if hasattr(value, "to_local") else value


def _number_of_tensor(value: Any) -> Any:
    import torch

    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise UnreadableError("it is traced by torch.func")
    count = value.numel()
    if value.is_meta or value.is_complex() or value.layout is not torch.strided or not 0 < count <= _MOST_ELEMENTS:
        raise UnreadableError("one real number is expected")
    value = value.detach()
    if type(value) is torch.Tensor and not _has_memory(value):
        raise UnreadableError("its memory was freed")
    if value.is_quantized:
        value = value.dequantize()
    if value.dim():
        value = value.reshape(()) if count == 1 else value.mean(dtype=torch.float32)
    return float(value) if value.is_cpu else value


def _has_memory(tensor: Any) -> bool:
    """True if all elements are inside the tensor's storage. torch does not check that when it reads them."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
    return bool(end <= tensor.untyped_storage().nbytes())

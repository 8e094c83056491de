"""Training state as tagged JSON: no pickle, nothing lost. `decode_state(encode_state(x)) == x`, types included.

Plain JSON values stand for themselves; everything else is an object with one key that begins with ``$``. Torch
tensors inside a tree are handed out under a name and stored elsewhere. What cannot be encoded raises StateError with
its path: it is never dropped or turned into text.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import StateError

MAX_DEPTH = 100
_SMALL = 2**63
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

TakeTensor = Callable[[str, Any], str]
"""Takes a tensor and the path where it was found; returns the name under which it is stored."""


def encode_state(value: Any, *, path: str, take_tensor: TakeTensor | None = None) -> Any:
    """A tree of plain JSON values. StateError names the path of what cannot be saved."""
    return _Encoder(take_tensor).encode(value, path, 0)


def decode_state(value: Any, tensors: Mapping[str, Any] | None = None) -> Any:
    """The inverse of `encode_state`; StateError if the text is none of ours or a tensor is not there."""
    try:
        return _decode(value, tensors or {})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise StateError(f"the saved state cannot be read: {error!r}") from error


def to_text(value: Any) -> bytes:
    """Encoded state as JSON text in ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def from_text(text: bytes) -> Any:
    """The inverse of `to_text`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"the saved state is no JSON: {error}") from error


class _Encoder:
    def __init__(self, take_tensor: TakeTensor | None) -> None:
        self._take_tensor = take_tensor

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise StateError(f"{path} is nested deeper than {MAX_DEPTH} levels, or holds itself")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SMALL <= value < _SMALL else {"$int": hex(value)}
        if kind is float:
            return _encode_float(value)
        if kind is dict:
            return self._dict(value, path, depth)
        if kind is list:
            return self._items(value, path, depth)
        found = self._tagged(kind, value, path, depth)
        if found is None:
            found = self._foreign(kind, value, path)
        if found is None:
            raise StateError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle",
                hint="keep plain values and tensors in state_dict(), or save with your own save= and load=",
            )
        return found

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        return {"$dict": self._pairs(value, path, depth)}

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [self.encode(key, f"{path} (a key)", depth + 1), self.encode(item, f"{path}.{key}", depth + 1)]
            for key, item in value.items()
        ]

    def _items(self, value: Any, path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]

    def _tagged(self, kind: type, value: Any, path: str, depth: int) -> Any:
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if kind is bytearray:
            return {"$bytearray": base64.b64encode(value).decode("ascii")}
        if kind is complex:
            return {"$complex": [_encode_float(value.real), _encode_float(value.imag)]}
        if kind is OrderedDict:
            return {"$ordered": self._pairs(value, path, depth)}
        if kind is Counter:
            return {"$counter": self._pairs(value, path, depth)}
        if kind is defaultdict and value.default_factory in (None, dict, list, int, float, set):
            factory = value.default_factory.__name__ if value.default_factory else None
            return {"$defaultdict": [factory, self._pairs(value, path, depth)]}
        if kind is deque:
            return {"$deque": [value.maxlen, self._items(value, path, depth)]}
        if kind is set or kind is frozenset:
            items = sorted(self._items(value, path, depth), key=lambda item: json.dumps(item))
            return {"$set" if kind is set else "$frozenset": items}
        return None

    def _foreign(self, kind: type, value: Any, path: str) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            if self._take_tensor is None:
                raise StateError(f"{path} is a tensor, and there is no file for it here")
            return {"$tensor": self._take_tensor(path, value)}
        if torch is not None and kind is torch.Size:
            return {"$size": list(value)}
        if torch is not None and kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if torch is not None and kind is torch.device:
            return {"$device": str(value)}
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            if value.dtype.hasobject or value.dtype.names or kind not in (numpy.ndarray, value.dtype.type):
                raise StateError(f"{path} is a NumPy value of dtype {value.dtype}, which cannot be saved")
            word = "$ndarray" if kind is numpy.ndarray else "$numpy"
            text = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode("ascii")
            return {word: [value.dtype.str, list(value.shape), text]}
        return None


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": "nan" if value != value else "inf" if value > 0 else "-inf"}


def _decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            return _untag(tag, content, tensors)
    return {key: _decode(item, tensors) for key, item in value.items()}


def _untag(tag: str, content: Any, tensors: Mapping[str, Any]) -> Any:
    if tag == "$tensor":
        if content not in tensors:
            raise StateError(f"the tensor {content} of the saved state is not there")
        return tensors[content]
    if tag in _SCALARS:
        return _SCALARS[tag](content)
    if tag in ("$ndarray", "$numpy"):
        return _numpy(tag, *content)
    if tag == "$deque":
        return deque((_decode(item, tensors) for item in content[1]), maxlen=content[0])
    if tag == "$defaultdict":
        factory = _FACTORIES[content[0]] if content[0] is not None else None
        return defaultdict(factory, _decoded_pairs(content[1], tensors))
    if tag in _OF_PAIRS:
        return _OF_PAIRS[tag](_decoded_pairs(content, tensors))
    if tag in _OF_ITEMS:
        return _OF_ITEMS[tag](_decode(item, tensors) for item in content)
    raise StateError(f"the saved state has a value tagged {tag}, which this version does not know")


def _decoded_pairs(pairs: Any, tensors: Mapping[str, Any]) -> dict[Any, Any]:
    return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}


def _counter(pairs: dict[Any, Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    counter.update(pairs)
    return counter


def _numpy(tag: str, dtype: str, shape: list[int], text: str) -> Any:
    import numpy

    array = numpy.frombuffer(base64.b64decode(text), dtype=numpy.dtype(dtype)).reshape(shape)
    return array.copy() if tag == "$ndarray" else array[()]


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name) if re.fullmatch(r"\w+", name) else None
    if not isinstance(found, torch.dtype):
        raise StateError(f"the saved state names a dtype {name!r}, which this torch does not know")
    return found


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def _size(shape: list[int]) -> Any:
    import torch

    return torch.Size(shape)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$float": _FLOATS.__getitem__,
    "$int": lambda text: int(text, 16),
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$complex": lambda parts: complex(*(_decode(p, {}) for p in parts)),
    "$size": _size,
    "$dtype": _dtype,
    "$device": _device,
}
_OF_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": _counter}
_OF_ITEMS: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_FACTORIES: dict[str, Any] = {"dict": dict, "list": list, "int": int, "float": float, "set": set}

"""Training state as tagged JSON: no pickle, no loss. `decode_state(encode_state(x)) == x`, types included.

Plain JSON values stay as they are. Everything else is an object with one key that begins with ``$``. Torch tensors
inside are stored elsewhere under a name. A value that cannot be encoded raises StateError with its path. It is never
dropped or turned into text.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ckptguard.errors import StateError
from ckptguard.formats.strict_json import why_unread

MAX_DEPTH = 100
_SMALL = 2**63
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

TakeTensor = Callable[[str, Any], str]
"""Takes a path and the tensor found there. Returns the name under which it is stored."""


def encode_state(value: Any, *, path: str, take_tensor: TakeTensor | None = None) -> Any:
    """Return a tree of plain JSON values. StateError names the path of a value that cannot be saved."""
    return _Encoder(take_tensor).encode(value, path, 0)


def decode_state(value: Any, tensors: Mapping[str, Any] | None = None) -> Any:
    """Invert `encode_state`. Raises StateError if the text is not ours or a tensor is missing."""
    try:
        return _decode(value, tensors or {})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise StateError(f"the saved state cannot be read: {error!r}") from error


def to_text(value: Any) -> bytes:
    """Return encoded state as JSON text in ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def from_text(text: bytes) -> Any:
    """Invert `to_text`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise StateError("the saved state is nested too deeply") from error
    except ValueError as error:
        raise StateError(f"the saved state is not JSON: {why_unread(error)}") from error


class _Encoder:
    def __init__(self, take_tensor: TakeTensor | None) -> None:
        self._take_tensor = take_tensor

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise StateError(f"{path} is nested deeper than {MAX_DEPTH} levels, or contains itself")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SMALL <= value < _SMALL else {"$int": hex(value)}
        if kind is float:
            return _encode_float(value)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
            return {"$dict": self._pairs(value, path, depth)}
        if kind is list:
            return self._items(value, path, depth)
        found = self._tagged(kind, value, path, depth) or self._foreign(kind, value, path)
        if found is None:
            raise StateError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle",
                hint="keep plain values and tensors in state_dict(), or save with your own save= and load=",
            )
        return found

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [self.encode(key, f"{path} (a key)", depth + 1), self.encode(item, f"{path}.{key}", depth + 1)]
            for key, item in value.items()
        ]

    def _items(self, value: Any, path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]

    def _tagged(self, kind: type, value: Any, path: str, depth: int) -> Any:
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
        if kind is complex:
            return {"$complex": [_encode_float(value.real), _encode_float(value.imag)]}
        if kind is tuple:
            return {_TAGS[kind]: self._items(value, path, depth)}
        if kind in (OrderedDict, Counter):
            return {_TAGS[kind]: self._pairs(value, path, depth)}
        if kind is defaultdict and value.default_factory in _FACTORIES.values():
            factory = value.default_factory.__name__ if value.default_factory else None
            return {"$defaultdict": [factory, self._pairs(value, path, depth)]}
        if kind is deque:
            return {"$deque": [value.maxlen, self._items(value, path, depth)]}
        if kind in (set, frozenset):
            return {_TAGS[kind]: sorted(self._items(value, path, depth), key=json.dumps)}
        return None

    def _foreign(self, kind: type, value: Any, path: str) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                if self._take_tensor is None:
                    raise StateError(f"{path} is a tensor, and there is no file for it here")
                return {"$tensor": self._take_tensor(path, value)}
            if kind is torch.Size:
                return {"$size": list(value)}
            if kind in (torch.dtype, torch.device):
                return {f"${kind.__name__}": str(value).removeprefix("torch.")}
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
            raise StateError(f"the tensor {content} of the saved state is missing")
        return tensors[content]
    if tag in _SCALARS:
        return _SCALARS[tag](content)
    if tag in ("$ndarray", "$numpy"):
        return _numpy(tag, *content)
    if tag == "$deque":
        return deque((_decode(item, tensors) for item in content[1]), maxlen=content[0])
    if tag == "$defaultdict":
        return defaultdict(_FACTORIES[content[0]], _decoded_pairs(content[1], tensors))
    if tag in _OF_PAIRS:
        return _OF_PAIRS[tag](_decoded_pairs(content, tensors))
    if tag in _OF_ITEMS:
        return _OF_ITEMS[tag](_decode(item, tensors) for item in content)
    raise StateError(f"the saved state has a value tagged {tag}, which this version does not know")


def _decoded_pairs(pairs: Any, tensors: Mapping[str, Any]) -> dict[Any, Any]:
    return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}


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


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$float": _FLOATS.__getitem__,
    "$int": lambda text: int(text, 16),
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$complex": lambda parts: complex(*(_decode(p, {}) for p in parts)),
    "$size": lambda shape: import_module("torch").Size(shape),
    "$dtype": _dtype,
    "$device": lambda name: import_module("torch").device(name),
}
_OF_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
_OF_ITEMS: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_FACTORIES: dict[str | None, Any] = {None: None, "dict": dict, "list": list, "int": int, "float": float, "set": set}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in (*_OF_PAIRS.items(), *_OF_ITEMS.items())}

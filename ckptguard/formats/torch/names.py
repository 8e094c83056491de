"""The names of a container's parts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ckptguard.formats.pickle.inert_values import Call, Global, Mapping, Sequence, SetOf
from ckptguard.formats.pickle.long_values import LongBytes, LongText
from ckptguard.formats.strict_json import printable

CONTAINERS = frozenset((Mapping, Sequence, SetOf, Call, tuple))
WITHOUT_FLOATS = frozenset((str, LongText, int, bool, type(None), Global))
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_ELEMENTS = "_local_tensor"  # where a distributed tensor keeps its elements
_MAX_PARTS = 8  # of a key that is a tuple


def pairs_of(prefix: str, pairs: list[object]) -> Iterator[tuple[str, object]]:
    flat = iter(pairs)
    for index, (key, value) in enumerate(zip(flat, flat, strict=False)):
        if type(key) is str and len(key) <= 500 and key.isascii():
            yield prefix + key, value
        else:
            yield prefix + _key_text(key, index), value
            if not _is_plain_key(key):
                yield f"{prefix}key{index}", key


def of_state(name: str, prefix: str, state: object) -> Iterator[tuple[str, object]]:
    """Yield what is set on a tensor: attributes by name, and a distributed one's elements under its own name."""
    for part in state if type(state) is tuple else (state,):
        if type(part) is not Mapping:
            yield prefix + "state", part
            continue
        for key, value in pairs_of(prefix, part.flat):
            if type(value) is not bool:  # a mark, such as of a parameter
                yield (name if key == prefix + _ELEMENTS else key), value


def attributes(name: str, prefix: str, state: Mapping) -> Iterator[tuple[str, object]]:
    """Yield an object's attributes. A torch module's own tables are left out of the names."""
    flat = iter(state.flat)
    for index, (key, value) in enumerate(zip(flat, flat, strict=False)):
        yield (name if key in _MODULE_PARTS else prefix + _key_text(key, index)), value


def _is_plain_key(key: object) -> bool:
    """True if a key, which may be a tuple, holds nothing that must be checked."""
    if type(key) is tuple:
        return len(key) <= _MAX_PARTS and all(type(k) is not tuple and _is_plain_key(k) for k in key)
    return math.isfinite(key) if type(key) is float else type(key) in WITHOUT_FLOATS


def _key_text(key: object, index: int) -> str:
    if type(key) is tuple and len(key) > _MAX_PARTS:
        return f"?{index}"
    if isinstance(key, str):
        return printable(key, 500) if len(key) <= 500 else f"{printable(key, 200)}#{index}"
    if key is None or isinstance(key, float) or (isinstance(key, int) and key.bit_length() <= 64):
        return str(key)
    if isinstance(key, bytes):
        return printable(repr(key[:100]))
    if isinstance(key, LongBytes):
        return f"{printable(repr(key.read(0, 100)))}#{index}"
    if isinstance(key, Global):
        return printable(key.dotted)
    if isinstance(key, tuple) and not any(type(k) in CONTAINERS for k in key):
        return f"({', '.join(_key_text(k, index) for k in key)})"
    return f"?{index}"


def ordered_pairs(call: Call) -> list[object] | None:
    """Return keys and values of ``OrderedDict([[key, value], ...])``, the form of Python 2."""
    args = call.args
    if not call.calls("collections.OrderedDict", "builtins.dict") or type(args) is not tuple or len(args) != 1:
        return None
    if type(args[0]) is not Sequence:
        return None
    flat: list[object] = []
    for pair in args[0].items:
        parts = pair.items if type(pair) is Sequence else pair
        if not isinstance(parts, list | tuple) or len(parts) != 2:
            return None
        flat += parts
    return flat

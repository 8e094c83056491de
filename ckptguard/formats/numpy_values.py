"""numpy's scalars and arrays inside pickles: only their numbers matter, and only those that are not finite."""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterable

from ckptguard.formats.pickle_values import Call, Global

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_NAMES = ("_reconstruct", "scalar", "_frombuffer")
_DTYPES = ("numpy.dtype",)
_CODES = {"f8": "d", "f4": "f", "c16": "d", "c8": "f", "f2": "e", "c4": "e"}
_INTEGERS = {"i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}


def is_numpy(call: Call) -> bool:
    """Whether loading this call would make a numpy array or scalar."""
    func = call.func
    return type(func) is Global and func.name in _NAMES and func.module in _MODULES


def is_array(call: Call) -> bool:
    """Whether it would be an array, as opposed to a scalar."""
    return type(call.func) is Global and call.func.name != "scalar"


def numpy_numbers(call: Call) -> Iterable[float | int]:
    """The number of a scalar; of a float array one element that is not finite, if there is one."""
    args = call.args if type(call.args) is tuple else ()
    assert type(call.func) is Global
    if call.func.name == "scalar" and len(args) >= 2:
        kind, order = _element(args[0])
        raw = _raw(args[1])
        code = _CODES.get(kind) or _INTEGERS.get(kind)
        if code and raw and len(raw) % struct.calcsize(code) == 0 and len(raw) <= 16:
            return struct.unpack(f"{order}{len(raw) // struct.calcsize(code)}{code}", raw)
        return ()
    if call.func.name == "_frombuffer" and len(args) >= 2:
        return _bad_element(args[1], args[0])
    state = call.state
    if type(state) is tuple and len(state) >= 5:
        return _bad_element(state[2], state[4])
    return ()


def _bad_element(dtype: object, data: object) -> Iterable[float]:
    kind, order = _element(dtype)
    raw, code = _raw(data), _CODES.get(kind)
    if code is None or not raw or len(raw) % struct.calcsize(code):
        return ()
    numbers: Iterable[float]
    if code == "e":
        numbers = struct.unpack(f"{order}{len(raw) // 2}e", raw)
    else:
        values = array(code, raw)
        if (order == ">") != (sys.byteorder == "big"):
            values.byteswap()
        if math.isfinite(sum(values)):  # a finite sum has finite terms
            return ()
        numbers = values
    bad = next((n for n in numbers if not math.isfinite(n)), None)
    return () if bad is None else (bad,)


def _element(dtype: object) -> tuple[str, str]:
    """(kind such as "f8", byte order "<" or ">") of a pickled numpy dtype; an empty kind where it cannot be told."""
    if type(dtype) is not Call or not dtype.calls(*_DTYPES):
        return "", "<"
    args, state = dtype.args, dtype.state
    kind = args[0] if type(args) is tuple and args and type(args[0]) is str else ""
    order = state[1] if type(state) is tuple and len(state) > 1 and state[1] in ("<", ">") else "<"
    if kind[:1] in ("<", ">"):
        kind, order = kind[1:], kind[0]
    return kind, str(order)


def _raw(value: object) -> bytes:
    """Bytes as they are, or as pickle protocol 2 spells them: a latin-1 text to be encoded."""
    if type(value) is Call and type(value.args) is tuple and value.args:
        if value.calls("_codecs.encode") and type(value.args[0]) is str:
            return value.args[0].encode("latin-1", "replace")
        if value.calls("builtins.bytearray"):
            return _raw(value.args[0])
        return b""
    return value if type(value) is bytes else b""

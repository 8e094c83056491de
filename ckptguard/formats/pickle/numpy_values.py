"""numpy's scalars and arrays in pickles: only their numbers matter, and only those that are not finite."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import NamedTuple

from ckptguard.formats.nonfinite_bytes import SIZES, bad_number
from ckptguard.formats.pickle.inert_values import Call, Global, Mapping, Sequence
from ckptguard.formats.pickle.long_values import LongBytes, LongText, blocks_of

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_NAMES = ("_reconstruct", "scalar", "_frombuffer")
_DTYPE = "numpy.dtype"
_CODES = {"f8": "d", "f4": "f", "c16": "d", "c8": "f", "f2": "e", "c4": "e"}
_FLOATS = {"f8": "float64", "f4": "float32", "c16": "complex128", "c8": "complex64", "f2": "float16"}
_INTEGERS = {"i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}
_BYTES = ("_codecs.encode", "builtins.bytearray", "torch.storage._load_from_bytes")
_MOST_WRAPPERS = 4
_TYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|O[48]?|[SUVa]\d{1,9}|[mM]8)")
_FLAGS = {"O": 63, "U": 8}  # of a type without fields: what numpy must do with its elements
_WITHOUT_FLOATS = ("S", "U", "a", "M", "m", "i", "u", "b", "?")


class NumpyContent(NamedTuple):
    """The content of an array or scalar: `numbers` to check, and `items` that are values themselves.

    `unread`: it may hold floats in a form that ckptguard does not read. `raw`: bytes, which may be a file.
    """

    numbers: Iterable[float | int] = ()
    items: tuple[object, ...] = ()
    unread: bool = False
    of_array: bool = False
    raw: bytes | LongBytes = b""


_UNREAD = NumpyContent(unread=True)


def is_numpy(call: Call) -> bool:
    """True if loading this call would make a numpy array or scalar."""
    func = call.func
    return type(func) is Global and func.name in _NAMES and func.module in _MODULES


def numpy_content(call: Call) -> NumpyContent:
    """Return the number of a scalar; of a float array one element that is not finite, if any."""
    args = call.args if type(call.args) is tuple else ()
    assert type(call.func) is Global
    if call.func.name == "scalar" and len(args) >= 2:
        kind, order = _element(args[0])
        raw = _raw(args[1])
        code = _CODES.get(kind) or _INTEGERS.get(kind)
        if code and type(raw) is bytes and raw and len(raw) % struct.calcsize(code) == 0 and len(raw) <= 16:
            return NumpyContent(struct.unpack(f"{order}{len(raw) // struct.calcsize(code)}{code}", raw))
        return _other(args[0], args[1])
    if call.func.name == "_frombuffer" and len(args) >= 2:
        return _bad_element(args[1], args[0])
    state = call.state
    if type(state) is tuple and len(state) >= 5:
        return _bad_element(state[2], state[4])
    return NumpyContent()


def shape_of_floats(call: Call) -> tuple[int, ...] | None:
    """Return the shape of an array of plain floats; None for anything else."""
    args, state = call.args if type(call.args) is tuple else (), call.state
    assert type(call.func) is Global
    stated: tuple[object, ...] = ()
    if call.func.name == "_frombuffer" and len(args) >= 3:
        stated = args[1:3]
    elif type(state) is tuple and len(state) >= 5:
        stated = (state[2], state[1])
    if not stated or _element(stated[0])[0] not in _FLOATS or type(stated[1]) is not tuple:
        return None
    sizes = [size for size in stated[1] if type(size) is int]
    return tuple(sizes) if len(sizes) == len(stated[1]) else None


def is_type(name: object) -> bool:
    """True if it is a numpy type's name in pickles."""
    return type(name) is str and _TYPE.fullmatch(name) is not None


def is_placeholder(part: object) -> bool:
    """True if it is the element type that numpy writes for an array whose own type follows."""
    return part == "b" or raw_bytes(part) == b"b"


def is_type_state(args: object, state: object) -> bool:
    """True if numpy sets this state on the type made from these arguments."""
    name = args[0] if type(args) is tuple and args else None
    if type(state) is not tuple or len(state) < 8 or type(name) is not str or not is_type(name):
        return False
    version, order, inner, names, fields, *sizes = state[:8]
    if (version, len(state)) not in ((3, 8), (4, 9)) or type(order) is not str or order not in ("<", ">", "|", "="):
        return False
    kind, digits = name.lstrip("<>|=")[0], name.lstrip("<>|=")[1:]
    further = state[8] if len(state) > 8 else None
    unit = further[1] if type(further) is tuple and len(further) == 2 else None
    if len(state) > 8 and (len(unit) != 4 if type(unit) is tuple else kind in "mM" or type(further) is not Mapping):
        return False
    if kind == "V":
        is_right = all(type(n) is int and 0 <= n < 2**31 for n in sizes) and str(sizes[0]) == digits
        is_right = is_right and not sizes[2] & 7  # of numbers alone
        named = type(names) is tuple and type(fields) is Mapping and len(fields.flat) == 2 * len(names) > 0
        within = type(inner) is tuple and len(inner) == 2 and type(inner[0]) is Call
        return is_right and (fields is None if names is None else named and inner is None) and (inner is None or within)
    size = (int(digits) * (4 if kind == "U" else 1), 4 if kind == "U" else 1) if kind in "SUa" else (-1, -1)
    return (inner, names, fields) == (None, None, None) and tuple(sizes) == (*size, _FLAGS.get(kind, 0))


def hides_floats(parts: object) -> bool:
    """True if these parts of an unknown object are a numpy float type beside raw bytes."""
    if type(parts) is not tuple:
        return False
    dtypes = [p for p in parts if type(p) is Call and p.calls(_DTYPE)]
    return not all(map(_without_floats, dtypes)) and any(map(_raw, parts))


def _without_floats(dtype: object) -> bool:
    state = dtype.state if type(dtype) is Call else None
    plain = type(state) is tuple and len(state) > 4 and state[2] is None and state[4] is None
    if state is not None and not plain:
        return False
    # A void type without fields is bytes that nobody uses as numbers.
    return _element(dtype)[0].startswith((*_WITHOUT_FLOATS, "V") if plain else _WITHOUT_FLOATS)


def _other(dtype: object, data: object) -> NumpyContent:
    """Return the content of a type that is not a plain float."""
    if _element(dtype)[0].startswith("O"):
        return NumpyContent(items=tuple(data.items) if type(data) is Sequence else (data,))
    if _without_floats(dtype) or _is_empty(data):
        return NumpyContent(raw=_raw(data))
    return _UNREAD


def _bad_element(dtype: object, data: object) -> NumpyContent:
    kind, order = _element(dtype)
    raw, known = _raw(data), _FLOATS.get(kind)
    if known is None:
        return _other(dtype, data)
    if not raw or len(raw) % SIZES[known]:
        return NumpyContent() if _is_empty(data) else _UNREAD
    if type(raw) is bytes and len(raw) == SIZES[known]:  # of one element, it is that number
        code = _CODES[kind]
        return NumpyContent(struct.unpack(f"{order}{len(raw) // struct.calcsize(code)}{code}", raw))
    bad = bad_number_of(raw, known, "big" if order == ">" else "little")
    return NumpyContent() if bad is None else NumpyContent((bad,), of_array=True)


def _element(dtype: object) -> tuple[str, str]:
    """Return (kind such as "f8", byte order "<" or ">") of a pickled numpy dtype; an empty kind if unknown."""
    if type(dtype) is not Call or not dtype.calls(_DTYPE):
        return "", "<"
    args, state = dtype.args, dtype.state
    kind = args[0] if type(args) is tuple and args and type(args[0]) is str else ""
    order = state[1] if type(state) is tuple and len(state) > 1 and state[1] in ("<", ">") else "<"
    if kind[:1] in ("<", ">"):
        if state is not None and kind[0] != order:
            return "", "<"
        kind, order = kind[1:], kind[0]
    return kind, str(order)


def _is_empty(data: object) -> bool:
    """True for no bytes, in any protocol's form."""
    if type(data) is Call and data.calls("_codecs.encode", "builtins.bytes"):
        return data.args == () or (type(data.args) is tuple and data.args[0] == "")
    return data == b""


def bad_number_of(raw: bytes | LongBytes, dtype: str, byte_order: str) -> float | None:
    """Return one element that is not finite, or None, of bytes that may have stayed in their file."""
    blocks = blocks_of(raw, 0, len(raw)) if isinstance(raw, LongBytes) else (raw,)
    return next((bad for block in blocks if (bad := bad_number(block, dtype, byte_order)) is not None), None)


def _raw(value: object) -> bytes | LongBytes:
    return raw_bytes(value) or b""


def raw_bytes(value: object) -> bytes | LongBytes | None:
    """Return bytes as they are, or in pickle protocol 2's form, a latin-1 text to encode. None for anything else."""
    for _ in range(_MOST_WRAPPERS):
        if type(value) is not Call or type(value.args) is not tuple or not value.args or not value.calls(*_BYTES):
            break
        value = value.args[0]
        if type(value) is str:
            return value.encode("latin-1", "replace")
        if type(value) is LongText:
            return value
    return value if type(value) is bytes or type(value) is LongBytes else None

"""The header of a ``.npy`` file: a Python literal with a length, read without Python's own parser."""

from __future__ import annotations

import math
import re
from typing import NamedTuple, TypeGuard

from ckptguard.formats.dtypes import is_countable
from ckptguard.formats.structure import ReadProblem, is_count

MAX_HEADER = 1 << 16
MAX_DIMENSIONS = 64
MAX_FIELDS = 1000
MAGIC = b"\x93NUMPY"
_MAX_NESTING = 20
_TOKEN = re.compile(
    r"[ \t\f\r\n]*((?:True|False|None)\b|-?(?:0+|[1-9][0-9]{0,19})L?\b|'[^'\\\n]*'|\"[^\"\\\n]*\"|[\[\](){},:])"
)
_WORDS: dict[str, object] = {"True": True, "False": False, "None": None}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_END = "end"
_DESCR = re.compile(r"([<>|=]?)([?A-Za-z])(\d{0,9})(?:\[\w+\])?")
_FLOATS = {"f8": "float64", "f4": "float32", "f2": "float16", "c16": "complex128", "c8": "complex64"}
_INTEGERS = {**{f"{k}{s}": f"{w}{8 * s}" for k, w in (("i", "int"), ("u", "uint")) for s in (1, 2, 4, 8)}, "b1": "bool"}


class HeaderProblem(ReadProblem):
    """The header cannot be read."""


class Field(NamedTuple):
    """Elements of one type within an item: `times` of them, at byte `offset`. `name` is "" for a plain array.

    `dtype` is torch's name, or numpy's own word for a type that torch lacks. `unread`: it may hold floats of a kind
    that ckptguard does not read.
    """

    name: str
    dtype: str
    byte_order: str
    offset: int
    size: int
    times: int = 1
    unread: bool = False


class Header(NamedTuple):
    """The content of an array's header. `length` is the number of bytes before the data. `pickled`: the data is a
    pickle."""

    length: int
    fields: tuple[Field, ...]
    item_size: int
    shape: tuple[int, ...]
    by_columns: bool
    pickled: bool

    @property
    def data_size(self) -> int:
        """The bytes that the elements take."""
        return math.prod(self.shape) * self.item_size


def read_header(head: bytes) -> Header:
    """Return the header at the start of these bytes. HeaderProblem if there is none. Bytes after it are ignored."""
    if head[:6] != MAGIC[: len(head)]:
        raise HeaderProblem("it does not begin like numpy's files")
    if len(head) < 10:
        raise HeaderProblem("the file ends in its header", ends_early=True)
    major, minor = head[6:8]
    if major not in (1, 2, 3) or minor:
        raise HeaderProblem(f"version {major}.{minor} of the format is not known")
    begin = 12 if major > 1 else 10
    length = int.from_bytes(head[8:begin], "little")
    if begin <= len(head) and length > MAX_HEADER:
        raise HeaderProblem(f"a header of {length} bytes is more than ckptguard reads")
    if begin + length > len(head):
        raise HeaderProblem("the file ends in its header", ends_early=True)
    try:
        text = head[begin : begin + length].decode("utf-8" if major == 3 else "latin-1")
    except UnicodeDecodeError as error:
        raise HeaderProblem("its header is not UTF-8") from error
    return _header(_literal(text), begin + length)


def _header(value: object, length: int) -> Header:
    if not isinstance(value, dict) or set(value) != {"descr", "fortran_order", "shape"}:
        raise HeaderProblem("its header needs descr, fortran_order and shape, and nothing else")
    shape, by_columns = value["shape"], value["fortran_order"]
    if not isinstance(by_columns, bool):
        raise HeaderProblem("its fortran_order is neither True nor False")
    if not _is_shape(shape) or not is_countable(shape):
        raise HeaderProblem("its shape is not a tuple of sizes")
    fields: list[Field] = []
    size = _flatten("", value["descr"], 0, fields, 0)
    if not is_countable(shape, size):
        raise HeaderProblem("its shape is impossible")
    pickled = any(f.dtype == "object" for f in fields)
    return Header(length, tuple(fields), size, shape, by_columns, pickled)


def _is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS and all(map(is_count, value))


def _flatten(name: str, descr: object, offset: int, fields: list[Field], depth: int, count: int = 1) -> int:
    """Add the fields of one type, `count` times. Returns its size."""
    if isinstance(descr, str):
        fields.append(_plain(name, descr, offset, count))
        if len(fields) > MAX_FIELDS:
            raise HeaderProblem("it has more fields than ckptguard reads")
        return fields[-1].size * count
    if not isinstance(descr, list) or depth >= _MAX_NESTING:
        raise HeaderProblem("its type cannot be read")
    begin = offset
    for part in descr:
        if not isinstance(part, tuple) or len(part) not in (2, 3):
            raise HeaderProblem("its type cannot be read")
        label, inner = part[0], part[1]
        if isinstance(label, tuple) and len(label) == 2:  # (title, name)
            label = label[1]
        times = part[2] if len(part) == 3 else ()
        if not isinstance(label, str) or not _is_shape(times):
            raise HeaderProblem("its type cannot be read")
        repeated = math.prod(times)
        if label == "" and isinstance(inner, str) and inner[:2] == "|V" and inner[2:].isdecimal() and len(inner) < 12:
            offset += int(inner[2:]) * repeated  # padding
            continue
        path = f"{name}.{label}" if name else label
        if isinstance(inner, list) and repeated != 1:
            # Fields in a repeated field would need their own strides. What counts is whether they hold floats.
            nested: list[Field] = []
            size = _flatten(path, inner, 0, nested, depth + 1) * repeated
            floats = any(f.unread or f.dtype in _FLOAT_NAMES for f in nested)
            objects = any(f.dtype == "object" for f in nested)
            fields.append(Field(path, "object" if objects else "record", "little", offset, size, 1, floats))
            offset += size
        else:
            offset += _flatten(path, inner, offset, fields, depth + 1, repeated)
    if offset - begin >= 2**31:
        raise HeaderProblem("its items are larger than any array's")
    return (offset - begin) * count


def _plain(name: str, descr: str, offset: int, count: int) -> Field:
    found = _DESCR.fullmatch(descr)
    if found is None:
        raise HeaderProblem("its type cannot be read")
    order = "big" if found[1] == ">" else "little"
    kind, digits = found[2], found[3]
    if kind == "?" and not digits:
        kind, digits = "b", "1"
    if kind == "O":
        return Field(name, "object", order, offset, 8, count)
    if not digits:
        raise HeaderProblem("its type cannot be read")
    size = int(digits)
    known = _FLOATS.get(kind + digits) or _INTEGERS.get(kind + digits)
    if known:
        return Field(name, known, order, offset, size, count)
    if descr == "<V2":  # numpy's own voids have no byte order: this is how bfloat16 extends it
        return Field(name, "bfloat16", "little", offset, 2, count)
    if kind in "SaU":
        return Field(name, "text", order, offset, size * (4 if kind == "U" else 1), count)
    if kind in "mM" and size == 8:
        return Field(name, "int64", order, offset, size, count)
    if kind == "V":
        return Field(name, "bytes", order, offset, size, count, unread=found[1] == "<")
    if kind in "fc" and size <= 64:  # long doubles, and the 8-bit floats that extend numpy
        return Field(name, descr, order, offset, size, count, unread=True)
    raise HeaderProblem("its type cannot be read")


_FLOAT_NAMES = frozenset((*_FLOATS.values(), "bfloat16"))


def _literal(text: str) -> object:
    """Parse a Python literal of dicts, lists, tuples, texts without escapes, integers, True, False and None.

    `ast.literal_eval` would compile the file's text, and silently accept a duplicate key.
    """
    tokens: list[str] = []
    text, position = text.rstrip(" \n\t"), 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise HeaderProblem("its header is not a plain literal")
        tokens.append(found[1])
        position = found.end()
    tokens = [_END, *reversed(tokens)]
    value = _take_value(tokens, 0)
    if tokens != [_END]:
        raise HeaderProblem("something follows the literal in its header")
    return value


def _take_value(tokens: list[str], depth: int) -> object:
    """Return the value whose tokens are last, and remove them."""
    token = tokens.pop()
    if token in _WORDS:
        return _WORDS[token]
    if token[0] in "'\"":
        return token[1:-1]
    if token[0] in "-0123456789":
        return int(token.removesuffix("L"))
    if token not in _CLOSING or depth > _MAX_NESTING + 5:
        raise HeaderProblem("its header is not a plain literal")
    items: list[object] = []
    keys: list[str] = []
    comma = True
    while tokens[-1] != _CLOSING[token]:
        if not comma:
            raise HeaderProblem("its header is not a plain literal")
        item = _take_value(tokens, depth + 1)
        if token == "{":
            if not isinstance(item, str) or item in keys or len(keys) > 8 or tokens[-1] != ":":
                raise HeaderProblem("its header is not a plain literal")
            keys.append(item)
            tokens.pop()
            item = _take_value(tokens, depth + 1)
        items.append(item)
        comma = tokens[-1] == ","
        if comma:
            tokens.pop()
    tokens.pop()
    if token == "{":
        return dict(zip(keys, items, strict=True))
    if token == "[":
        return items
    return items[0] if len(items) == 1 and not comma else tuple(items)

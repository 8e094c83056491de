"""Flax's msgpack files: nested maps whose leaves are arrays (extension 1), scalars (3) and plain numbers.

The library parses. Only where an array's bytes are is computed here, as they end the extension that holds them.
"""

from __future__ import annotations

import math
import os
from typing import BinaryIO

import msgpack

from ckptguard.plugins import FileContents, StoredTensor

ARRAY, SCALAR = 1, 3
DEEPEST, LONGEST = 100, 2**31 - 1  # flax cuts longer arrays into pieces
PLAIN = {0xCA: "float32", 0xCB: "float64"}  # numbers outside arrays are big-endian
WIDTHS = {"bool": 1, "bfloat16": 2, "complex64": 8, "complex128": 16}


class NotFlax(ValueError):
    """These are no bytes that flax writes."""


class Walk:
    """One way through a file. Nothing that it states is trusted: no more is read than the file has."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self.tensors: list[StoredTensor] = []
        self._file = file
        self._unpacker = msgpack.Unpacker(
            file, max_buffer_size=LONGEST, ext_hook=msgpack.ExtType, strict_map_key=False, unicode_errors="strict"
        )

    def value(self, name: str, depth: int = 0) -> None:
        """Pass over the next value, and note its tensors."""
        start = self._unpacker.tell()
        first = os.pread(self._file.fileno(), 1, start)
        if not first:
            raise msgpack.OutOfData
        if depth > DEEPEST:
            raise NotFlax(f"it is nested more than {DEEPEST} times")
        kind = first[0]
        if kind & 0xF0 == 0x80 or kind in (0xDE, 0xDF):
            for _ in range(self._unpacker.read_map_header()):
                self.value(f"{name}.{self._unpacker.unpack()}" if name else str(self._unpacker.unpack()), depth + 1)
        elif kind & 0xF0 == 0x90 or kind in (0xDC, 0xDD):
            for number in range(self._unpacker.read_array_header()):
                self.value(f"{name}.{number}", depth + 1)
        else:
            value = self._unpacker.unpack()
            if kind in PLAIN:
                self.tensors.append(StoredTensor(name or "value", PLAIN[kind], (), start + 1, "big"))
            elif isinstance(value, msgpack.ExtType) and value.code in (ARRAY, SCALAR):
                self._array(name or "value", value.data, self._unpacker.tell())

    def _array(self, name: str, data: bytes, end: int) -> None:
        shape, dtype, raw = msgpack.unpackb(data, strict_map_key=False)
        if not isinstance(raw, bytes) or not isinstance(dtype, str) or not data.endswith(raw):
            raise NotFlax(f"{name} is no array")
        width = WIDTHS.get(dtype) or int("".join(c for c in dtype if c.isdecimal()) or 8) // 8
        if math.prod(shape) * width != len(raw):
            raise NotFlax(f"{name} has {len(raw)} bytes, which do not fit {dtype} and {tuple(shape)}")
        self.tensors.append(StoredTensor(name, dtype, tuple(shape), end - len(raw)))


def read(file: BinaryIO) -> FileContents:
    """Return where the arrays of a file are."""
    walk = Walk(file)
    try:
        walk.value("")
    except msgpack.OutOfData:
        return FileContents(tuple(walk.tensors), ("it ends in the middle of a value",), truncated=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        return FileContents(problems=(f"it is no msgpack of flax: {error}",))
    end = walk._unpacker.tell()
    return FileContents(
        tuple(walk.tensors), (f"{walk.size - end} bytes follow its last value",) if end < walk.size else ()
    )

"""GGUF, llama.cpp's files: a header, key-value pairs, a table of tensors, and the tensors' bytes, aligned.

Of quantised tensors the scales are floats, and each is checked. A type whose scales are not known here is not
understood.
"""

from __future__ import annotations

import math
import struct

from msgspec import structs

from ckptguard.formats.dtypes import BLOCKS, element_size, is_countable
from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Found, Problem, ReadProblem, Source, SpanPlace, Structure, TensorPlace
from ckptguard.formats.table import GGUF_MAGIC

NAME = "gguf"
_VERSIONS = (2, 3)
_PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"}
_QUANTISED = {
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    41: "q1_0",
}
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # kinds of values -> bytes
_UINT32, _TEXT, _ARRAY = 4, 8, 9
_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 1 << 16
_MOST_TENSORS = 1_000_000
_MOST_STEPS = 8_000_000  # strings and values that are passed over
_LONGEST_NAME, _MOST_DIMENSIONS, _DEEPEST = 1024, 8, 4
_BLOCK = 1 << 20


def read(reader: Source, path: str) -> Structure:
    """Return the structure of a GGUF file. Everything wrong with it is in the problems."""
    found, walk = Found(), _Walk(reader)
    unknown: list[str] = []
    try:
        alignment, tensors = _header(walk)
        _place(found, tensors, -(-walk.position // alignment) * alignment, alignment, reader.entry.size, unknown)
    except _NotKnown as error:
        unknown.append(str(error))
    except ReadProblem as error:
        if error.too_large:
            unknown.append(f"what it holds ({error})")
        else:
            found.add(Problem(str(error)))
            found.truncated = error.ends_early
    return structs.replace(found.structure(NAME), not_understood=tuple(unknown[:100]))


class _NotKnown(Exception):
    """Another version of the format, which may be whole."""


class _Walk:
    """One way through the header. Nothing that it states is trusted."""

    def __init__(self, reader: Source) -> None:
        self.position = 0
        self._reader, self._size = reader, reader.entry.size
        self._start, self._block = 0, b""
        self._steps = _MOST_STEPS

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        begin = self.position - self._start
        if begin + length > len(self._block):
            if self.position + length > self._size:
                raise ReadProblem("the file ends before its header does", ends_early=True)
            self._start, begin = self.position, 0
            self._block = self._reader.read(self._start, min(max(length, _BLOCK), self._size - self._start))
        self.position += length
        return self._block[begin : begin + length]

    def skip(self, length: int) -> None:
        """Pass over bytes."""
        if self.position + length > self._size:
            raise ReadProblem("the file ends before its header does", ends_early=True)
        self.position += length
        if not 0 <= self.position - self._start <= len(self._block):
            self._start, self._block = self.position, b""

    def number(self, form: str = "<Q") -> int:
        """Return the next number."""
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def step(self) -> None:
        """Count what takes time."""
        self._steps -= 1
        if self._steps < 0:
            raise ReadProblem("more values in its header than ckptguard reads", too_large=True)

    def text(self, most: int) -> str:
        """Return a short string."""
        length = self.number()
        if length > most:
            raise ReadProblem(f"a name has {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise ReadProblem("a name is not UTF-8") from None

    def pass_value(self, kind: int, depth: int = 0) -> None:
        """Pass over a value of a key."""
        self.step()
        if kind in _SCALARS:
            self.skip(_SCALARS[kind])
        elif kind == _TEXT:
            self.skip(self.number())
        elif kind == _ARRAY and depth < _DEEPEST:
            inner, count = self.number("<I"), self.number()
            if inner in _SCALARS:
                self.skip(count * _SCALARS[inner])
                return
            for _ in range(count):
                self.pass_value(inner, depth + 1)
        else:
            raise ReadProblem(f"a value has the kind {kind}, which is none")


def _header(walk: _Walk) -> tuple[int, list[tuple[str, tuple[int, ...], int, int]]]:
    """Return the alignment and, of each tensor, its name, shape, type and offset."""
    if walk.take(len(GGUF_MAGIC)) != GGUF_MAGIC:
        raise ReadProblem("it does not begin like a GGUF file")
    version = walk.number("<I")
    if version not in _VERSIONS:
        raise _NotKnown(f"version {version} of the format" if version < 1 << 16 else "the byte order of the file")
    count, keys = walk.number(), walk.number()
    if count > _MOST_TENSORS or keys > _MOST_STEPS:
        raise ReadProblem(f"its header states {count} tensors and {keys} keys")
    alignment = _ALIGNMENT
    for _ in range(keys):
        key, kind = walk.text(1 << 16), walk.number("<I")
        if key == "general.alignment" and kind == _UINT32:
            alignment = walk.number("<I")
        else:
            walk.pass_value(kind)
    if not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise ReadProblem(f"its alignment is {alignment}")
    tensors = []
    for _ in range(count):
        name, dimensions = walk.text(_LONGEST_NAME), walk.number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ReadProblem(f"tensor {printable(name)!r} has {dimensions} dimensions")
        shape = tuple(walk.number() for _ in range(dimensions))
        tensors.append((name, shape[::-1], walk.number("<I"), walk.number()))
    return alignment, tensors


def _place(
    found: Found,
    tensors: list[tuple[str, tuple[int, ...], int, int]],
    start: int,
    alignment: int,
    size: int,
    unknown: list[str],
) -> None:
    """Add the tensors with their places, in file order."""
    end, names, open_end = start, set[str](), False
    for name, shape, kind, offset in sorted(tensors, key=lambda t: t[3]):
        shown = printable(name)
        if name in names:
            found.add(Problem(f"tensor {shown!r} is there twice", tensor=shown))
            continue
        names.add(name)
        dtype = _PLAIN.get(kind) or _QUANTISED.get(kind)
        begin = start + offset
        if begin < end or (begin - end >= alignment and not open_end):
            what = "overlaps the one before it" if begin < end else f"leaves a hole of {begin - end} bytes before it"
            found.add(Problem(f"tensor {shown!r} {what}", tensor=shown))
            continue
        end, open_end = begin, dtype is None
        if dtype is None:
            unknown.append(f"tensor {shown!r} of type {kind}")
            found.tensors.append(TensorPlace(shown, f"gguf type {kind}", shape, None))
            continue
        elements, width = BLOCKS[dtype].elements if dtype in BLOCKS else 1, element_size(dtype)
        if not is_countable(shape, width) or (shape[-1] if shape else 1) % elements or offset % alignment:
            found.add(Problem(f"tensor {shown!r} has an impossible shape or place", tensor=shown))
            continue
        count = math.prod(shape) // elements
        end = begin + count * width
        if end > size:
            found.add(Problem(f"the file ends in the middle of tensor {shown!r}", tensor=shown))
            found.truncated = True
            return
        span = None
        if count:
            span = len(found.spans)
            found.spans.append(SpanPlace(begin, count * width))
        found.tensors.append(TensorPlace(shown, dtype, shape, span, 0, count))
    padded = start + -(-(end - start) // alignment) * alignment
    if size > padded and not open_end:
        found.add(Problem(f"{size - end} bytes follow the last tensor", expected=str(end), found=str(size)))
    found.truncated = found.truncated or size < end

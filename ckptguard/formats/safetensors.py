"""safetensors files: an 8-byte length, a JSON header, then the tensors' bytes without holes."""

from __future__ import annotations

import math

from msgspec import structs

from ckptguard.formats.dtypes import SAFETENSORS_DTYPES, is_countable
from ckptguard.formats.strict_json import JsonProblem, parse_object, printable
from ckptguard.formats.structure import Found, Problem, Source, SpanPlace, Structure, TensorPlace, broken
from ckptguard.formats.table import LARGEST_SAFETENSORS_HEADER

NAME = "safetensors"
MAX_DIMENSIONS = 64


def read(reader: Source, path: str) -> Structure:
    """Return the structure of a safetensors file. Everything wrong with it is in the problems."""
    size = reader.entry.size
    if size < 8:
        return broken(NAME, "the file ends before the length of its header", truncated=True)
    length = int.from_bytes(reader.read(0, 8), "little")
    if not 2 <= length <= LARGEST_SAFETENSORS_HEADER:
        # A writer that sets the full length first leaves zeros at the start.
        return broken(NAME, f"the header's length of {length} bytes is impossible", truncated=length == 0)
    if 8 + length > size:
        return broken(NAME, f"the header should be {length} bytes, but the file has {size}", truncated=True)
    text = reader.read(8, length)
    if text[:1] != b"{":
        return broken(NAME, "the header does not begin with {")
    try:
        header = parse_object(text)
    except JsonProblem as error:
        return broken(NAME, f"the header cannot be read: {error}")
    return _from_header(header, 8 + length, size)


def _from_header(header: dict[str, object], start: int, size: int) -> Structure:
    found = Found()
    metadata = _metadata(header.pop("__metadata__", None), found.problems)
    places = []
    for name, described in header.items():
        place = _place(described)
        if isinstance(place, str):
            found.problems.append(Problem(f"tensor {printable(name)!r}: {place}", tensor=printable(name)))
        else:
            places.append((*place, name))
    places.sort(key=lambda f: (f[0], f[1]))
    end = filled = 0  # the second: of the tensors that have a span
    for begin, stop, dtype, shape, name in places:
        if begin != end:
            what = "overlaps the one before it" if begin < end else f"leaves a hole of {begin - end} bytes before it"
            found.problems.append(Problem(f"tensor {name!r} {what}", tensor=name))
        end = max(end, stop)
        span = None
        if stop > begin >= filled and start + stop <= size:
            span, filled = len(found.spans), stop
            found.spans.append(SpanPlace(start + begin, stop - begin))
        found.tensors.append(TensorPlace(name, dtype, shape, span, 0, math.prod(shape) if span is not None else 0))
    whole = start + end
    found.truncated = whole > size
    if whole != size:
        what = "bytes are missing at the end" if whole > size else "bytes follow the last tensor"
        found.problems.append(Problem(f"{abs(whole - size)} {what}", expected=str(whole), found=str(size)))
    return structs.replace(found.structure(NAME), metadata=metadata)


def _place(described: object) -> tuple[int, int, str, tuple[int, ...]] | str:
    """Return (begin, end, dtype, shape) of one header entry, or what is wrong with it."""
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        return "it needs dtype, shape and data_offsets, and nothing else"
    word, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(word, str) or word not in SAFETENSORS_DTYPES:
        return f"the dtype {printable(str(word)[:40])} is not known"
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        return "its shape is not a list of sizes"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "its data_offsets are not a range"
    dtype, bits = SAFETENSORS_DTYPES[word]
    if not is_countable(shape, bits):
        return "its shape is larger than any size can be"
    total = math.prod(shape) * bits
    if total % 8 or total // 8 != offsets[1] - offsets[0]:
        return f"its shape needs {total // 8} bytes, its data_offsets give {offsets[1] - offsets[0]}"
    return offsets[0], offsets[1], dtype, tuple(shape)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _metadata(value: object, problems: list[Problem]) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return dict(value)
    problems.append(Problem("__metadata__ does not map text to text"))
    return {}

"""numpy's files: ``.npy`` (one array, a short header and then its elements) and ``.npz`` (an archive of such arrays).

Elements are floats in spans, other floats, or pickled objects. Archives are stored (``numpy.savez``) or deflated
(``numpy.savez_compressed``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from msgspec import structs

from ckptguard.formats.nonfinite_bytes import SIZES, bad_number
from ckptguard.formats.numpy.npy_header import MAGIC, MAX_HEADER, Field, Header, HeaderProblem, read_header
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import read_pickle
from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import MAX_PROBLEMS, Found, Leaf, Problem, SpanPlace, Structure, TensorPlace, broken
from ckptguard.formats.torch.files import ReadingBudget, take
from ckptguard.formats.torch.state_tree import below
from ckptguard.formats.zip.archive import Record, UnpackProblem, read_archive, unpacked, wrong_sum
from ckptguard.formats.zip.crc import crc32_function, crc32_of_rest
from ckptguard.storage.protocol import Reader

_BLOCK = 1 << 20
_TENSOR = "value"
_FIRST_READ = 512
_MAX_ITEM = 1 << 20
MAX_STREAM = 256 << 20  # of a pickle of objects
# The limit for unpacked records: this much, and this many times the file. Weights hardly shrink at all.
_ROOM, _ROOM_TIMES = 256 << 20, 20


def read_npy(reader: Reader, path: str) -> Structure:
    """Return the structure of a single array, named "value"."""
    size = reader.entry.size
    try:
        header = _header_at(reader, 0, size)
    except HeaderProblem as error:
        return broken("npy", str(error), truncated=error.ends_early)
    wanted, found = header.length + header.data_size, size
    if wanted != found and not header.pickled:
        what = "bytes are missing at the end" if wanted > found else "bytes follow the array"
        message = f"{abs(wanted - found)} {what}"
        problem = Problem(message, tensor=_TENSOR, expected=str(wanted), found=str(found))
        return Structure(format="npy", problems=(problem,), truncated=wanted > found)
    return _array(reader, _TENSOR, header, 0, size - header.length)


def read_npz(reader: Reader, path: str) -> Structure:
    """Return the structure of an archive of arrays, named by the archive's keys.

    The elements of stored arrays are spans. Deflated ones are unpacked here once: their spans are the compressed bytes,
    and one element of each that is not finite is in `leaves`.
    """
    archive = read_archive(reader, "numpy")
    if archive.too_large:
        return Structure(format="npz", not_understood=(archive.too_large,))
    found = Found(problems=list(archive.problems), truncated=archive.truncated)
    if any(record.name.rpartition("/")[2] == "data.pkl" for record in archive.records.values()):
        found.problems.append(Problem("it is an archive of torch, not of arrays"))
    inside: list[Problem] = []
    room = _ROOM + _ROOM_TIMES * reader.entry.size
    for record in sorted(archive.records.values(), key=lambda r: r.offset):
        name = printable(record.name.removesuffix(".npy"))
        try:
            if record.deflated and record.size > room:
                one = _notunpacked(reader, record, name)
            elif record.deflated:
                room -= record.size
                one = _deflated(reader, record, name)
            else:
                one = _stored(reader, record, name)
        except (HeaderProblem, UnpackProblem) as error:
            found.problems.append(Problem(f"array {name!r}: {error}", tensor=name))
            continue
        found.tensors += [
            structs.replace(tensor, span=len(found.spans)) if one.spans else tensor for tensor in one.tensors
        ]
        found.spans += one.spans
        inside += one.problems
        found.names.update(one.globals)
        found.leaves += one.leaves
        found.unread += one.unread
        found.not_understood += one.not_understood
    found.problems += inside
    return found.structure("npz", MAX_PROBLEMS)


def _array(reader: Reader, name: str, header: Header, offset: int, length: int, crc32: int | None = None) -> Structure:
    """Return the array whose header is at `offset`, and whose data has this length and, if known, this CRC-32."""
    begin, plain = offset + header.length, _is_plain(header)
    inside = _look_inside(name, header, () if plain else _blocks_of(reader, begin, length))
    if header.pickled:
        return inside
    spans = (SpanPlace(begin, length, crc32),) if length else ()
    return structs.replace(inside, spans=spans, tensors=(_place_of(name, header, length, as_stored=plain),))


def _stored(reader: Reader, record: Record, name: str) -> Structure:
    """Return an array whose elements the scan can read in place, unless they are mixed or pickled."""
    if not record.name.endswith(".npy") and reader.read(record.offset, min(record.size, len(MAGIC))) != MAGIC:
        return Structure(format="npy", problems=wrong_sum(reader, record, name, name))
    header = _header_at(reader, record.offset, record.size)
    length = record.size - header.length
    if header.pickled:
        inside = _array(reader, name, header, record.offset, length)
        return structs.replace(inside, problems=inside.problems + wrong_sum(reader, record, name, name))
    _check_size(header, length)
    if not length:
        tensor, problems = _place_of(name, header, 0, as_stored=True), wrong_sum(reader, record, name, name)
        return Structure(format="npy", tensors=(tensor,), problems=problems)
    # The archive's sum covers header and elements together; that of the elements alone follows from it.
    first = crc32_function()(reader.read(record.offset, header.length), 0)
    return _array(reader, name, header, record.offset, length, crc32_of_rest(record.crc32, first, length))


def _deflated(reader: Reader, record: Record, name: str) -> Structure:
    blocks = unpacked(reader, record)
    head = _head_of(blocks)
    if not _is_array(record, head):
        for _ in blocks:
            pass
        return Structure(format="npy")
    header = read_header(head)
    if not header.pickled:
        _check_size(header, record.size - header.length)
    inside = _look_inside(name, header, itertools.chain((head[header.length :],), blocks))
    if header.pickled:
        return inside
    span, tensor = SpanPlace(record.offset, record.packed), _place_of(name, header, record.packed, as_stored=False)
    return structs.replace(inside, spans=(span,), tensors=(tensor,))


def _notunpacked(reader: Reader, record: Record, name: str) -> Structure:
    """Handle an array too large to unpack. Floats may stay unread, but not the calls of a pickle."""
    head = _head_of(unpacked(reader, record))
    if _is_array(record, head) and read_header(head).pickled:
        return Structure(format="npy", not_understood=(f"{name!r} (a pickle, larger than ckptguard unpacks)",))
    return Structure(format="npy", unread=(name,))


def _head_of(blocks: Iterable[bytes]) -> bytes:
    head = b""
    for block in blocks:
        head += block
        if len(head) >= MAX_HEADER + 12:
            break
    return head


def _is_array(record: Record, head: bytes) -> bool:
    """True if it is an array: numpy decides by the first bytes, whatever the record's name."""
    return record.name.endswith(".npy") or head.startswith(MAGIC)


def _check_size(header: Header, length: int) -> None:
    if header.data_size != length:
        raise HeaderProblem(f"its shape needs {header.data_size} bytes, but the archive has {length}")


def _header_at(reader: Reader, offset: int, size: int) -> Header:
    first = min(size, _FIRST_READ)
    try:
        return read_header(reader.read(offset, first))
    except HeaderProblem as error:
        if not error.ends_early or size == first:
            raise
    return read_header(reader.read(offset, min(size, MAX_HEADER + 12)))


def _blocks_of(reader: Reader, offset: int, length: int) -> Iterator[bytes]:
    for begin in range(offset, offset + length, _BLOCK):
        yield reader.read(begin, min(_BLOCK, offset + length - begin))


def _is_plain(header: Header) -> bool:
    """True if the scan can read the stored data directly."""
    return len(header.fields) == 1 and not header.fields[0].name and not header.pickled


def _place_of(name: str, header: Header, length: int, *, as_stored: bool) -> TensorPlace:
    """Return the array as a tensor. Its elements are given only if they are `as_stored`, in a span of this length."""
    span = 0 if length else None
    if not _is_plain(header):
        return TensorPlace(name, "record", header.shape, span)
    field = header.fields[0]
    count = math.prod(header.shape) if as_stored and span is not None else 0
    strides = _strides(header) if count else ()
    return TensorPlace(name, field.dtype, header.shape, span, 0, count, "", field.byte_order, strides)


def _strides(header: Header) -> tuple[int, ...]:
    """Return the strides of column order, where the first index moves fastest. () if that equals row order."""
    if not header.by_columns or sum(n > 1 for n in header.shape) < 2:
        return ()
    return tuple(math.prod(header.shape[:i]) for i in range(len(header.shape)))


def _look_inside(name: str, header: Header, blocks: Iterable[bytes]) -> Structure:
    """Return one number of each field that is not finite, and of objects what their pickle holds. All blocks are
    read."""
    if header.pickled:
        return _unpickled(name, blocks)
    floats = [f for f in header.fields if f.dtype in SIZES]
    unread = tuple(_path(name, f) for f in header.fields if f.unread)
    if header.item_size > _MAX_ITEM:
        unread += tuple(_path(name, f) for f in floats)
        floats = []
    found: dict[str, float] = {}
    for block in _whole_items(blocks, header.item_size):
        for field in floats:
            if field.name not in found:
                bad = bad_number(_column(block, header.item_size, field), field.dtype, field.byte_order)
                if bad is not None:
                    found[field.name] = bad
    leaves = tuple(Leaf(_path(name, f), found[f.name], True) for f in floats if f.name in found)
    return Structure(format="npy", leaves=leaves, unread=unread)


def _path(name: str, field: Field) -> str:
    return f"{name}.{field.name}" if field.name else name


def _whole_items(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in blocks of whole items."""
    rest = b""
    for block in blocks:
        if not 0 < size <= _MAX_ITEM:
            continue
        data = rest + block if rest else block
        whole = len(data) - len(data) % size
        rest = data[whole:]
        if whole:
            yield data[:whole] if rest else data


def _column(block: bytes, item: int, field: Field) -> bytes | bytearray:
    """Return the bytes of one field in all items."""
    width = field.size * field.times
    if width == item:
        return block
    count = len(block) // item
    if count < width:
        return b"".join(block[i * item + field.offset : i * item + field.offset + width] for i in range(count))
    column = bytearray(count * width)
    for byte in range(width):
        column[byte::width] = block[field.offset + byte :: item]
    return column


def _unpickled(name: str, blocks: Iterable[bytes]) -> Structure:
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        size += len(block)
        if size <= MAX_STREAM:
            parts.append(block)
    if size > MAX_STREAM:
        # The calls of loading it are unknown, and that must not pass.
        part = f"{name!r} (a pickle of {size} bytes, more than ckptguard reads)"
        return Structure(format="npy", not_understood=(part,))
    data = b"".join(parts)
    parts.clear()
    try:
        pickled = read_pickle(data)
    except PickleProblem as error:
        found = Found(names=set(error.globals))
        found.fail(repr(name), error, name)
        return found.structure("npy")
    found = Found()
    if take(pickled, ReadingBudget(), found):
        found.problems.append(Problem(f"{name!r} refers to a storage outside it", tensor=name))
    if pickled.end != len(data):
        found.problems.append(Problem(f"{len(data) - pickled.end} bytes follow the pickle of {name!r}", tensor=name))
    found.leaves = [structs.replace(leaf, name=below(name, leaf.name)) for leaf in found.leaves]
    found.unread, found.containers = [below(name, inner) for inner in found.unread], ()
    return found.structure("npy")

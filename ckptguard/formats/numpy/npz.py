"""``.npz``: a zip archive of ``.npy`` arrays, stored (``numpy.savez``) or deflated (``numpy.savez_compressed``)."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import structs

from ckptguard.formats.numpy.npy import UnshownData, blocks_of, header_at, is_plain, look_inside, place_of
from ckptguard.formats.numpy.npy_header import MAGIC, MAX_HEADER, Header, HeaderProblem, read_header
from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Problem, SpanPlace, Structure, TensorPlace, shortened
from ckptguard.formats.zip.archive import Record, read_archive, wrong_sum
from ckptguard.formats.zip.crc import crc32_function, crc32_of_rest
from ckptguard.storage.protocol import Reader

NAME = "npz"
_MAX_PROBLEMS = 200
# What deflated records may become: this much, and so many times the file. Weights hardly shrink at all.
_ROOM, _ROOM_TIMES = 256 << 20, 20
_READ = 1 << 16
_BLOCK = 1 << 20


class UnpackProblem(ValueError):
    """The record is not what the archive says; the message says why."""


class _Found(NamedTuple):
    """One record: its span and tensor, where it is an array, and what was found inside."""

    inside: UnshownData = UnshownData()
    span: SpanPlace | None = None
    tensor: TensorPlace | None = None


def read(reader: Reader, path: str) -> Structure:
    """The structure of an archive of arrays; tensors are called by the archive's keys.

    The elements of stored arrays are spans. Deflated ones are unpacked here, once: their spans are the compressed
    bytes, and one element of each that is not finite is among the leaves.
    """
    archive = read_archive(reader, of_numpy=True)
    problems = list(archive.problems)
    spans: list[SpanPlace] = []
    tensors: list[TensorPlace] = []
    found: list[UnshownData] = []
    room = _ROOM + _ROOM_TIMES * reader.entry.size
    for record in sorted(archive.records.values(), key=lambda r: r.offset):
        name = printable(record.name.removesuffix(".npy"))
        try:
            if record.deflated and record.size > room:
                one = _not_unpacked(reader, record, name)
            elif record.deflated:
                room -= record.size
                one = _deflated(reader, record, name)
            else:
                one = _stored(reader, record, name)
        except (HeaderProblem, UnpackProblem) as error:
            problems.append(Problem(message=f"array {name!r}: {error}", tensor=name))
            continue
        found.append(one.inside)
        if one.tensor is not None:
            tensors.append(one.tensor if one.span is None else structs.replace(one.tensor, span=len(spans)))
        if one.span is not None:
            spans.append(one.span)
    problems += [p for inside in found for p in inside.problems]
    return Structure(
        format=NAME,
        spans=tuple(spans),
        tensors=tuple(tensors),
        problems=shortened(problems, _MAX_PROBLEMS),
        truncated=archive.truncated,
        globals=tuple(sorted(frozenset().union(*(inside.globals for inside in found)))),
        leaves=tuple(leaf for inside in found for leaf in inside.leaves),
        unread=tuple(path for inside in found for path in inside.unread),
    )


def _stored(reader: Reader, record: Record, name: str) -> _Found:
    """An array whose elements the scan can look at where they lie, unless they are mixed or pickled."""
    if not record.name.endswith(".npy") and reader.read(record.offset, min(record.size, len(MAGIC))) != MAGIC:
        return _Found(UnshownData(problems=wrong_sum(reader, record, name, name)))
    header = header_at(reader, record.offset, record.size)
    begin, length = record.offset + header.length, record.size - header.length
    if header.pickled:
        inside = look_inside(name, header, blocks_of(reader, begin, length))
        return _Found(inside._replace(problems=inside.problems + wrong_sum(reader, record, name, name)))
    _check_size(header, length)
    if not length:
        inside = UnshownData(problems=wrong_sum(reader, record, name, name))
        return _Found(inside, tensor=place_of(name, header, None, as_stored=True))
    # The archive's sum is of header and elements together; that of the elements alone follows from it.
    first = crc32_function()(reader.read(record.offset, header.length), 0)
    span = SpanPlace(begin, length, crc32_of_rest(record.crc32, first, length))
    plain = is_plain(header)
    inside = look_inside(name, header, () if plain else blocks_of(reader, begin, length))
    return _Found(inside, span, place_of(name, header, 0, as_stored=plain))


def _deflated(reader: Reader, record: Record, name: str) -> _Found:
    blocks = _unpacked(reader, record)
    head = _head_of(blocks)
    if not _is_array(record, head):
        for _ in blocks:
            pass
        return _Found()
    header = read_header(head)
    if not header.pickled:
        _check_size(header, record.size - header.length)
    inside = look_inside(name, header, itertools.chain((head[header.length :],), blocks))
    if header.pickled:
        return _Found(inside)
    return _Found(inside, SpanPlace(record.offset, record.packed), place_of(name, header, 0, as_stored=False))


def _not_unpacked(reader: Reader, record: Record, name: str) -> _Found:
    """More than we would unpack: floats may stay unread, but not what a pickle would call."""
    head = _head_of(_unpacked(reader, record))
    if _is_array(record, head) and read_header(head).pickled:
        raise UnpackProblem("it is a pickle, and larger than we would unpack")
    return _Found(UnshownData(unread=(name,)))


def _head_of(blocks: Iterable[bytes]) -> bytes:
    head = b""
    for block in blocks:
        head += block
        if len(head) >= MAX_HEADER + 12:
            break
    return head


def _is_array(record: Record, head: bytes) -> bool:
    """numpy goes by the first bytes, whatever the record is called."""
    return record.name.endswith(".npy") or head.startswith(MAGIC)


def _check_size(header: Header, length: int) -> None:
    if header.data_size != length:
        raise HeaderProblem(f"its shape needs {header.data_size} bytes, the archive has {length}")


def _unpacked(reader: Reader, record: Record) -> Iterator[bytes]:
    """The record's contents, piece by piece, in bounded memory, never more than `record.size` bytes.

    Whoever takes them all knows that size and CRC-32 are as stated: else UnpackProblem, at the latest at the end.
    """
    crc32 = crc32_function()
    check = size = 0
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    position, end = record.offset, record.offset + record.packed
    waiting = b""
    while not stream.eof:
        if not waiting and position < end:
            waiting = reader.read(position, min(_READ, end - position))
            position += len(waiting)
        try:
            block = stream.decompress(waiting, _BLOCK)
        except zlib.error as error:
            raise UnpackProblem("its compressed bytes are damaged") from error
        waiting = stream.unconsumed_tail
        size += len(block)
        if size > record.size:
            raise UnpackProblem("it unpacks to more than the archive says")
        check = crc32(block, check)
        if block:
            yield block
        elif not waiting and position == end and not stream.eof:
            raise UnpackProblem("its compressed bytes end early")
    if stream.unused_data or waiting or position != end:
        raise UnpackProblem("bytes follow its compressed ones")
    if size != record.size:
        raise UnpackProblem("it unpacks to less than the archive says")
    if check != record.crc32:
        raise UnpackProblem(f"it has CRC-32 {check:08x}, where the archive says {record.crc32:08x}")

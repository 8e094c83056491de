"""``.npy``: one numpy array, a short header and then its elements."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.formats.numpy.npy_data import is_plain, look_inside, place_of
from ckptguard.formats.numpy.npy_header import MAX_HEADER, Header, HeaderProblem, read_header
from ckptguard.formats.structure import Format, Problem, SpanPlace, Structure
from ckptguard.storage.protocol import Reader

NAME = "value"
BLOCK = 1 << 20
_FIRST_READ = 512


def matches(path: str, head: bytes) -> bool:
    """By the suffix alone."""
    return path.lower().endswith(".npy")


def read(reader: Reader, path: str) -> Structure:
    """The structure of a lone array, which is called "value"."""
    size = reader.entry.size
    try:
        header = header_at(reader, 0, size)
    except HeaderProblem as error:
        return Structure(format=FORMAT.name, problems=(Problem(message=str(error)),), truncated=error.ends_early)
    if header.pickled:
        inside = look_inside(NAME, header, blocks_of(reader, header.length, size - header.length))
        return Structure(
            format=FORMAT.name,
            problems=inside.problems,
            globals=tuple(sorted(inside.globals)),
            leaves=inside.leaves,
            unread=inside.unread,
        )
    wanted, found = header.data_size, size - header.length
    if wanted != found:
        what = "bytes are missing at the end" if wanted > found else "bytes follow the array"
        message = f"{abs(wanted - found)} {what}"
        problem = Problem(message=message, tensor=NAME, expected=str(header.length + wanted), found=str(size))
        return Structure(format=FORMAT.name, problems=(problem,), truncated=wanted > found)
    plain = is_plain(header)
    tensor = place_of(NAME, header, 0 if found else None, as_stored=plain)
    inside = look_inside(NAME, header, () if plain else blocks_of(reader, header.length, found))
    return Structure(
        format=FORMAT.name,
        spans=(SpanPlace(header.length, found),) if found else (),
        tensors=(tensor,),
        leaves=inside.leaves,
        unread=inside.unread,
    )


def header_at(reader: Reader, offset: int, size: int) -> Header:
    """The header of an array in `size` bytes at `offset`; HeaderProblem if there is none."""
    first = min(size, _FIRST_READ)
    try:
        return read_header(reader.read(offset, first))
    except HeaderProblem as error:
        if not error.ends_early or size == first:
            raise
    return read_header(reader.read(offset, min(size, MAX_HEADER + 12)))


def blocks_of(reader: Reader, offset: int, length: int) -> Iterator[bytes]:
    """The bytes of a range, piece by piece."""
    for begin in range(offset, offset + length, BLOCK):
        yield reader.read(begin, min(BLOCK, offset + length - begin))


FORMAT = Format(name="npy", matches=matches, read=read, suffixes=(".npy",), holds="arrays")

"""HDF5 files such as Keras's ``.weights.h5``, by h5py (the extra `keras`). Without it they are not understood.

h5py reads through the file that is open already. What lies in other files (external links, external storage, virtual
datasets) is never opened, and filters are only those that come with the library.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from typing import Any

from msgspec import structs

from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Found, Leaf, Problem, Source, SpanPlace, Structure, TensorPlace, broken
from ckptguard.formats.table import HAS_H5PY, HDF5_MAGIC

NAME = "hdf5"
WITHOUT = "HDF5, which needs the extra ckptguard[keras],"
_MOST_OBJECTS, _DEEPEST = 200_000, 64
_LARGEST_CHUNK = 64 << 20
_LARGEST_PACKED = 4 << 30  # bytes of all datasets that are unpacked
_MOST_CHUNKS = 100_000  # of one dataset; of all ten times as many. The library holds about 2 KiB for each
_LARGEST_LZF = 4 << 20  # bytes of a chunk that LZF packed, which may unpack to ninety times as many
_BLOCK = 8 << 20
_DEFLATE, _LZF = 1, 32000
_FILTERS = frozenset((_DEFLATE, 2, 3, 5, 6, _LZF))  # shuffle, fletcher32, n-bit, scale-offset
_FLOATS = {2: "float16", 4: "float32", 8: "float64"}
_BFLOAT16 = "bfloat16"


def read(reader: Source, path: str) -> Structure:
    """Return the datasets of a file as tensors. Everything wrong is in the problems."""
    size = reader.entry.size
    head = reader.read(0, min(size, len(HDF5_MAGIC)))
    if head != HDF5_MAGIC:
        cut = HDF5_MAGIC.startswith(head) or not any(head)
        return broken(NAME, "it does not begin like an HDF5 file", truncated=cut)
    if not HAS_H5PY:
        return Structure(format=NAME, not_understood=(WITHOUT,))
    end = _stated_end(reader.read(0, min(size, 64)))
    if end is not None and end != size:
        what = "bytes are missing at the end" if end > size else "bytes follow the end"
        problem = Problem(f"{abs(end - size)} {what}", expected=str(end), found=str(size))
        return Structure(format=NAME, problems=(problem,), truncated=end > size)
    import h5py

    walk = _Walk(h5py, reader)
    try:
        with h5py.File(_File(reader), "r", locking=False) as file:
            walk.run(file)
    except MemoryError:
        raise
    except Exception as error:  # h5py raises many kinds for a damaged file
        first = printable(str(error).strip().partition("\n")[0])
        walk.found.add(Problem(f"it cannot be read: {first or type(error).__name__}"))
    return walk.structure(size)


def _stated_end(head: bytes) -> int | None:
    """Return where the file ends, as its superblock states; None if that is in a form that is not known here."""
    version = head[8] if len(head) == 64 else 0xFF
    if version in (0, 1) and head[13] == 8:
        place = (24, 28)[version] + 16
    elif version in (2, 3) and head[9] == 8:
        place = 12 + 16
    else:
        return None
    return int.from_bytes(head[place : place + 8], "little")


class _File(io.RawIOBase):
    """A source as the file that h5py wants."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._source.entry.size
        self._at = max({os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size}[whence] + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self._source.entry.size - self._at), 0)
        buffer[:length] = self._source.read(self._at, length)
        self._at += length
        return length


class _Walk:
    """One way through the groups of a file."""

    def __init__(self, h5py: Any, source: Source) -> None:
        self.found = Found()
        self.not_understood: list[str] = []
        self._h5py = h5py
        self._source = source
        self._room, self._chunks = _LARGEST_PACKED, 10 * _MOST_CHUNKS
        self._placed: list[tuple[SpanPlace | None, TensorPlace]] = []

    def run(self, file: Any) -> None:
        """Read all that hard links lead to, each object once."""
        seen: set[int] = set()
        waiting: list[tuple[Any, str, int]] = [(file, "", 0)]
        containers: list[str] = []
        while waiting:
            group, prefix, depth = waiting.pop()
            for key in group:
                name = printable(f"{prefix}{key}")
                link = group.get(key, getlink=True)
                if isinstance(link, self._h5py.ExternalLink):
                    self.found.add(Problem(f"{name!r} is a link to another file, which is not followed", tensor=name))
                if not isinstance(link, self._h5py.HardLink):
                    continue
                one = group[key]
                if not isinstance(one, self._h5py.Dataset | self._h5py.Group):
                    continue
                address = self._h5py.h5o.get_info(one.id).addr
                if address in seen:
                    continue
                seen.add(address)
                if len(seen) > _MOST_OBJECTS or depth > _DEEPEST:
                    self.not_understood.append(f"{name!r}, one of very many objects,")
                    return
                if isinstance(one, self._h5py.Dataset):
                    self._take(name, one)
                else:
                    containers += [name] if not prefix else []
                    waiting.append((one, f"{prefix}{key}.", depth + 1))
        self.found.containers = tuple(containers)

    def _take(self, name: str, dataset: Any) -> None:
        plist = dataset.id.get_create_plist()
        if plist.get_external_count():
            self.found.add(Problem(f"{name!r} lies in another file, which is not opened", tensor=name))
            return
        if plist.get_layout() == self._h5py.h5d.VIRTUAL:
            self.found.add(Problem(f"{name!r} is made of other datasets, which are not opened", tensor=name))
            return
        kind = self._kind_of(dataset)
        if kind is None:
            if dataset.dtype.kind not in "SU" and self._h5py.check_string_dtype(dataset.dtype) is None:
                self.not_understood.append(f"{name!r} of type {printable(str(dataset.dtype))[:80]}")
            return
        dtype, order, shape = kind, "big" if dataset.dtype.byteorder == ">" else "little", tuple(dataset.shape or ())
        stored, offset = dataset.id.get_storage_size(), dataset.id.get_offset()
        count = math.prod(shape) if dataset.shape is not None else 0
        whole = TensorPlace(name, dtype, shape, None, byte_order=order)
        if offset is not None and stored == count * dataset.dtype.itemsize and stored:
            place = SpanPlace(offset, stored)
            self._placed.append((place, structs.replace(whole, stop=count)))
            return
        first = dataset.id.get_chunk_info(0) if stored and dataset.chunks and dataset.id.get_num_chunks() else None
        self._placed.append((None if first is None else SpanPlace(first.byte_offset, first.size), whole))
        if count and (dataset.dtype.kind in "fc" or kind == _BFLOAT16):
            self._unpack(name, dataset, count, f"{'>' if order == 'big' else '<'}u2" if kind == _BFLOAT16 else None)

    def _kind_of(self, dataset: Any) -> str | None:
        """Return our name of a dataset's type. None for what is neither a number nor a plain type of the library."""
        dtype, size = dataset.dtype, dataset.dtype.itemsize
        if dtype.kind in "Vu" and _is_bfloat16(dataset):
            return _BFLOAT16
        if not self._h5py.h5t.py_create(dtype, logical=True).equal(dataset.id.get_type()):
            return None
        if dtype.kind == "f":
            return _FLOATS.get(size)
        if dtype.kind == "c":
            return {8: "complex64", 16: "complex128"}.get(size)
        if dtype.kind == "b":
            return "bool"
        return f"{'u' if dtype.kind == 'u' else ''}int{8 * size}" if dtype.kind in "iu" else None

    def _unpack(self, name: str, dataset: Any, count: int, bits: str | None) -> None:
        """Look for numbers that are not finite in what is not stored as it is. `bits` holds a bfloat16."""
        import numpy

        plist, size = dataset.id.get_create_plist(), count * dataset.dtype.itemsize
        filters = {plist.get_filter(n)[0] for n in range(plist.get_nfilters())}
        chunk = math.prod(dataset.chunks or ()) * dataset.dtype.itemsize
        if not filters <= _FILTERS or chunk > _LARGEST_CHUNK or size > self._room:
            self.not_understood.append(f"{name!r}, which is packed,")
            return
        self._room -= size
        if dataset.chunks and not self._are_small(dataset, filters, chunk):
            self.not_understood.append(f"{name!r}, which is packed,")
            return
        shape = dataset.shape
        rows = shape[0] if shape else 1
        each = max(_BLOCK // max(size // max(rows, 1), 1), 1)
        if shape and size // max(rows, 1) > 4 * _LARGEST_CHUNK:
            self.not_understood.append(f"{name!r}, which is packed,")
            return
        for begin in range(0, rows, each):
            block = numpy.ravel(dataset[begin : begin + each] if shape else dataset[()])
            if bits is not None:
                block = (block.view(bits).astype("<u4") << 16).view("<f4")
            bad = block[~numpy.isfinite(block)]
            if bad.size:
                self.found.leaves.append(
                    Leaf(name, float(bad[0].real) if not math.isfinite(bad[0].real) else math.nan, True)
                )
                return

    def _are_small(self, dataset: Any, filters: set[int], size: int) -> bool:
        """True if no chunk unpacks to more than it should, which the library finds only when it has unpacked it."""
        chunks = math.prod(-(-whole // part) for whole, part in zip(dataset.shape, dataset.chunks, strict=True))
        self._chunks -= chunks
        chunk_iter = getattr(dataset.id, "chunk_iter", None)  # old libraries have none
        if chunk_iter is None or chunks > _MOST_CHUNKS or self._chunks < 0 or {_DEFLATE, _LZF} <= filters:
            return False
        stored: list[Any] = []
        chunk_iter(stored.append)
        limit = _LARGEST_LZF if _LZF in filters else 2 * size + _BLOCK
        if any(chunk.size > limit for chunk in stored):
            return False
        return _DEFLATE not in filters or all(self._inflates_within(chunk, size) for chunk in stored)

    def _inflates_within(self, chunk: Any, size: int) -> bool:
        try:
            stream = zlib.decompressobj()
            return (
                len(stream.decompress(self._source.read(chunk.byte_offset, chunk.size), 2 * size + 65)) <= 2 * size + 64
            )
        except zlib.error:
            return True  # it is not deflated, or damaged, which the library says

    def structure(self, size: int) -> Structure:
        """Return what was found, with spans in file order."""
        found, places = self.found, dict[SpanPlace, int]()
        end = 0
        for span in sorted(
            {place for place, _ in self._placed if place is not None}, key=lambda p: (p.offset, p.length)
        ):
            if span.offset < end or span.offset + span.length > size:
                found.add(Problem("two datasets overlap, or one is out of bounds"))
                continue
            end = span.offset + span.length
            places[span] = len(found.spans)
            found.spans.append(span)
        for place, tensor in self._placed:
            if place is None or place in places:
                found.tensors.append(structs.replace(tensor, span=None if place is None else places[place]))
        return structs.replace(found.structure(NAME), not_understood=tuple(self.not_understood[:100]))


def _is_bfloat16(dataset: Any) -> bool:
    """True if Keras stored numbers of this type as their bits."""
    stated = dataset.attrs.get("dtype")
    return dataset.dtype.itemsize == 2 and isinstance(stated, str) and stated == _BFLOAT16

"""``.metadata`` of torch.distributed.checkpoint: every tensor's shape and dtype, and where its pieces are stored."""

from __future__ import annotations

from msgspec import structs

from ckptguard.formats.dcp.chunks import chunk_name, flaw_in_cover, part_name
from ckptguard.formats.dcp.metadata_pickle import (
    StoredItem,
    StoredRange,
    TensorEntry,
    attributes,
    fold,
    read_metadata_pickle,
)
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import Call, Global, Mapping
from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import ChunkPlace, Found, Problem, ReadProblem, Structure, TensorPlace, unread
from ckptguard.formats.table import DISTCP_SUFFIX, name_of
from ckptguard.storage.protocol import Reader
from ckptguard.values.ids import is_safe_path

NAME = "dcp_metadata"
MAX_METADATA = 256 << 20
_MAX_NAME = 500

_Stored = dict[tuple[str, tuple[int, ...] | None], StoredRange]


def read(reader: Reader, path: str) -> Structure:
    """Return all tensors with their full shapes, without spans. `chunks` say what is where in the files beside it.

    Impossible or overlapping ranges, and ranges that belong to nothing, are problems and left out.
    """
    size = reader.entry.size
    if size > MAX_METADATA:
        return unread(NAME, ReadProblem(f"{size} bytes, more than ckptguard reads", too_large=True))
    data = reader.read(0, size)
    try:
        pickled = read_metadata_pickle(data)
    except PickleProblem as error:
        return unread(NAME, error, names=error.globals)
    reading = _Reading(alone=name_of(path) != ".metadata")
    if pickled.end != len(data):
        reading.problem(f"{len(data) - pickled.end} bytes follow the pickle")
    reading.take(attributes(pickled.value))
    chunks = reading.sorted_chunks()
    reading.found.names.update(pickled.globals)
    for doubt in pickled.doubts:
        reading.found.add(Problem(doubt, doubt=True))
    return structs.replace(reading.found.structure(NAME), chunks=chunks)


class _Reading:
    """What has been found. `alone`: one rank's own file, which does not list other ranks' pieces."""

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.found = Found()
        self.chunks: dict[str, list[ChunkPlace]] = {}

    def take(self, fields: dict[str, object]) -> None:
        entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
        if type(entries) is not Mapping or type(storage) is not Mapping:
            self.problem("it is a pickle, but not the metadata of a distributed checkpoint")
            return
        stored = self.stored_ranges(storage)
        for fqn, value in zip(entries.flat[::2], entries.flat[1::2], strict=False):
            if type(fqn) is not str:
                self.problem("a name is not text")
                continue
            entry = fold(value)
            if type(entry) is TensorEntry:
                self.tensor(fqn, entry, stored)
            elif type(value) is Call and type(value.func) is Global and value.func.name == "BytesStorageMetadata":
                self.add(fqn, stored.pop((fqn, None), None), ChunkPlace(0, 0, _shown(fqn)))
            else:
                self.problem("its description cannot be understood", fqn)
        for fqn, offsets in stored:
            what = "an object" if offsets is None else f"a piece at {list(offsets)}"
            self.problem(f"a place is stated for {what} that is not in its list", fqn)
        paths = fields.get("planner_data")
        if type(paths) is Mapping:
            nested = [p for p in paths.flat[1::2] if type(p) is tuple and len(p) > 1 and type(p[0]) is str]
            self.found.containers = tuple(dict.fromkeys(_shown(path[0]) for path in nested))

    def stored_ranges(self, storage: Mapping) -> _Stored:
        stored: _Stored = {}
        for key, value in zip(storage.flat[::2], storage.flat[1::2], strict=False):
            item, place = fold(key), fold(value)
            if type(item) is not StoredItem:
                self.problem("the description of one of the stored ranges cannot be understood")
            elif type(place) is not StoredRange:
                self.problem("where it is stored cannot be understood", item.name)
            elif "/" in place.path or not is_safe_path(place.path) or not place.path.endswith(DISTCP_SUFFIX):
                self.problem(
                    f"its file {printable(place.path)!r} is not a {DISTCP_SUFFIX} file in this folder", item.name
                )
            else:
                stored[item] = place
        return stored

    def tensor(self, fqn: str, entry: TensorEntry, stored: _Stored) -> None:
        name = _shown(fqn)
        self.found.tensors.append(TensorPlace(name, entry.dtype, entry.size, None))
        pieces = [piece for piece in entry.pieces if piece is not None]
        flaw = "one of its pieces cannot be understood" if len(pieces) < len(entry.pieces) else None
        if not flaw and not self.alone:
            flaw = flaw_in_cover(entry.size, pieces)
        if flaw:
            self.problem(flaw, fqn)
        for offsets, sizes in pieces:
            whole = sizes == entry.size
            chunk = ChunkPlace(0, 0, name, entry.dtype, sizes, offsets, whole)
            self.add(fqn, stored.pop((fqn, offsets), None), chunk)

    def add(self, fqn: str, place: StoredRange | None, chunk: ChunkPlace) -> None:
        if place is None:
            what = "it" if chunk.whole else f"its piece {part_name('', chunk.offsets, chunk.shape)}"
            self.problem(f"the file does not state where {what} is stored", fqn)
            return
        placed = structs.replace(chunk, offset=place.offset, length=place.length, packed=place.packed)
        self.chunks.setdefault(place.path, []).append(placed)

    def sorted_chunks(self) -> dict[str, tuple[ChunkPlace, ...]]:
        """Return chunks by file and offset, without those that overlap the one before."""
        result = {}
        for path in sorted(self.chunks):
            end = 0
            kept: list[ChunkPlace] = []
            for chunk in sorted(self.chunks[path], key=lambda c: c.offset):
                if chunk.offset < end:
                    self.problem(f"its bytes in {path} overlap those of {chunk_name(kept[-1])}", chunk.name)
                else:
                    kept.append(chunk)
                    end = chunk.offset + chunk.length
            result[path] = tuple(kept)
        return result

    def problem(self, message: str, fqn: str | None = None) -> None:
        self.found.add(Problem(message, tensor=None if fqn is None else _shown(fqn)))


def _shown(fqn: str) -> str:
    return fqn if fqn.isascii() and len(fqn) <= _MAX_NAME else printable(fqn, _MAX_NAME)

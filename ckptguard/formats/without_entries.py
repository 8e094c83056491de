"""What a file is without some entries of its state: new bytes, and ranges of the old file, in order.

torch's archives lose the storages that nothing else uses, the files of torch.distributed.checkpoint the ranges of these
entries. Only the pickles that name them are read. Nothing in them is called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.cut import MOST, CutEntry, CutPickle
from ckptguard.formats.pickle.machine import read_pickle
from ckptguard.formats.structure import ReadProblem
from ckptguard.formats.torch.rebuild_calls import TensorProblem, as_storage
from ckptguard.formats.zip.archive import read_archive, wrong_sum
from ckptguard.formats.zip.directory import find_tail, read_directory
from ckptguard.formats.zip.fewer_records import Part, with_records
from ckptguard.storage.protocol import Reader

_ALIGNMENT = 64
_LARGEST_ALIGNMENT = 1 << 15  # what a header has room for
_INT = b"\x8a\x08"  # a whole number of eight bytes


def archive_without(reader: Reader, places: Collection[tuple[str, ...]]) -> list[Part]:
    """Return a torch archive without these entries of its dicts, each named by the keys that lead there.

    Raises ReadProblem if there is none of these names, or if it cannot be written anew surely.
    """
    archive = read_archive(reader)
    pickled = archive.records.get("data.pkl")
    problems = list(archive.problems)
    if problems or archive.too_large or pickled is None or "constants.pkl" in archive.records:
        raise ReadProblem("it is no archive that torch.save writes")
    if pickled.size > MOST:
        raise ReadProblem(f"its pickle has {pickled.size} bytes", too_large=True)
    if wrong_sum(reader, pickled, "data.pkl"):
        raise ReadProblem("its pickle has a wrong checksum")
    old = reader.read(pickled.offset, pickled.size)
    new = _cut(CutPickle(old), places)
    gone = _storages(old) - _storages(new)
    stated = archive.records.get(".storage_alignment")
    number = b"" if stated is None else reader.read(stated.offset, min(stated.size, 8)).strip()
    alignment = int(number) if number.isdigit() else _ALIGNMENT
    if alignment > _LARGEST_ALIGNMENT:
        raise ReadProblem(f"its data is aligned to {alignment} bytes")
    prefix = f"{archive.root}/"
    offsets = {prefix + name: record.offset for name, record in archive.records.items()}
    listed = read_directory(reader, find_tail(reader), problems, "torch")
    entries = [e for e in sorted(listed, key=lambda e: e.header_offset) if e.name.removeprefix(prefix) not in gone]
    return with_records(reader, entries, offsets, {f"{prefix}data.pkl": new}, max(alignment, _ALIGNMENT))


def _cut(pickle: CutPickle, places: Collection[tuple[str, ...]]) -> bytes:
    edits = {}
    inside: dict[tuple[str, ...], dict[str | None, list[CutEntry]]] = {}
    for place in places:
        entry: CutEntry | None = None
        for depth, key in enumerate(place):
            found = inside.get(place[:depth])
            if found is None:
                found = inside[place[:depth]] = {}
                for one in pickle.entries(entry):
                    found.setdefault(pickle.text(one.key), []).append(one)
            if len(found.get(key, ())) != 1:
                raise ReadProblem(f"it has no entry {'.'.join(place)} of its own")
            [entry] = found[key]
        if entry is not None:
            edits[entry.key] = entry.next, b""
    return pickle.edited(edits)


def _storages(data: bytes) -> set[str]:
    """Return the names of the records that a pickle refers to. Raises ReadProblem for a pickle that is not torch's."""
    try:
        return {f"data/{as_storage(reference)[0].key}" for reference in read_pickle(data).persistent}
    except (PickleProblem, TensorProblem) as error:
        raise ReadProblem(f"its pickle cannot be read: {error}") from error


def distributed_without(
    metadata: bytes, places: Collection[tuple[str, ...]], sizes: Mapping[str, int]
) -> dict[str, list[Part]]:
    """Return the files of torch.distributed.checkpoint without these entries, by name, with a new ``.metadata``.

    `sizes` are those of the files beside it. One that loses nothing is left out, and one that keeps nothing has no
    parts. No range begins where another one did: while files change places, a loader fails rather than takes the bytes
    of another tensor. Raises ReadProblem if it cannot be written anew surely.
    """
    pickle = CutPickle(metadata)
    fields = {pickle.text(entry.key): entry for entry in pickle.entries()}
    edits: dict[int, tuple[int, bytes]] = {}
    begin, deepest = {".".join(place) for place in places}, max(map(len, places))
    tops = {place[0] for place in places}

    def goes(name: str | None) -> bool:
        if name is None:
            raise ReadProblem("its .metadata has a name that is not text")
        keys = name.split(".", deepest)
        return any(".".join(keys[:count]) in begin for count in range(1, deepest + 1))

    for field in ("state_dict_metadata", "planner_data"):
        for entry in pickle.entries(fields[field]) if field in fields else ():
            if not goes(pickle.text(entry.key)):
                continue
            if field == "planner_data" and pickle.first_text(entry.value) not in tops:
                raise ReadProblem("a dot in its .metadata is part of a name")
            edits[entry.key] = entry.next, b""
    kept: dict[str, list[tuple[int, int, CutEntry]]] = {name: [] for name in sizes}
    starts: dict[str, set[int]] = {name: set() for name in sizes}
    cut = set[str]()
    if "storage_data" not in fields or not edits:
        raise ReadProblem("its .metadata does not name them")
    for entry in pickle.entries(fields["storage_data"]):
        index = {
            pickle.text(e.key): e for e in pickle.entries(CutEntry(entry.key, entry.key, entry.value, entry.value))
        }
        place = {pickle.text(e.key): e for e in pickle.entries(entry)}
        if "fqn" not in index or not {"relative_path", "offset", "length"} <= place.keys():
            raise ReadProblem("its .metadata describes a range in an unknown way")
        file = pickle.text(place["relative_path"].value)
        offset, length = (pickle.integer(place[name].value) for name in ("offset", "length"))
        if file not in kept or offset + length > sizes[file]:
            raise ReadProblem("its .metadata names a range that is not there")
        starts[file].add(offset)
        if goes(pickle.text(index["fqn"].value)):
            edits[entry.key] = entry.next, b""
            cut.add(file)
        else:
            kept[file].append((offset, length, place["offset"]))
    found: dict[str, list[Part]] = {}
    for file in sorted(cut):
        parts, end = list[Part](), 0
        for offset, length, stated in sorted(kept[file]):
            while end in starts[file] and end != offset:  # a loader with the other .metadata takes nothing for another
                parts.append(b"\0")
                end += 1
            edits[stated.value] = stated.end, _INT + end.to_bytes(8, "little")
            parts.append((offset, length))
            end += length
        found[file] = parts
    return {**found, ".metadata": [pickle.edited(edits)]}

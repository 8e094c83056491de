"""The files of torch.save and torch.jit.save: a zip archive of a pickle and the storages that it refers to."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from blake3 import blake3

from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import PersistentId
from ckptguard.formats.pickle.machine import MAX_STREAM, read_pickle
from ckptguard.formats.structure import MAX_PROBLEMS, Found, Problem, Source, SpanPlace, Structure
from ckptguard.formats.torch.contents import ReadingBudget, take
from ckptguard.formats.torch.placing import StorageSpan, place_tensors
from ckptguard.formats.torch.rebuild_calls import Described
from ckptguard.formats.zip.archive import Archive, Record, read_archive, wrong_sum
from ckptguard.storage.protocol import Reader

NAME = "torch_zip"
_DATA, _CONSTANTS = "data/", "constants/"
_ROOM_EACH = 1700
_PARTS = 5  # of a reference to a storage
_Tensors = tuple[list[tuple[str, Described]], tuple[PersistentId, ...]]
_MOST_ROOM = 500_000
_SHORT = 1000  # bytes
# What torch parses before the pickle. It knows ten formats, and ignores text after the number.
_STATED = {"version": rb"(?s:\s*\+?0*(?:[1-9]|10)(?!\d).*)", ".storage_alignment": rb"\s*[-+]?\d+\s*"}
_TEXT = ".data/serialization_id"


def read(reader: Reader, path: str) -> Structure:
    """Return the structure of a torch archive. Each storage is a span, with the archive's CRC-32."""
    archive = read_archive(reader)
    stated = sorted((name, record.size, record.crc32) for name, record in archive.records.items())
    checksums = blake3(msgspec.json.encode(stated)).hexdigest(16)
    found = _read(reader, archive, ReadingBudget(each=_ROOM_EACH))
    return msgspec.structs.replace(found, checksums=checksums)


def read_within(reader: Source, room: ReadingBudget) -> Structure:
    """Do the same for one of many archives."""
    return _read(reader, read_archive(reader), room)


def _read(reader: Source, archive: Archive, room: ReadingBudget) -> Structure:
    found = Found(problems=list(archive.problems), truncated=archive.truncated)
    # torch.jit.save writes a second pickle, whose storages are in their own folder.
    folders = {_DATA: "data.pkl"} | ({_CONSTANTS: "constants.pkl"} if "constants.pkl" in archive.records else {})
    stored: dict[str, dict[str, StorageSpan]] = {folder: {} for folder in folders}
    others: list[Record] = []
    for name, record in archive.records.items():  # in file order
        folder, slash, key = name.partition("/")
        own = stored.get(folder + slash)
        if own is not None:
            own[key] = StorageSpan(len(found.spans) if record.size else None, record.size)
        if own is not None and record.size:
            found.spans.append(SpanPlace(record.offset, record.size, record.crc32))
        else:
            others.append(record)
    room.budget += room.each * min(len(found.spans), _MOST_ROOM)
    found.problems += _unfit_records(reader, archive)
    # Records beside the storages are checked here; the storages' bytes are checked during the scan.
    found.problems += [problem for record in others for problem in wrong_sum(reader, record, record.name)]
    byte_order = _byte_order(reader, archive, found.problems)
    for folder, pickle in folders.items():
        tensors, references = _read_state(reader, archive, pickle, room, found)
        if any(type(r.value) is not tuple or len(r.value) != _PARTS for r in references):
            found.problems.append(Problem("a reference does not lead to a storage of an archive"))
        found.tensors += place_tensors(tensors, references, stored[folder], byte_order, found.problems)
    return found.structure(NAME, MAX_PROBLEMS)


def _read_state(reader: Source, archive: Archive, name: str, room: ReadingBudget, found: Found) -> _Tensors:
    """Record the content of a pickle in the archive. Returns its tensors and references."""
    record = archive.records.get(name)
    if record is None:
        if archive.records or not archive.problems:
            found.problems.append(Problem(f"the archive holds no {name}, so it is not a torch archive"))
        return [], ()
    if record.size > MAX_STREAM:
        found.problems.append(Problem(f"{name} has {record.size} bytes, which is more than ckptguard reads"))
        return [], ()
    data = reader.read(record.offset, record.size)
    try:
        pickled = read_pickle(data, budget=room.budget)
    except PickleProblem as error:
        found.problems.append(Problem(f"{name} cannot be read: {error}"))
        found.names |= error.globals
        return [], ()
    if pickled.end != len(data):
        found.problems.append(Problem(f"{len(data) - pickled.end} bytes follow the pickle in {name}"))
    prefix = "" if name == "data.pkl" else "constants."
    tensors = take(pickled, room, found, prefix)
    return [(prefix + inner, value) for inner, value in tensors], pickled.persistent


def _byte_order(reader: Source, archive: Archive, problems: list[Problem]) -> str:
    record = archive.records.get("byteorder")
    if record is None:
        return "little"
    stated = reader.read(record.offset, min(record.size, 16))
    if stated not in (b"little", b"big"):
        problems.append(Problem("the byte order that the archive states is neither little nor big"))
        return "little"
    return stated.decode()


def _unfit_records(reader: Source, archive: Archive) -> Iterator[Problem]:
    """Yield what keeps torch from opening the archive, whatever the pickle says."""
    if "data.pkl" in archive.records and not {"version", ".data/version"} & archive.records.keys():
        yield Problem("the archive holds no version, so torch does not open it")
    for name in (*_STATED, _TEXT):
        record = archive.records.get(name)
        if record is None:
            continue
        text = reader.read(record.offset, min(record.size, _SHORT))
        fits = _is_utf8(text) if name == _TEXT else re.fullmatch(_STATED[name], text)
        if not fits or record.size > _SHORT:
            yield Problem(f"torch cannot read {name} of the archive")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True

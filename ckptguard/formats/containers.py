"""Archives of files: a zip of stable-baselines3 or Keras, NeMo's tar, a tar of shards. Each is a folder inside a file.

What is stored is read in place, so the scan reads every byte once. What is packed is unpacked here, within limits. An
archive inside an archive is not read. Names of tensors begin with their file's: ``policy.pth:mlp.weight``.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3
from msgspec import structs

from ckptguard.formats import opaque
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.long_values import InMemory, Slice
from ckptguard.formats.pickle.machine import read_pickle
from ckptguard.formats.strict_json import JsonProblem, parse_object, printable
from ckptguard.formats.structure import Found, Leaf, Problem, RangeSum, Source, SpanPlace, Structure
from ckptguard.formats.table import (
    BASELINES_DATA,
    FIRST_BYTES,
    GZIP_MAGIC,
    KERAS,
    NEMO,
    ZIP_MAGIC,
    begins_like_folder,
    begins_like_no_state,
    format_of,
    has_tensor_suffix,
    is_pickle_name,
    may_hold_state,
    name_of,
    promises_tensors,
)
from ckptguard.formats.tar import read_members
from ckptguard.formats.torch.files import ROOM_EACH, ReadingBudget, sums_are_right, take_tensors
from ckptguard.formats.zip.archive import Record, UnpackProblem, read_archive, unpacked
from ckptguard.formats.zip.directory import find_tail, read_directory

# The formats that are read inside an archive, and those functions of theirs that share one budget.
_READ = ("safetensors", "npz", "npy", "gguf", "hdf5", "torch_zip", "torch_legacy", "pickle")
_SHARE = {"torch_zip": "read_zip_within", "torch_legacy": "read_legacy_within", "pickle": "read_pickles_within"}
_MOST_READ = 1000  # files of one archive that are read
_MOST_NAMED = 100
_SMALLEST = 1024  # bytes; what is smaller is no training state
_LARGEST_PACKED = 64 << 20  # bytes of one file after unpacking
_ROOM = 256 << 20  # bytes of all of them
_SERIALIZED = ":serialized:"


class ArchiveMember(NamedTuple):
    """One file in an archive: its bytes, and where they are if they are stored as they are, else the packed ones."""

    name: str
    source: Source
    place: SpanPlace
    packed: bool = False


def read_zip(reader: Source, path: str) -> Structure:
    """Return the structure of a zip archive of files. One without any file that is read here is opaque."""
    archive = read_archive(reader, "files")
    folder = _Folder(reader, path)
    if archive.too_large and folder.is_one(()):
        return Structure(format="zip", not_understood=(archive.too_large,))
    folder.found.problems += archive.problems
    folder.found.truncated = archive.truncated
    if not folder.is_one([*archive.records, *archive.unreadable]):
        return opaque.read(reader, path)
    for name in sorted(archive.unreadable):
        folder.skip(printable(name))
    for record in sorted(archive.records.values(), key=lambda r: r.offset):
        if not record.deflated:
            if record.size:
                name = printable(record.name)
                folder.sums.append(RangeSum(record.offset, record.size, record.crc32, name))
            folder.take(_stored(reader, record.name, record.offset, record.size))
        elif record.size:
            folder.take_deflated(record)
    stated = sorted((name, record.size, record.crc32) for name, record in archive.records.items())
    return structs.replace(folder.structure("zip"), checksums=blake3(msgspec.json.encode(stated)).hexdigest(16))


def lists_state(reader: Source) -> bool:
    """True if an archive names a file that a checkpoint needs. Only what says which files there are is read."""
    head = reader.read(0, min(reader.entry.size, FIRST_BYTES))
    if head.startswith(ZIP_MAGIC):
        tail = find_tail(reader)
        names = (
            []
            if tail.problem is not None or tail.too_large
            else [e.name for e in read_directory(reader, tail, [], "files")]
        )
    else:
        contents = read_members(reader)
        names = [*(member.name for member in contents.members), *contents.others]
    return any(map(promises_tensors, names))


def read_tar(reader: Source, path: str) -> Structure:
    """Return the structure of a tar archive, also of one that gzip compressed as a whole."""
    if reader.read(0, min(reader.entry.size, len(GZIP_MAGIC))) == GZIP_MAGIC:
        return _read_compressed(reader, path)
    return _read_tar(reader, path, lambda name, offset, size: _stored(reader, name, offset, size), reader)


def _read_tar(
    reader: Source, path: str, member: Callable[[str, int, int], ArchiveMember], content: Source
) -> Structure:
    contents = read_members(content)
    folder = _Folder(reader, path)
    folder.found.problems += contents.problems
    folder.found.truncated = contents.truncated
    if not folder.is_one([*(one.name for one in contents.members), *contents.others]):
        return opaque.read(reader, path)
    if contents.unlisted:
        folder.not_understood.append("one of very many files")
    for name in contents.others:
        folder.skip(printable(name))
    last = contents.members[-1] if contents.truncated and contents.members else None
    for name, offset, size in contents.members:
        if last is None or offset != last.offset:  # a cut file has nothing to say that the cut does not
            folder.take(member(name, offset, size))
    return folder.structure("tar")


def _read_compressed(reader: Source, path: str) -> Structure:
    raw, size = b"", reader.entry.size
    packed = SpanPlace(0, size)
    wrong: Problem | None = None
    truncated = False
    if size <= _LARGEST_PACKED:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(reader.read(0, size))) as stream:
                raw = stream.read(2 * _LARGEST_PACKED + 1)
        except EOFError:
            wrong, truncated = Problem("the compressed archive has no end: the file is not complete"), True
        except (OSError, zlib.error):
            wrong = Problem("the compressed archive is damaged")
    if wrong is None and not 0 < len(raw) <= 2 * _LARGEST_PACKED:
        promises = has_tensor_suffix(path) or begins_like_folder(reader.read(0, min(size, FIRST_BYTES)))
        what = "what unpacks to more than ckptguard reads"
        return Structure(format="tar", not_understood=(what,)) if promises else opaque.read(reader, path)
    if wrong is not None:
        folder = _Folder(reader, path)
        folder.found.problems.append(wrong)
        folder.found.truncated = truncated
        return folder.structure("tar") if folder.is_one(()) else opaque.read(reader, path)

    def member(name: str, at: int, length: int) -> ArchiveMember:
        return ArchiveMember(name, InMemory(raw[at : at + length]), packed, True)

    found = _read_tar(reader, path, member, InMemory(raw))
    return structs.replace(found, checksums=blake3(raw).hexdigest(16))  # gzip has compared it with its own


def _stored(reader: Source, name: str, offset: int, size: int) -> ArchiveMember:
    return ArchiveMember(name, Slice(reader, offset, size), SpanPlace(offset, size))


class _Folder:
    """What the files of an archive hold, as one structure."""

    def __init__(self, reader: Source, path: str) -> None:
        self.found = Found()
        self.sums: list[RangeSum] = []
        self.not_understood: list[str] = []
        self._members: list[str] = []
        self._containers: list[str] = []
        self._reader, self._path = reader, path
        self._budget = ReadingBudget(each=ROOM_EACH)
        self._room = _ROOM

    def is_one(self, names: Sequence[str]) -> bool:
        """True if the archive holds files that are read here, by its own name or theirs, or begins like one that
        does."""
        if name_of(self._path).endswith((*KERAS, *NEMO)):
            return True
        by_names = any(promises_tensors(name) or is_pickle_name(name) for name in names)
        return by_names or begins_like_folder(self._reader.read(0, min(self._reader.entry.size, FIRST_BYTES)))

    def skip(self, name: str) -> None:
        """Note a file that is not read."""
        if promises_tensors(name) or is_pickle_name(name):
            self.not_understood.append(name)
        elif may_hold_state(name) and len(self.found.unread) < _MOST_NAMED:
            self.found.unread.append(name)

    def take_deflated(self, record: Record) -> None:
        """Unpack a file and take it. Every other than a small one must be worth it."""
        name = printable(record.name)
        if record.size > min(_LARGEST_PACKED, self._room):
            self.skip(name)
            return
        self._room -= record.size
        try:
            raw = b"".join(unpacked(self._reader, record))
        except UnpackProblem as error:
            self.found.add(Problem(f"{name!r}: {error}"))
            return
        self.take(ArchiveMember(record.name, InMemory(raw), SpanPlace(record.offset, record.packed), True))

    def take(self, member: ArchiveMember) -> None:
        """Read one file if it is of a format that is read here."""
        name, size = printable(member.name), member.source.entry.size
        if name.endswith("/"):
            return
        head = member.source.read(0, min(size, FIRST_BYTES))
        row = format_of(member.name, head)
        if name == BASELINES_DATA and head[:1] == b"{" and size > _LARGEST_PACKED:
            self.not_understood.append(name)
        elif name == BASELINES_DATA and head[:1] == b"{":
            self._read_data(member.source.read(0, size))
        elif row.name == "unrecognised":
            self._merge(name, member, opaque.read(member.source, member.name))
        elif row.name in _READ and len(self._members) < _MOST_READ and self._budget.budget > 0:
            module = importlib.import_module(f"ckptguard.formats.{row.module}")
            if row.name in _SHARE:
                found = getattr(module, _SHARE[row.name])(member.source, self._budget)
            else:
                found = getattr(module, row.read)(member.source, member.name)
            self._members.append(name)
            self._merge(name, member, found)
        elif row.module == "containers" and (head.startswith(GZIP_MAGIC) or lists_state(member.source)):
            self.not_understood.append(name)
        elif row.name in _READ or (size > _SMALLEST and may_hold_state(name) and not begins_like_no_state(head)):
            self.skip(name)

    def _merge(self, name: str, member: ArchiveMember, inner: Structure) -> None:
        found, prefix = self.found, name + ":"
        if inner.truncated and not inner.problems:
            found.add(Problem(f"{name}: it is not complete"))
        for problem in inner.problems:
            tensor = problem.tensor and prefix + problem.tensor
            found.add(structs.replace(problem, message=f"{name}: {problem.message}", tensor=tensor))
        first = len(found.spans)
        if not member.packed:
            offset = member.place.offset
            found.spans += [structs.replace(span, offset=offset + span.offset) for span in inner.spans]
            found.tensors += [
                structs.replace(t, name=prefix + t.name, span=None if t.span is None else first + t.span)
                for t in inner.tensors
            ]
        elif inner.spans:
            if found.spans[-1:] == [member.place]:
                first -= 1  # an archive that is packed as a whole has one span
            else:
                found.spans.append(member.place)
        if member.packed:
            self._check_packed(member, inner, prefix)
            found.tensors += [
                structs.replace(
                    t, name=prefix + t.name, span=None if t.span is None else first, start=0, stop=0, strides=()
                )
                for t in inner.tensors
            ]
        found.leaves += [structs.replace(leaf, name=prefix + leaf.name) for leaf in inner.leaves]
        found.unread += [prefix + part for part in inner.unread]
        for mine, inners in (
            (found.learnt, inner.learnt),
            (found.matrices, inner.matrices),
            (found.scores, inner.scores),
        ):
            mine += [prefix + part for part in inners]
        found.names |= set(inner.globals)
        self.not_understood += [prefix + part if part else name for part in inner.not_understood]
        self._containers += [prefix + container for container in inner.containers]

    def _check_packed(self, member: ArchiveMember, inner: Structure, prefix: str) -> None:
        """Look at the numbers of an unpacked file, which the scan does not see."""
        raw, found = member.source, Found()
        if not sums_are_right(inner, raw):
            self.found.add(Problem(f"{prefix} it has a wrong CRC-32"))
        take_tensors(found, "", inner, raw, self._budget)
        if self._budget.budget <= 0:
            self.not_understood.append(prefix[:-1])
        self.found.leaves += [structs.replace(leaf, name=prefix + leaf.name.removeprefix(".")) for leaf in found.leaves]
        self.found.unread += [prefix + part.removeprefix(".") for part in found.unread]
        self.found.names |= found.names

    def _read_data(self, text: bytes) -> None:
        """Read the settings and counters of stable-baselines3, and the pickles in them, which its loader runs."""
        self._members.append(BASELINES_DATA)
        try:
            data = parse_object(text, allow_nan=True)
        except JsonProblem as error:
            self.found.add(Problem(f"{BASELINES_DATA}: {error}"))
            return
        for key, value in data.items():
            name = f"{BASELINES_DATA}:{printable(key)}"
            if isinstance(value, int | float) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
                self.found.leaves.append(Leaf(name, value))
            if not isinstance(value, dict) or not isinstance(value.get(_SERIALIZED), str):
                continue
            try:
                raw = base64.b64decode(value[_SERIALIZED])
                pickled = read_pickle(raw, budget=max(self._budget.budget, 1))
            except (PickleProblem, binascii.Error, ValueError) as error:
                self.found.add(Problem(f"{name} cannot be read: {error}"))
                self.found.names |= getattr(error, "globals", frozenset())
            else:
                if pickled.end != len(raw):
                    self.found.add(Problem(f"{name}: {len(raw) - pickled.end} bytes follow its pickle"))
                self._budget.budget -= pickled.cost
                self.found.names |= pickled.globals

    def structure(self, name: str) -> Structure:
        """Return what was found."""
        self.found.containers = tuple(self._containers)
        return structs.replace(
            self.found.structure(name),
            members=tuple(self._members),
            not_understood=tuple(self.not_understood[:_MOST_NAMED]),
            sums=tuple(self.sums),
        )

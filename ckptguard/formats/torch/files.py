"""Files of torch: zip archives, the legacy format, and plain pickles. They are in one module, because each of them may
hold any of them as bytes.

Layers pickle their own state into bytes or a tensor of bytes (`_extra_state`), and plain pickles hold each tensor as a
file. No span of the outer file shows such numbers to the scan, so they are checked here. All of it is read within one
budget. The legacy format is from before torch.save's zip format: pickles, then the storages one after another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import msgspec
from blake3 import blake3
from msgspec import structs

from ckptguard.formats import safetensors
from ckptguard.formats.dtypes import BLOCKS, DTYPES
from ckptguard.formats.nonfinite_bytes import SIZES, bad_number
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import Call, Mapping, PersistentId, Sequence
from ckptguard.formats.pickle.long_values import InMemory, LongBytes, PickleStream, Slice, blocks_of, head_of
from ckptguard.formats.pickle.machine import BUDGET, Machine, Pickled, read_pickle, run_machine
from ckptguard.formats.pickle.numpy_values import raw_bytes
from ckptguard.formats.structure import (
    MAX_PROBLEMS,
    Found,
    Leaf,
    Problem,
    ReadProblem,
    Source,
    SpanPlace,
    Structure,
    TensorPlace,
    broken,
    holds_bytes,
    unread,
)
from ckptguard.formats.table import (
    FIRST_BYTES,
    LEGACY_MAGICS,
    NUMPY_MAGIC,
    ZIP_MAGIC,
    is_marked_pickle,
    is_safetensors,
)
from ckptguard.formats.torch.placing import StorageSpan, place_tensors
from ckptguard.formats.torch.rebuild_calls import Described, TensorProblem, as_storage
from ckptguard.formats.torch.state_tree import MAX_LEAVES, MAX_NODES, MAX_UNREAD, FileValue, below, walk
from ckptguard.formats.zip.archive import Archive, Record, read_archive, wrong_sum
from ckptguard.formats.zip.crc import crc32_of
from ckptguard.storage.protocol import Reader

LOADS_BYTES = "torch.storage._load_from_bytes"
_DEEPEST = 16  # files inside files
_MOST_LEAVES = 1000  # of one file inside a file
_LARGEST_UNMARKED = 16 << 20
_PICKLE, _ZIP = "pickle", "torch_zip"
_LEGACY = "torch_legacy"
_BLOCK = 1 << 20
_A_TENSOR = 1 << 20  # bytes that a tensor in a file in a file costs at most
_MAX_PICKLES = 10_000
_AN_OPCODE = 32  # of the budget, at least
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LEGACY_PARTS = 6  # of a reference to a storage
_DATA, _CONSTANTS = "data/", "constants/"
ROOM_EACH = 1700
_ZIP_PARTS = 5  # of a reference to a storage
_Tensors = tuple[list[tuple[str, Described]], tuple[PersistentId, ...]]
_MOST_ROOM = 500_000
_SHORT = 1000  # bytes
# What torch parses before the pickle. It knows ten formats, and ignores text after the number.
_STATED = {"version": rb"(?s:\s*\+?0*(?:[1-9]|10)(?!\d).*)", ".storage_alignment": rb"\s*[-+]?\d+\s*"}
_TEXT = ".data/serialization_id"


class ReadingBudget(msgspec.Struct):
    """What reading pickles may still cost, for all archives that share it. `depth`: how many files contain it.

    Each existing storage adds `each`, because tensors with their own storages take about as much.
    """

    budget: int = BUDGET
    each: int = 0
    nodes: int = MAX_NODES
    depth: int = 0


def take(
    pickled: Pickled, room: ReadingBudget, found: Found, prefix: str = "", loads: Iterable[Call] = ()
) -> list[tuple[str, Described]]:
    """Record the content of a pickle except the tensors, which are returned. `loads` are its calls of torch's loader
    for bytes: if all of these are read, loading them does nothing else."""
    tree = walk(pickled, room.nodes)
    room.budget -= pickled.cost
    room.nodes -= tree.visited
    found.problems += tree.problems
    found.leaves += (structs.replace(leaf, name=prefix + leaf.name) for leaf in tree.leaves) if prefix else tree.leaves
    found.unread += [prefix + name for name in tree.unread]
    found.not_understood += [f"{prefix or 'all of it'} ({limit})" for limit in tree.limits]
    if not prefix:
        found.containers = tree.containers
    found.learnt += [prefix + name for name in tree.learnt]
    found.matrices += [prefix + name for name in tree.matrices]
    found.scores += [prefix + name for name in tree.scores]
    files = {id(file.value): file for file in tree.files}
    calls = {id(call): FileValue("value", call, raw_bytes(call)) for call in loads}
    read = {key for key, file in {**calls, **files}.items() if _take_value(found, prefix, file, room)}
    found.names |= pickled.globals - ({LOADS_BYTES} if calls and calls.keys() <= read else set())
    return tree.tensors


def _take_value(found: Found, prefix: str, file: FileValue, room: ReadingBudget) -> bool:
    name, raw = prefix + file.name, file.raw
    source = InMemory(raw) if isinstance(raw, bytes) else raw
    known = source is not None and take_file(found, name, source, room, file.dtype)
    if type(file.value) is not Call or not file.value.calls(LOADS_BYTES):
        return known
    known = known and raw is not None and head_of(raw, FIRST_BYTES).startswith((ZIP_MAGIC, *LEGACY_MAGICS))
    if not known:
        _not_read(found, name)
    return known


def take_file(found: Found, name: str, raw: Source, room: ReadingBudget, dtype: str = "") -> bool:
    """Record the content of bytes that are a file: numbers that are not finite, names, unread parts.

    Returns whether it is a file that was read completely. Bytes that only look like one are not read, and are no
    problem of the outer file. `dtype`: the type of its storage, if it does not state it.
    """
    room.depth += 1
    try:
        inner = _structure_of(raw, room) if room.depth <= _DEEPEST else broken("", "it is nested in too many files")
        if inner is None:
            return False
        found.names.update(inner.globals)
        if inner.problems or inner.truncated or inner.not_understood or not sums_are_right(inner, raw):
            _not_read(found, name)
            return False
        if dtype and inner.unread == ("value",) and len(inner.tensors) == 1:
            inner = structs.replace(inner, unread=(), tensors=(_of_dtype(inner.tensors[0], dtype),))
        for leaf in [leaf for leaf in inner.leaves if not math.isfinite(leaf.value)][:_MOST_LEAVES]:
            found.leaves.append(structs.replace(leaf, name=below(name, leaf.name)))
        opened = take_tensors(found, name, inner, raw, room)
        for part in inner.unread:
            if part not in opened:
                _not_read(found, below(name, part))
        return True
    except ReadProblem as error:
        found.fail(name, error)
        return False
    finally:
        room.depth -= 1


def _structure_of(source: Source, room: ReadingBudget) -> Structure | None:
    """Return the structure of bytes that begin and end like a file; None if they are not one."""
    size = source.entry.size
    head = source.read(0, min(size, FIRST_BYTES))
    if head.startswith(ZIP_MAGIC):
        return read_zip_within(source, room)
    if head.startswith(LEGACY_MAGICS):
        return read_legacy_within(source, room)
    if head.startswith(NUMPY_MAGIC):
        return broken("npy", "it is not read here")
    if is_safetensors(".pt", head[:9]):
        structure = safetensors.read(source, "")
        if not structure.problems:
            return structure
    marked = is_marked_pickle(head)
    end = _end_of_padding(source) if marked else size  # a tensor of bytes may be padded
    if source.read(max(end - 1, 0), 1) != b"." or (not marked and size > _LARGEST_UNMARKED):
        return None
    if room.budget <= 0:
        return unread("pickle", ReadProblem("more than ckptguard reads", too_large=True))
    structure = read_pickles_within(source if end == size else Slice(source, 0, end), room)
    return structure if marked or not structure.problems else None


def _of_dtype(storage: TensorPlace, dtype: str) -> TensorPlace:
    size = DTYPES[dtype].size if dtype in DTYPES else 1
    return structs.replace(storage, dtype=dtype, start=storage.start // size, stop=storage.stop // size)


def _end_of_padding(source: Source) -> int:
    """Return where the zero bytes begin that end a file."""
    end = source.entry.size
    while end > 0:
        begin = max(end - _BLOCK, 0)
        kept = source.read(begin, end - begin).rstrip(b"\0")
        if kept:
            return begin + len(kept)
        end = begin
    return end


def sums_are_right(inner: Structure, raw: Source) -> bool:
    return all(s.crc32 is None or crc32_of(raw, s.offset, s.length) == s.crc32 for s in inner.spans)


def take_tensors(found: Found, name: str, inner: Structure, raw: Source, room: ReadingBudget) -> set[str]:
    """Record one number that is not finite of each tensor with some. Returns the names of tensors that hold files."""
    seen, opened = set(), set()
    for tensor in inner.tensors:
        place = (tensor.span, tensor.start, tensor.stop, tensor.dtype)
        if tensor.span is None or place in seen:
            continue
        seen.add(place)
        full, blocks = below(name, tensor.name), BLOCKS.get(tensor.dtype)
        known = blocks or DTYPES.get(tensor.dtype)
        if known is None or room.budget <= 0:
            _not_read(found, full)
            continue
        begin, size = inner.spans[tensor.span].offset, known.size
        begin, length = begin + tensor.start * size, (tensor.stop - tensor.start) * size
        length = max(min(length, raw.entry.size - begin), 0)
        # What is read of long values has its own limit.
        room.budget -= min(length, _A_TENSOR) if isinstance(raw, LongBytes) else length
        if blocks is not None:
            bad = bad_number(blocks.scales(raw.read(begin, length)), blocks.scale, "little")
            if bad is not None:
                found.leaves.append(Leaf(full, bad, of_array=True))
        elif tensor.dtype in SIZES:
            parts = blocks_of(raw, begin, length)
            numbers = (bad_number(part, tensor.dtype, tensor.byte_order) for part in parts)
            bad = next((number for number in numbers if number is not None), None)
            if bad is not None and tensor.strides:
                _not_read(found, full)  # it may be an element that the tensor leaves out
            elif bad is not None:
                found.leaves.append(Leaf(full, bad, of_array=True))
        elif holds_bytes(tensor) and take_file(found, full, Slice(raw, begin, length), room):
            opened.add(tensor.name)
    return opened


def _not_read(found: Found, name: str) -> None:
    if len(found.unread) < MAX_UNREAD and name not in found.unread:
        found.unread.append(name)


# Archives of torch.save and torch.jit.save: a pickle, and the storages that it refers to.


def read_zip(reader: Reader, path: str) -> Structure:
    """Return the structure of a torch archive. Each storage is a span, with the archive's CRC-32."""
    archive = read_archive(reader)
    stated = sorted((name, record.size, record.crc32) for name, record in archive.records.items())
    checksums = blake3(msgspec.json.encode(stated)).hexdigest(16)
    found = _read_archive(reader, archive, ReadingBudget(each=ROOM_EACH))
    return msgspec.structs.replace(found, checksums=checksums)


def read_zip_within(reader: Source, room: ReadingBudget) -> Structure:
    """Do the same for one of many archives."""
    return _read_archive(reader, read_archive(reader), room)


def _read_archive(reader: Source, archive: Archive, room: ReadingBudget) -> Structure:
    if archive.too_large:
        return Structure(format=_ZIP, not_understood=(archive.too_large,))
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
        if any(type(r.value) is not tuple or len(r.value) != _ZIP_PARTS for r in references):
            found.problems.append(Problem("a reference does not lead to a storage of an archive"))
        found.tensors += place_tensors(tensors, references, stored[folder], byte_order, found.problems)
    return found.structure(_ZIP, MAX_PROBLEMS)


def _read_state(reader: Source, archive: Archive, name: str, room: ReadingBudget, found: Found) -> _Tensors:
    """Record the content of a pickle in the archive. Returns its tensors and references."""
    record = archive.records.get(name)
    if record is None:
        if archive.records or not archive.problems:
            found.problems.append(Problem(f"the archive holds no {name}, so it is not a torch archive"))
        return [], ()
    try:
        pickled = read_pickle(PickleStream(Slice(reader, record.offset, record.size)), budget=room.budget)
    except PickleProblem as error:
        found.fail(name, error)
        found.names |= error.globals
        return [], ()
    if pickled.end != record.size:
        found.problems.append(Problem(f"{record.size - pickled.end} bytes follow the pickle in {name}"))
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


# Pickles without an archive around them: scheduler and RNG states, pickled dicts, and legacy files.


class _LoadingMachine(Machine):
    """A machine that remembers the bytes for calls of torch's own loader."""

    __slots__ = ("loads",)

    def __init__(self, stream: PickleStream, start: int) -> None:
        super().__init__(stream, start)
        self.loads: list[Call] = []

    def reduce(self, p: int) -> int:
        p = super().reduce(p)
        return self.called(p)

    def text_instance(self, p: int) -> int:
        return self.called(super().text_instance(p))

    def object_of_mark(self, p: int) -> int:
        return self.called(super().object_of_mark(p))

    def new_object_ex(self, p: int) -> int:
        return self.called(super().new_object_ex(p))

    def called(self, p: int) -> int:
        last = self.stack[-1]
        if type(last) is Call and last.calls(LOADS_BYTES):
            self.loads.append(last)
        return p


def read_pickles(reader: Reader, path: str) -> Structure:
    """Return the numbers and names in a file of one or more pickles."""
    return read_pickles_within(reader, ReadingBudget())


def read_pickles_within(reader: Source, room: ReadingBudget) -> Structure:
    """Do the same for one of several files."""
    size = reader.entry.size
    stream = PickleStream(reader)
    found = Found()
    position = count = 0
    while (position < size or not count) and count < _MAX_PICKLES:
        machine = _LoadingMachine(stream, position)
        try:
            pickled = run_machine(machine, position, room.budget)
        except PickleProblem as error:
            room.budget -= _AN_OPCODE * (machine.position - position)
            found.names |= error.globals
            what = f"after {position} bytes: " if count else ""
            if error.too_large:
                found.fail(f"{what}a pickle", error)
            else:
                found.problems.append(Problem(f"{what}{error}"))
            found.truncated = error.ends_early
            break
        tensors = take(pickled, room, found, f"{count}." if count else "", machine.loads)
        if len(found.leaves) > MAX_LEAVES:  # of this many only those that are not finite matter
            found.leaves = [leaf for leaf in found.leaves if not math.isfinite(leaf.value)]
        for name, _ in tensors[:100]:
            found.problems.append(Problem(f"tensor {name!r} refers to a storage outside the pickle", tensor=name))
        if pickled.persistent and not tensors:
            found.problems.append(Problem("it refers to something outside the pickle"))
        position, count = pickled.end, count + 1
    if position < size and not found.problems and not found.not_understood:
        found.not_understood.append(f"what follows {_MAX_PICKLES} pickles")
    if len(found.leaves) > MAX_LEAVES:
        found.problems.append(Problem("more numbers that are not finite than ckptguard lists", doubt=True))
    del found.leaves[MAX_LEAVES:], found.unread[MAX_UNREAD:]
    return found.structure(_PICKLE)


def read_legacy(reader: Reader, path: str) -> Structure:
    """Return the structure of a legacy file. Storages are spans without a CRC, which the format lacks."""
    return read_legacy_within(reader, ReadingBudget())


def read_legacy_within(reader: Source, room: ReadingBudget) -> Structure:
    """Do the same for one of several files."""
    pickles = _pickles(PickleStream(reader), room.budget)
    if isinstance(pickles, PickleProblem):
        return unread(_LEGACY, pickles, names=pickles.globals)
    magic, protocol, system, state, keys = pickles
    found = Found()
    if magic.value != _MAGIC or protocol.value != _PROTOCOL or type(system.value) is not Mapping:
        found.problems.append(Problem("it does not begin like torch's legacy files"))
    doubts = (doubt for p in pickles if p is not state for doubt in p.doubts)
    found.problems += (Problem(doubt, doubt=True) for doubt in dict.fromkeys(doubts))
    tensors = take(state, room, found)
    stored = _storages(reader, state, keys, found)
    # Whatever byte order the system record states, storages were always written in little-endian order.
    found.tensors = place_tensors(tensors, state.persistent, stored, "little", found.problems)
    del found.problems[MAX_PROBLEMS:]
    found.names.update(*(p.globals for p in pickles))
    return found.structure(_LEGACY)


def _pickles(data: PickleStream, budget: int) -> list[Pickled] | PickleProblem:
    """Return magic number, protocol version, system, state and the storages' keys, or why they cannot be read."""
    pickles: list[Pickled] = []
    try:
        for _ in range(5):
            pickles.append(read_pickle(data, pickles[-1].end if pickles else 0, budget=budget))
    except PickleProblem as error:
        error.globals = error.globals.union(*(p.globals for p in pickles))
        return error
    return pickles


def _storages(reader: Source, state: Pickled, keys: Pickled, found: Found) -> dict[str, StorageSpan]:
    """Return the storages by their keys."""
    items: dict[str, tuple[int, int]] = {}  # key -> (bytes of one element, total bytes)
    for reference in state.persistent:
        if type(reference.value) is tuple and reference.value[:1] == ("module",):
            continue  # a module's class, with its source
        try:
            storage, dtype = as_storage(reference)
            wrong = (
                None
                if type(reference.value) is tuple and len(reference.value) == _LEGACY_PARTS
                else "it is not described as a storage"
            )
        except TensorProblem as error:
            wrong = str(error)
        if wrong is not None:
            found.problems.append(Problem(f"a storage: {wrong}"))
            continue
        items.setdefault(storage.key, (DTYPES[dtype].size, storage.length))  # the first one creates it
    stored: dict[str, StorageSpan] = {}
    position, size = keys.end, reader.entry.size
    for key in keys.value.items if type(keys.value) is Sequence else []:
        if type(key) is not str or key not in items or key in stored:
            found.problems.append(Problem("the list of storages does not match the pickle"))
            return stored
        element, length = items[key]
        count = int.from_bytes(reader.read(position, 8), "little") if position + 8 <= size else None
        if count is None or (count * element == length and position + 8 + length > size):
            found.problems.append(Problem("the file ends in the middle of its storages"))
            found.truncated = True
            return stored
        if count * element != length:
            found.problems.append(Problem("a storage has another size than in the pickle"))
            return stored
        stored[key] = StorageSpan(len(found.spans) if length else None, length)
        if length:
            found.spans.append(SpanPlace(position + 8, length))
        position += 8 + length
    if position != size:
        found.problems.append(Problem(f"{size - position} bytes follow the last storage"))
    return stored

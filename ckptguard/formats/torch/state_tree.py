"""Walk the content of a pickle: named tensors, and the numbers beside them.

Names are dotted paths of keys. The walk has no recursion. It is safe from cycles, and from shared parts that would
unfold without end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from ckptguard.formats.pickle.inert_values import Call, Global, Kind, Mapping, PersistentId, Sequence, SetOf
from ckptguard.formats.pickle.long_values import LongBytes, LongText, head_of
from ckptguard.formats.pickle.machine import Pickled
from ckptguard.formats.pickle.numpy_values import (
    hides_floats,
    is_numpy,
    numpy_content,
    raw_bytes,
    shape_of_floats,
)
from ckptguard.formats.structure import Leaf, Problem, ReadProblem
from ckptguard.formats.table import may_begin_file
from ckptguard.formats.torch.names import CONTAINERS, WITHOUT_FLOATS, attributes, of_state, ordered_pairs, pairs_of
from ckptguard.formats.torch.rebuild_calls import (
    Described,
    as_composite,
    is_learnt,
    is_of_floats,
    is_plain,
    is_tensor,
    is_untyped,
    is_whole_tensor,
    packed_storage,
    quantiser,
    stated_sizes,
    tensor_attributes,
)

MAX_DEPTH = 200
MAX_NODES = 3_000_000
MAX_LEAVES = 20_000
MAX_TENSORS = 1_000_000
MAX_UNREAD = 100
_MAX_FINITE_LEAVES = 10_000  # the rest of the limit is for those that are not finite
_MAX_ALIKE = 1000  # not finite, of one kind, in one subtree, under one key: more of them add nothing
_LONG_SERIES = 64  # a longer list of plain numbers is data, of which only numbers that are not finite matter
_SHORTEST = 2  # bytes that a float can have, except those of a single byte
_MAX_SILENT = 1_000_000  # parts of something without numbers
_MAX_VISITS = 8
_MAX_FLAT_VISITS = 1000  # of something that cannot unfold further
_MOST_MATRICES = 10_000  # places of numpy's matrices
_MOST_KEYS = 64  # of a dict that may be an optimizer's
_HEAD = 16  # bytes of a file, which show its format
_WITHOUT_NUMBERS = (
    "torch.Size",
    "torch.device",
    "torch.Generator",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed._tensor.placement_types.DTensorSpec",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._tensor.device_mesh.DeviceMesh",
)


class FileValue(NamedTuple):
    """Bytes that may be a file, as the value that holds them. `dtype`: of its one storage, if only its tensor states
    it."""

    name: str
    value: object
    raw: bytes | LongBytes | None
    dtype: str = ""


class TreeContents(NamedTuple):
    """The content of a tree: tensors as the calls that rebuild them, in file order.

    `containers`, `unread`, `learnt`, `matrices` and `scores` are those of a Structure. `visited` counts the values
    read. `files` are bytes that may be files.
    `limits`: why not all of it was read.
    """

    tensors: list[tuple[str, Described]]
    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    containers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    visited: int = 0
    files: tuple[FileValue, ...] = ()
    limits: tuple[str, ...] = ()
    learnt: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()


def walk(pickled: Pickled, room: int = MAX_NODES) -> TreeContents:
    """Return everything that a pickle's value holds, by name. A single value is named "value"."""
    walking = _Walk()
    found = walking.run(pickled.value, room)
    doubts = dict.fromkeys(pickled.doubts)
    if pickled.dropped and not found.limits and not walking.saw(pickled.dropped):
        doubts["it makes a value and does not use it"] = None
    return found._replace(problems=(*found.problems, *(Problem(message, doubt=True) for message in doubts)))


def below(name: str, inner: str) -> str:
    """Return the full name of `inner` within the value of this name."""
    return name if inner == "value" else f"{name}.{inner}"


_Entered = tuple[object, Iterator[tuple[str, object]], int]


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[tuple[str, Described]] = []
        self.leaves: list[Leaf] = []
        self.problems: dict[str, Problem] = {}
        self.alike: dict[tuple[str, str, bool, bool], int] = {}
        self.visits: dict[int, int] = {}
        self.plain: set[int] = set()  # walked, and without anything that matters under another name
        self.met = 0  # how many things that matter
        self.unread: dict[str, None] = {}
        self.files: dict[int, FileValue] = {}
        self.silent: set[int] = set()  # that `is_silent` has checked
        self.waiting: list[_Entered] = []  # containers, each with its remaining children, and what was met before it
        self.limits: dict[str, None] = {}  # why not all of it was read
        self.learnt: list[str] = []
        self.matrices: dict[str, None] = {}
        self.scores: list[str] = []
        self.with_matrix: dict[int, bool] = {}  # by a container's id: does it directly hold a matrix of floats?
        self.optimizers: set[int] = set()  # dicts with parameter groups

    def run(self, root: object, most: int) -> TreeContents:
        waiting = self.waiting
        waiting.append((None, iter((("", root),)), 0))
        room = most
        while waiting and room and len(self.tensors) <= MAX_TENSORS:
            try:
                name, value = next(waiting[-1][1], _END)
            except ReadProblem as error:  # of a long value
                self.limits[str(error)] = None
                break
            kind = type(value)
            if value is _END[1]:
                container, _, met = waiting.pop()
                if met == self.met and self.visits.get(id(container), 0) > 1:
                    self.plain.add(id(container))
                continue
            room -= 1
            if kind is float or kind is int or kind is bool:
                self.number(name, value)  # type: ignore[arg-type]
            elif (kind is Call or kind is PersistentId) and is_tensor(value):  # type: ignore[arg-type]
                attributes = self.tensor(name or "value", value)  # type: ignore[arg-type]
                if attributes and self.enter(name, value, waiting):
                    waiting.append((value, iter(attributes), self.met))
            elif kind is bytes or kind is LongBytes:
                self.file(name, value, raw_bytes(value))
            elif kind in CONTAINERS and self.enter(name, value, waiting):
                waiting.append((value, self.children(name, value), self.met))
        if waiting and not self.limits:
            self.limits["more values than ckptguard reads"] = None
        leaves, problems = tuple(self.leaves), tuple(self.problems.values())
        unread, files = tuple(self.unread), tuple(self.files.values())
        read = TreeContents(self.tensors, leaves, problems, _containers(root), unread, most - room, files)
        read = read._replace(limits=tuple(self.limits))
        return read._replace(learnt=tuple(self.learnt), matrices=tuple(self.matrices), scores=tuple(self.scores))

    def saw(self, values: Iterable[object]) -> bool:
        """True if all of these are parts of what was walked."""
        tensors = {id(value) for _, value in self.tensors}
        return all(value == () or id(value) in self.visits or id(value) in tensors for value in values)

    def tensor(self, name: str, value: Described) -> list[tuple[str, object]]:
        """Record a tensor. Returns what is set on it besides its elements."""
        self.met += 1
        packed = packed_storage(value)
        if packed is not None:
            self.file(name, packed[0], raw_bytes(packed[0]), packed[1])
        else:
            self.tensors.append((name, value))
        if type(value) is not Call:
            if is_untyped(value):
                self.not_read(name)
            return []
        if is_learnt(value):
            self.learnt.append(name)
        sizes = stated_sizes(value)
        if sizes is not None and all(size == 1 for size in sizes) and self.is_score(value):
            self.scores.append(name)
        if is_plain(value):
            return []
        parts = [pair for state in tensor_attributes(value) for pair in of_state(name, f"{name}.", state)]
        # The factors of a quantised tensor's integers: numbers here, or tensors.
        for part, of_all in zip(("scale", "zero_point"), quantiser(value) or (), strict=False):
            if type(of_all) is float and not math.isfinite(of_all):
                self.number(f"{name}.{part}", of_all, of_array=True)
            elif type(of_all) in CONTAINERS:
                parts.append((f"{name}.{part}s", of_all))
        return parts

    def is_score(self, value: Call) -> bool:
        """True for a float in no optimizer, in a dict that holds no matrix."""
        inside = self.waiting[-1][0]
        if self.beside_matrix(inside) or any(id(above) in self.optimizers for above, *_ in self.waiting):
            return False
        return is_of_floats(value)

    def beside_matrix(self, container: object) -> bool:
        """True if this is a dict, or an object, that directly holds a matrix of floats."""
        known = self.with_matrix.get(id(container))
        if known is None:
            parts: list[object] = []
            for held in (container, container.state if type(container) is Call else None):
                flat = held.flat if type(held) is Mapping or type(held) is Call else None
                parts += flat or ()
            known = self.with_matrix[id(container)] = any(map(_is_matrix, parts))
        return known

    def enter(self, name: str, value: object, waiting: list[_Entered]) -> bool:
        """True if a container should be entered: not inside itself, not forever deeper, not again and again."""
        visits = self.visits[id(value)] = self.visits.get(id(value), 0) + 1
        if type(value) is tuple and len(value) > _LONG_SERIES and id(value) in self.plain:
            return False  # a key of many dicts, or of one again and again
        if visits > _MAX_VISITS and (visits > _MAX_FLAT_VISITS or not _is_flat(value)):
            if id(value) not in self.plain:  # otherwise it is a part that many share, such as a module's activation
                self.not_read(name)
            return False
        if len(waiting) > MAX_DEPTH:
            self.met += 1
            self.limits[f"it is nested deeper than {MAX_DEPTH} levels"] = None
            return False
        if visits == 1 or all(value is not above for above, *_ in waiting):
            return True
        self.met += 1  # whatever refers to a value around it holds all of that
        return False

    def children(self, name: str, value: object) -> Iterator[tuple[str, object]]:
        prefix = f"{name}." if name else ""
        if type(value) is Mapping:
            if len(value.flat) <= _MOST_KEYS and "param_groups" in value.flat[::2]:
                self.optimizers.add(id(value))
            yield from pairs_of(prefix, value.flat)
        elif type(value) is Sequence or type(value) is SetOf:
            yield from self.series(prefix, value.items)
        elif type(value) is tuple:
            if hides_floats(value):
                self.not_read(name)
            yield from self.series(prefix, value)
        elif type(value) is Call:
            yield from self.of_call(name, prefix, value)

    def of_call(self, name: str, prefix: str, call: Call) -> Iterator[tuple[str, object]]:
        if is_numpy(call):
            content, shape = numpy_content(call), shape_of_floats(call) or ()
            if _has_dimensions(shape) and len(self.matrices) < _MOST_MATRICES:
                self.matrices[".".join(name.split(".", 2)[:2])] = None
            for number in content.numbers:
                self.number(name, number, of_array=content.of_array, dimensions=len(shape))
            self.file(name, content.raw, content.raw)
            if content.unread:
                self.not_read(name)
            yield from self.series(prefix, content.items)
            return
        composite = as_composite(call)
        if composite is not None:
            for part, value in composite.parts:
                yield (prefix + part if part else name), value
            for state in composite.states:
                yield from of_state(name, prefix, state)
            return
        raw = raw_bytes(call)
        if raw is not None:
            self.file(name, call, raw)
            return
        if call.calls(*_WITHOUT_NUMBERS) and self.is_silent(call):
            return
        if hides_floats(call.args) or hides_floats(call.state) or _is_packed(call) or _takes_storage(call):
            self.not_read(name)
        pairs = ordered_pairs(call)
        if pairs is not None:
            yield from pairs_of(prefix, pairs)
        elif type(call.args) is tuple:
            yield from self.series(prefix, call.args)
        if call.kwargs is not None:
            yield prefix + "kwargs", call.kwargs
        if call.flat is not None:
            yield from pairs_of(prefix, call.flat)
        if call.items is not None:
            yield from self.series(prefix, call.items)
        states = call.state if type(call.state) is tuple else (call.state,)
        for state in states:
            if type(state) is not Mapping:
                yield prefix + "state", state
            elif call.calls("collections.OrderedDict") and "_metadata" in state.flat[:_MOST_KEYS:2]:
                self.learnt.append(name)  # a module wrote it
                if not self.is_silent(state):
                    yield from attributes(name, prefix, state)
            elif not (
                call.calls("collections.OrderedDict") and self.is_silent(state)
            ):  # a state dict's version numbers
                yield from attributes(name, prefix, state)

    def is_silent(self, value: object) -> bool:
        """True if there are only texts and whole numbers in it, at any depth."""
        waiting, seen = [value], set[int]()
        for _ in range(_MAX_SILENT):
            if not waiting:
                self.silent |= seen
                return True
            part = waiting.pop()
            kind = type(part)
            if kind in WITHOUT_FLOATS or id(part) in self.silent or id(part) in seen:
                continue
            if kind is Mapping:
                waiting += part.flat  # type: ignore[attr-defined]
            elif kind is Sequence or kind is SetOf:
                waiting += part.items  # type: ignore[attr-defined]
            elif kind is tuple:
                waiting += cast("tuple[object, ...]", part)
            elif kind is not Call or part.kind in _WITH_ELEMENTS:  # type: ignore[attr-defined]
                if not is_whole_tensor(part):
                    return False
            else:
                call = cast("Call", part)
                waiting += (call.args, call.kwargs, call.state, *(call.flat or ()), *(call.items or ()))
            seen.add(id(part))
        return False

    def series(self, prefix: str, items: list[object] | tuple[object, ...]) -> Iterator[tuple[str, object]]:
        """Yield children by index; of a long list of plain values only numbers that are not finite."""
        if len(items) > _LONG_SERIES and _HOLDERS.isdisjoint(map(type, items)):
            for index, item in enumerate(items):
                if type(item) is float and not math.isfinite(item):
                    yield f"{prefix}{index}", item
            return
        for index, item in enumerate(items):
            if type(item) not in _SILENT:
                yield f"{prefix}{index}", item

    def number(self, name: str, value: float | int, *, of_array: bool = False, dimensions: int = 2) -> None:
        if type(value) is int and not -(2**63) <= value < 2**63:
            return
        if type(value) is not float or math.isfinite(value):
            if len(self.leaves) < _MAX_FINITE_LEAVES:
                self.leaves.append(Leaf(name or "value", value, of_array))
            return
        self.met += 1
        kind = (name.partition(".")[0], name.rpartition(".")[2], math.isnan(value), of_array)
        if kind[1].isdigit():
            kind = (kind[0], "0", *kind[2:])
        known = self.alike.get(kind, 0)
        if len(self.leaves) >= MAX_LEAVES:
            if known < _MAX_ALIKE:
                self.problem("more numbers that are not finite than ckptguard lists")
        elif known < _MAX_ALIKE:
            self.alike[kind] = known + 1
            inside = [c for c, *_ in self.waiting[-2:] if type(c) is not Call or not is_numpy(c)][-1]
            beside = self.beside_matrix(inside)
            self.leaves.append(Leaf(name or "value", value, of_array, dimensions, beside))

    def file(self, name: str, value: object, raw: bytes | LongBytes | None, dtype: str = "") -> None:
        if raw is not None and may_begin_file(head_of(raw, _HEAD)):
            self.met += 1
            self.files.setdefault(id(value), FileValue(name or "value", value, raw, dtype))
        elif type(value) is Call and value.calls("torch.storage._load_from_bytes"):
            self.not_read(name)

    def not_read(self, name: str) -> None:
        self.met += 1
        if len(self.unread) < MAX_UNREAD:
            self.unread[name or "value"] = None

    def problem(self, message: str) -> None:
        self.met += 1
        self.problems.setdefault(message, Problem(message, doubt=True))


_HOLDERS = CONTAINERS | {PersistentId, bytes, LongBytes}
_SILENT = frozenset((str, LongText, type(None), Global))
_WITH_ELEMENTS = (Kind.TENSOR, Kind.ARRAY, Kind.DTYPE)
_END: tuple[str, object] = ("", object())


def _containers(root: object) -> tuple[str, ...]:
    """Return the keys of a mapping whose values hold values; tensors and numpy's arrays do not."""
    pairs: list[object] | None = None
    if type(root) is Mapping:
        pairs = root.flat
    elif type(root) is Call and not is_tensor(root) and not is_numpy(root):
        pairs = [*(ordered_pairs(root) or ()), *(root.flat or ())]
    return tuple(
        name
        for name, value in pairs_of("", pairs or [])
        if type(value) in CONTAINERS and not (type(value) is Call and _is_one_tensor(value))
    )


def _is_matrix(value: object) -> bool:
    """True for a matrix of floats, of torch or numpy."""
    if type(value) is not Call:
        return False
    if is_numpy(value):
        return _has_dimensions(shape_of_floats(value) or ())
    return is_tensor(value) and _has_dimensions(stated_sizes(value) or ()) and is_of_floats(value)


def _has_dimensions(shape: tuple[object, ...]) -> bool:
    """True for two or more dimensions, of more than one element."""
    return len(shape) > 1 and any(size != 1 for size in shape)


def _is_one_tensor(call: Call) -> bool:
    return is_tensor(call) or is_numpy(call) or as_composite(call) is not None or call.calls(*_WITHOUT_NUMBERS)


def _is_flat(value: object) -> bool:
    """True for a series or mapping of values that hold nothing further."""
    if type(value) is Mapping:
        return not any(type(v) in CONTAINERS for v in value.flat)
    items = value.items if type(value) is Sequence or type(value) is SetOf else value
    return isinstance(items, list | tuple) and not any(type(i) in CONTAINERS for i in items)


def _is_packed(call: Call) -> bool:
    """True if it would make floats from bytes in its own way."""
    args, func = call.args if type(call.args) is tuple else (), call.func
    if type(func) is not Global or func.row is not None or func.module == "datetime":
        return False
    if func.dotted == "array._array_reconstructor" and len(args) > 1:
        return args[1] in ("f", "d")
    return any(
        (type(a) in (bytes, LongBytes) and len(a) >= _SHORTEST) or (type(a) is Call and a.calls("_codecs.encode"))
        for a in args
    )


def _takes_storage(call: Call) -> bool:
    """True if it is unknown what it would make of a storage."""
    return type(call.args) is tuple and any(type(part) is PersistentId for part in call.args)

"""Walking what a pickle holds: named tensors, and the numbers beside them.

Names are dotted paths of keys. The walk has no recursion; it is safe from cycles and from values that share parts
so often that they would unfold without end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ckptguard.formats.pickle.inert_values import Call, Global, Mapping, PersistentId, Sequence, SetOf
from ckptguard.formats.pickle.numpy_values import hides_floats, is_numpy, numpy_content, raw_bytes
from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Leaf, Problem
from ckptguard.formats.suffixes import may_begin_file
from ckptguard.formats.torch.rebuild_calls import (
    Described,
    as_composite,
    is_tensor,
    is_untyped,
    packed_storage,
    quantiser,
    tensor_attributes,
)

MAX_DEPTH = 200
MAX_NODES = 3_000_000
MAX_LEAVES = 20_000
MAX_TENSORS = 1_000_000
MAX_UNREAD = 100
_MAX_FINITE_LEAVES = 10_000  # the rest of the room is for those that are not finite
_MAX_ALIKE = 1000  # not finite, of one kind, in one subtree, under one key: more of them say nothing new
_LONG_SERIES = 64  # a longer list of plain numbers is data, of which only what is not finite matters
_MAX_VISITS = 8
_MAX_FLAT_VISITS = 1000  # of what holds nothing that could unfold further
_HEAD = 16  # bytes of a file, which tell what it is
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_WITHOUT_NUMBERS = (
    "torch.Size",
    "torch.device",
    "torch.Generator",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed._tensor.placement_types.DTensorSpec",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._tensor.device_mesh.DeviceMesh",
)
_ELEMENTS = "_local_tensor"  # where a distributed tensor keeps its elements


class FileValue(NamedTuple):
    """Bytes that may be a file, as the value that stands for them. `dtype`: of what its one storage holds, where only
    its tensor states that."""

    name: str
    value: object
    dtype: str = ""


class TreeContents(NamedTuple):
    """What a tree holds: tensors as what rebuilds them, in the order of the file. `containers` and `unread` are those
    of a Structure; `visited` is how many values were looked at. `files` are bytes that may be files of their own."""

    tensors: list[tuple[str, Described]]
    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    containers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    visited: int = 0
    files: tuple[FileValue, ...] = ()


def walk(root: object, room: int = MAX_NODES) -> TreeContents:
    """Everything that a pickle's value holds, by name. A value that stands alone is called "value"."""
    return _Walk().run(root, room)


def below(name: str, inner: str) -> str:
    """The full name of what is called `inner` within the value of this name."""
    return name if inner == "value" else f"{name}.{inner}"


_Entered = tuple[object, Iterator[tuple[str, object]], int]


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[tuple[str, Described]] = []
        self.leaves: list[Leaf] = []
        self.problems: dict[str, Problem] = {}
        self.alike: dict[tuple[str, str, bool, bool], int] = {}
        self.visits: dict[int, int] = {}
        self.plain: set[int] = set()  # what was looked into and holds nothing that matters under another name, too
        self.met = 0  # how many things that do
        self.unread: dict[str, None] = {}
        self.files: dict[int, FileValue] = {}

    def run(self, root: object, most: int) -> TreeContents:
        # Containers, each with its children that are still to be looked at, and what was met before it; the innermost
        # is the last.
        waiting: list[_Entered] = [(None, iter((("", root),)), 0)]
        room = most
        while waiting and room and len(self.tensors) <= MAX_TENSORS:
            name, value = next(waiting[-1][1], _END)
            kind = type(value)
            if value is _END[1]:
                container, _, met = waiting.pop()
                if met == self.met:
                    self.plain.add(id(container))
                continue
            room -= 1
            if kind is float or kind is int or kind is bool:
                self.number(name, value)  # type: ignore[arg-type]
            elif (kind is Call or kind is PersistentId) and is_tensor(value):  # type: ignore[arg-type]
                attributes = self.tensor(name or "value", value)  # type: ignore[arg-type]
                if attributes and self.enter(name, value, waiting):
                    waiting.append((value, iter(attributes), self.met))
            elif kind is bytes:
                self.file(name, value, raw_bytes(value))
            elif kind in _CONTAINERS and self.enter(name, value, waiting):
                waiting.append((value, self.children(name, value), self.met))
        if waiting:
            self.problem("it holds more values than we would read")
        leaves, problems = tuple(self.leaves), tuple(self.problems.values())
        unread, files = tuple(self.unread), tuple(self.files.values())
        return TreeContents(self.tensors, leaves, problems, _containers(root), unread, most - room, files)

    def tensor(self, name: str, value: Described) -> list[tuple[str, object]]:
        """Note a tensor; what is set on it besides its elements."""
        self.met += 1
        packed = packed_storage(value)
        if packed is not None:
            self.file(name, packed[0], raw_bytes(packed[0]), packed[1])
        else:
            self.tensors.append((name, value))
        if is_untyped(value):
            self.not_read(name)
        if type(value) is not Call:
            return []
        parts = [pair for state in tensor_attributes(value) for pair in _of_state(name, f"{name}.", state)]
        # What a quantised tensor's integers are multiplied with: numbers here, or tensors.
        for part, of_all in zip(("scale", "zero_point"), quantiser(value) or (), strict=False):
            if type(of_all) is float and not math.isfinite(of_all):
                self.number(f"{name}.{part}", of_all, of_array=True)
            elif type(of_all) in _CONTAINERS:
                parts.append((f"{name}.{part}s", of_all))
        return parts

    def enter(self, name: str, value: object, waiting: list[_Entered]) -> bool:
        """Whether to look into a container: not into itself, not for ever deeper, not again and again."""
        visits = self.visits[id(value)] = self.visits.get(id(value), 0) + 1
        if visits > _MAX_VISITS and (visits > _MAX_FLAT_VISITS or not _is_flat(value)):
            if id(value) not in self.plain:  # else it is a part that many share, such as a module's activation
                self.not_read(name)
            return False
        if len(waiting) > MAX_DEPTH:
            self.problem(f"it is nested deeper than {MAX_DEPTH} levels")
            return False
        if visits == 1 or all(value is not above for above, *_ in waiting):
            return True
        self.met += 1  # whoever refers to what is around it holds all of that
        return False

    def children(self, name: str, value: object) -> Iterator[tuple[str, object]]:
        prefix = f"{name}." if name else ""
        if type(value) is Mapping:
            yield from _pairs(prefix, value.flat)
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
            content = numpy_content(call)
            for number in content.numbers:
                self.number(name, number, of_array=content.of_array)
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
                yield from _of_state(name, prefix, state)
            return
        raw = raw_bytes(call)
        if raw is not None:
            self.file(name, call, raw)
            return
        if call.calls(*_WITHOUT_NUMBERS):
            return
        if hides_floats(call.args) or hides_floats(call.state) or _is_packed(call) or _takes_storage(call):
            self.not_read(name)
        pairs = _ordered_pairs(call)
        if pairs is not None:
            yield from _pairs(prefix, pairs)
        elif type(call.args) is tuple:
            yield from self.series(prefix, call.args)
        if call.kwargs is not None:
            yield prefix + "kwargs", call.kwargs
        if call.flat is not None:
            yield from _pairs(prefix, call.flat)
        if call.items is not None:
            yield from self.series(prefix, call.items)
        states = call.state if type(call.state) is tuple else (call.state,)
        for state in states:
            if type(state) is not Mapping:
                yield prefix + "state", state
            elif not call.calls("collections.OrderedDict"):  # there it is only a state dict's own version numbers
                yield from _attributes(name, prefix, state)

    def series(self, prefix: str, items: list[object] | tuple[object, ...]) -> Iterator[tuple[str, object]]:
        """Children by index; of a long list of plain values only what is not finite."""
        if len(items) > _LONG_SERIES and _HOLDERS.isdisjoint(map(type, items)):
            for index, item in enumerate(items):
                if type(item) is float and not math.isfinite(item):
                    yield f"{prefix}{index}", item
            return
        for index, item in enumerate(items):
            if type(item) not in _SILENT:
                yield f"{prefix}{index}", item

    def number(self, name: str, value: float | int, *, of_array: bool = False) -> None:
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
                self.problem("more numbers that are not finite than we would list")
        elif known < _MAX_ALIKE:
            self.alike[kind] = known + 1
            self.leaves.append(Leaf(name or "value", value, of_array))

    def file(self, name: str, value: object, raw: bytes | None, dtype: str = "") -> None:
        if raw is not None and may_begin_file(raw[:_HEAD]):
            self.met += 1
            self.files.setdefault(id(value), FileValue(name or "value", value, dtype))

    def not_read(self, name: str) -> None:
        self.met += 1
        if len(self.unread) < MAX_UNREAD:
            self.unread[name or "value"] = None

    def problem(self, message: str) -> None:
        self.met += 1
        self.problems.setdefault(message, Problem(message))


_CONTAINERS = frozenset((Mapping, Sequence, SetOf, Call, tuple))
_HOLDERS = _CONTAINERS | {PersistentId, bytes}
_SILENT = frozenset((str, type(None), Global))
_END: tuple[str, object] = ("", object())


def _containers(root: object) -> tuple[str, ...]:
    """The keys of a mapping whose values hold values of their own; tensors and numpy's arrays do not."""
    pairs: list[object] | None = None
    if type(root) is Mapping:
        pairs = root.flat
    elif type(root) is Call and not is_tensor(root) and not is_numpy(root):
        pairs = [*(_ordered_pairs(root) or ()), *(root.flat or ())]
    return tuple(
        name
        for name, value in _pairs("", pairs or [])
        if type(value) in _CONTAINERS and not (type(value) is Call and _is_one_tensor(value))
    )


def _is_one_tensor(call: Call) -> bool:
    return is_tensor(call) or is_numpy(call) or as_composite(call) is not None or call.calls(*_WITHOUT_NUMBERS)


def _is_flat(value: object) -> bool:
    """A series or mapping of values that hold nothing further."""
    if type(value) is Mapping:
        return not any(type(v) in _CONTAINERS for v in value.flat)
    items = value.items if type(value) is Sequence or type(value) is SetOf else value
    return isinstance(items, list | tuple) and not any(type(i) in _CONTAINERS for i in items)


def _is_packed(call: Call) -> bool:
    """Whether it would make floats out of bytes in a way of its own."""
    args = call.args if type(call.args) is tuple else ()
    return call.calls("array._array_reconstructor") and len(args) > 1 and args[1] in ("f", "d")


def _takes_storage(call: Call) -> bool:
    """Whether nobody knows what it would make of a storage."""
    return type(call.args) is tuple and any(type(part) is PersistentId for part in call.args)


def _pairs(prefix: str, pairs: list[object]) -> Iterator[tuple[str, object]]:
    flat = iter(pairs)
    for index, (key, value) in enumerate(zip(flat, flat, strict=False)):
        if type(key) is str and len(key) <= 500 and key.isascii():
            yield prefix + key, value
        else:
            yield prefix + _key_text(key, index), value
            if type(key) in _HOLDERS or (type(key) is float and not math.isfinite(key)):
                yield f"{prefix}key{index}", key


def _of_state(name: str, prefix: str, state: object) -> Iterator[tuple[str, object]]:
    """What is set on a tensor: attributes by name, and the elements of a distributed one under its own."""
    for part in state if type(state) is tuple else (state,):
        if type(part) is not Mapping:
            yield prefix + "state", part
            continue
        for key, value in _pairs(prefix, part.flat):
            if type(value) is not bool:  # a mark, such as of a parameter
                yield (name if key == prefix + _ELEMENTS else key), value


def _attributes(name: str, prefix: str, state: Mapping) -> Iterator[tuple[str, object]]:
    """An object's attributes; a torch module's own tables are left out of the names of what they hold."""
    flat = iter(state.flat)
    for index, (key, value) in enumerate(zip(flat, flat, strict=False)):
        yield (name if key in _MODULE_PARTS else prefix + _key_text(key, index)), value


def _key_text(key: object, index: int) -> str:
    if isinstance(key, str):
        return printable(key, 500) if len(key) <= 500 else f"{printable(key, 200)}#{index}"
    if key is None or isinstance(key, float) or (isinstance(key, int) and key.bit_length() <= 64):
        return str(key)
    if isinstance(key, bytes):
        return printable(repr(key[:100]))
    if isinstance(key, Global):
        return printable(key.dotted)
    if isinstance(key, tuple) and len(key) <= 8 and not any(type(k) in _CONTAINERS for k in key):
        return f"({', '.join(_key_text(k, index) for k in key)})"
    return f"?{index}"


def _ordered_pairs(call: Call) -> list[object] | None:
    """Keys and values of ``OrderedDict([[key, value], ...])``, the way that Python 2 wrote it."""
    args = call.args
    if not call.calls("collections.OrderedDict", "builtins.dict") or type(args) is not tuple or len(args) != 1:
        return None
    if type(args[0]) is not Sequence:
        return None
    flat: list[object] = []
    for pair in args[0].items:
        parts = pair.items if type(pair) is Sequence else pair
        if not isinstance(parts, list | tuple) or len(parts) != 2:
            return None
        flat += parts
    return flat

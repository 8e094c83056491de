"""The pickle opcodes that make containers and fill them, and those of the memo.

Each is executed only if Python would do it, too. On anything else loading fails, or its effect is in doubt.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptguard.formats.pickle.arguments import look_at_keys
from ckptguard.formats.pickle.constants import UINT32, Constants, PickleProblem, parse_int
from ckptguard.formats.pickle.inert_values import Call, Kind, Mapping, PersistentId, Sequence, SetOf
from ckptguard.formats.pickle.long_values import PickleStream

_MAX_DOUBTS = 100
_MAX_LOOKED_AT = 1 << 23  # parts of keys and of arguments, counted as often as they are used
_FAR = 1 << 24  # a number in the memo that no pickler reaches by counting
_MADE = frozenset((Call, Mapping, PersistentId, Sequence, SetOf, tuple))
_TAKE_ITEMS = (Kind.OBJECT, Kind.MAPPING, Kind.TENSOR, Kind.ARRAY, Kind.HOOKS)


class Containers(Constants):
    """Marks and memo. `Constants` explains how opcodes are methods."""

    __slots__ = ("doubts", "dropped", "far", "marks", "memo", "room")

    def __init__(self, stream: PickleStream) -> None:
        super().__init__(stream)
        self.doubts: dict[str, None] = {}
        self.dropped: list[object] = []
        self.marks: list[list[object]] = []
        # Every pickler counts its values. A dict of all of them would need four times the memory of a list.
        self.memo: list[object] = []
        self.far: dict[int, object] = {}  # what was kept further than at the end of the list
        self.room = _MAX_LOOKED_AT

    def doubt(self, why: str | None) -> None:
        if why is not None and len(self.doubts) < _MAX_DOUBTS:
            self.doubts[why] = None

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def pop_pairs(self) -> list[object]:
        items = self.pop_mark()
        if len(items) % 2:
            raise PickleProblem("a dict has a key without a value")
        return items

    def check_keys(self, keys: Iterable[object]) -> None:
        left = look_at_keys(keys, self.room) if self.room >= 0 else self.room
        if left is None:
            raise PickleProblem("a key of a dict, or an element of a set, has a type that cannot be one")
        self.take_room(self.room - left)

    def take_room(self, size: int) -> bool:
        self.room -= size
        if self.room < 0:
            self.doubt("it refers to the same values so often that loading it may take forever")
        return self.room >= 0

    def mark(self, p: int) -> int:
        self.marks.append(self.stack)
        self.stack = []
        return p

    def tuple1(self, p: int) -> int:
        self.stack[-1] = (self.stack[-1],)
        return p

    def tuple2(self, p: int) -> int:
        last = self.stack.pop()
        self.stack[-1] = (self.stack[-1], last)
        return p

    def tuple3(self, p: int) -> int:
        last, middle = self.stack.pop(), self.stack.pop()
        self.stack[-1] = (self.stack[-1], middle, last)
        return p

    def tuple_of_mark(self, p: int) -> int:
        items = self.pop_mark()
        self.stack.append(tuple(items))
        return p

    def list_of_mark(self, p: int) -> int:
        items = self.pop_mark()
        self.stack.append(Sequence(items))
        return p

    def dict_of_mark(self, p: int) -> int:
        items = self.pop_pairs()
        self.check_keys(items[::2])
        self.stack.append(Mapping(items))
        return p

    def frozen_set(self, p: int) -> int:
        items = self.pop_mark()
        self.check_keys(items)
        self.stack.append(SetOf(items, frozen=True))
        return p

    def append(self, p: int) -> int:
        self.extend([self.stack.pop()])
        return p

    def appends(self, p: int) -> int:
        self.extend(self.pop_mark())
        return p

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is Sequence:
            target.items += values
        elif type(target) is Call and target.kind in (Kind.OBJECT, Kind.LIST):
            self.put_in(target, values)
        else:
            raise PickleProblem("something is appended to a value that is not a list")

    def put_in(self, target: Call, values: list[object]) -> None:
        if target.items is None:
            target.items = values
        else:
            target.items += values

    def add_items(self, p: int) -> int:
        values, target = self.pop_mark(), self.stack[-1]
        if type(target) is SetOf and not target.frozen:
            self.check_keys(values)
            target.items += values
        elif type(target) is Call and target.kind in (Kind.OBJECT, Kind.SET):
            if target.kind is Kind.SET:
                self.check_keys(values)
            self.put_in(target, values)
        else:
            raise PickleProblem("something is added to a value that is not a set")
        return p

    def set_item(self, p: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self.put([key, value])
        return p

    def set_items(self, p: int) -> int:
        self.put(self.pop_pairs())
        return p

    def put(self, flat: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is Mapping:
            self.check_keys(flat[::2])
            target.flat += flat
        elif type(target) is Call and target.kind in _TAKE_ITEMS:
            if target.kind is Kind.MAPPING:
                self.check_keys(flat[::2])
            elif target.kind is not Kind.OBJECT:
                self.doubt(f"it sets elements of {target.kind.value}")
            if target.flat is None:
                target.flat = flat
            else:
                target.flat += flat
        elif type(target) is Sequence and all(type(key) is int for key in flat[::2]):
            self.doubt("it sets elements of a list")
            target.items += flat
        else:
            raise PickleProblem("something is set in a value that is not a dict")

    def pop(self, p: int) -> int:
        if self.stack:
            self.drop(self.stack.pop())
        else:
            self.pop_mark()
        return p

    def drop_mark(self, p: int) -> int:
        for value in self.pop_mark():
            self.drop(value)
        return p

    def drop(self, value: object) -> None:
        if type(value) in _MADE:
            self.dropped.append(value)

    def duplicate(self, p: int) -> int:
        self.doubt("it uses an opcode that nothing writes (DUP)")
        self.stack.append(self.stack[-1])
        return p

    # -- memo

    def binput(self, p: int) -> int:
        self.remember(self.data[p])
        return p + 1

    def long_binput(self, p: int) -> int:
        self.remember(UINT32(self.data, p)[0])
        return p + 4

    def memoize(self, p: int) -> int:
        self.remember(len(self.memo) + len(self.far))
        return p

    def text_put(self, p: int) -> int:
        text, p = self.line(p)
        self.remember(_memo_index(text))
        return p

    def remember(self, index: int) -> None:
        value, end = self.stack[-1], len(self.memo)
        if index > end:
            self.far[index] = value
            if index >= _FAR:
                self.doubt("it numbers its values so high that loading it may take gigabytes")  # C keeps an array
        elif index < end:
            self.memo[index] = value
        else:
            self.memo.append(value)
            if self.far:
                self.far.pop(index, None)

    def binget(self, p: int) -> int:
        return self.recall(self.data[p], p + 1)

    def long_binget(self, p: int) -> int:
        return self.recall(UINT32(self.data, p)[0], p + 4)

    def text_get(self, p: int) -> int:
        text, p = self.line(p)
        return self.recall(_memo_index(text), p)

    def recall(self, index: int, p: int) -> int:
        if index < len(self.memo):
            self.stack.append(self.memo[index])
        elif index in self.far:
            self.stack.append(self.far[index])
        else:
            raise never_set(index)
        return p


def never_set(index: int) -> PickleProblem:
    """Return the problem that a pickle fetches what it did not keep."""
    return PickleProblem(f"memo {index} was never set")


def _memo_index(text: bytes) -> int:
    index = parse_int(text)
    if not 0 <= index < 2**32:
        raise PickleProblem(f"memo index {index} is impossible")
    return index

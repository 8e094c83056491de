"""Write a pickle anew without some entries of its dicts. Nothing in it is called, looked up or even made.

Only the opcodes are followed, to see where each value begins and ends. What stays is copied, opcode by opcode. A value
that stays may refer back to one inside what goes: then that one is copied to where it is first needed. The numbers of
the memo stay, so frames and implicit numbers become explicit ones, which each reader knows.
"""

from __future__ import annotations

import contextlib
import pickletools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptguard.formats.structure import ReadProblem

MOST = 64 << 20
_DEEPEST = 50
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_REFUSED = ("POP", "POP_MARK", "DUP", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_TEXTS = {"SHORT_BINUNICODE": 2, "BINUNICODE": 5, "BINUNICODE8": 9, "SHORT_BINSTRING": 2, "BINSTRING": 5}
_COUNTS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_COUNTS |= {pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}


class _Opcode(NamedTuple):
    """What follows (`lines`, a fixed `size`, or as much as `counted` bytes say), and what it does to the stack."""

    name: str
    lines: int
    size: int
    counted: int
    of_mark: bool
    pops: int
    pushes: int


def _opcode(op: pickletools.OpcodeInfo) -> _Opcode:
    n, kind = (op.arg.n, op.arg.name) if op.arg is not None else (0, "")
    lines = 0 if n != pickletools.UP_TO_NEWLINE else 2 if kind == "stringnl_noescape_pair" else 1
    before = op.stack_before
    of_mark = pickletools.markobject in before
    pops = before.index(pickletools.markobject) if of_mark else len(before)
    return _Opcode(op.name, lines, max(n, 0), _COUNTS.get(n, 0), of_mark, pops, len(op.stack_after))


_OPCODES = {ord(op.code): _opcode(op) for op in pickletools.opcodes}


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Refuse what no pickler writes: opcodes, numbers and lengths that lead nowhere."""
    try:
        yield
    except ReadProblem:
        raise
    except (IndexError, KeyError, ValueError) as error:
        raise ReadProblem("its pickle is damaged") from error


class CutEntry(NamedTuple):
    """One entry of a dict: where its key and its value begin, where that ends, and where the next thing begins."""

    key: int
    value: int
    end: int
    next: int


class CutPickle:
    """A pickle whose entries can be looked at and cut. Raises ReadProblem for anything that no usual pickler writes."""

    def __init__(self, data: bytes) -> None:
        if len(data) > MOST:
            raise ReadProblem(f"its pickle has {len(data)} bytes", too_large=True)
        self._data = data
        self._terms: dict[int, tuple[int, int]] = {}  # by their number in the memo
        self._numbers: dict[int, int] = {}  # of the opcodes that state none
        self._kept = 0
        self._top = self._run(0, len(data), note=True)

    def entries(self, place: CutEntry | None = None) -> list[CutEntry]:
        """Return the entries of the dict that the pickle is, or that a value is; of an object its attributes."""
        return self._top if place is None else self._run(place.value, place.end)

    def text(self, begin: int) -> str | None:
        """Return the text that begins at a place, None for any other value."""
        name, position = self._name(begin), begin
        if name in _GETS:
            with _refusing():
                position = self._terms[self._number(begin)][0]
            name = self._name(position)
        if name not in _TEXTS:
            return None
        try:
            return self._data[position + _TEXTS[name] : self._after(position)].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:  # Python 2 wrote it
            return None

    def first_text(self, begin: int) -> str | None:
        """Return the text that is first in a tuple that begins at a place, None for any other value."""
        return self.text(begin + 1 if self._name(begin) == "MARK" else begin)

    def integer(self, begin: int) -> int:
        """Return the whole number, not below 0, that begins at a place. Raises ReadProblem for any other value."""
        name, argument = self._name(begin), self._data[begin + 1 : self._after(begin)]
        if name == "LONG1":
            argument = argument[1:]
        elif name not in ("BININT", "BININT1", "BININT2"):
            raise ReadProblem(f"its pickle has no whole number at byte {begin}")
        found = int.from_bytes(argument, "little", signed=name in ("LONG1", "BININT"))
        if found < 0:
            raise ReadProblem(f"its pickle has a negative number at byte {begin}")
        return found

    def edited(self, edits: Mapping[int, tuple[int, bytes]]) -> bytes:
        """Return the pickle with other bytes from each of these places to its end."""
        copy = _Copy(edits)
        with _refusing():
            self._copy(0, len(self._data), copy, 0)
        return bytes(copy.out)

    def _name(self, position: int) -> str:
        return _OPCODES[self._data[position]].name

    def _after(self, position: int) -> int:
        """Return where the next opcode is."""
        op, at = _OPCODES.get(self._data[position]), position + 1
        if op is None or op.name in _REFUSED:
            raise ReadProblem(f"its pickle has an opcode that no usual writer uses, at byte {position}")
        for _ in range(op.lines):
            at = self._data.index(b"\n", at) + 1
        return at + op.size + op.counted + int.from_bytes(self._data[at : at + op.counted], "little")

    def _number(self, position: int) -> int:
        """Return the number in the memo that an opcode puts or gets."""
        argument, name = self._data[position + 1 : self._after(position)], self._name(position)
        if name == "MEMOIZE":
            return self._numbers[position]
        return int(argument) if name in ("PUT", "GET") else int.from_bytes(argument, "little")

    def _run(self, begin: int, end: int, *, note: bool = False) -> list[CutEntry]:
        """Follow the opcodes of one value. Returns the entries that its dict is filled with, or else the dict of its
        attributes. `note`: fill the memo, too."""
        with _refusing():
            return self._follow(begin, end, note)

    def _follow(self, begin: int, end: int, note: bool) -> list[CutEntry]:
        position, stack, marks = begin, list[int](), list[tuple[int, int]]()  # of values: 2 * where, + 1 if recalled
        waiting: dict[int, list[int]] = {}  # numbers in the memo of values on the stack, by where these begin
        found: tuple[list[CutEntry], list[CutEntry]] = ([], [])
        while position < end:
            op, after = _OPCODES[self._data[position]], self._after(position)
            if op.name in _PUTS:
                if note:
                    if op.name == "MEMOIZE":
                        self._numbers[position] = self._kept
                    self._kept += 1
                    waiting.setdefault(stack[-1] >> 1, []).append(self._number(position))
                position = after
                continue
            if op.name == "MARK":
                marks.append((len(stack), position))
                position = after
                continue
            fills = op.name in _FILLS  # what is filled stays where it is
            size, start = marks.pop() if op.of_mark else (len(stack) - op.pops + fills, position)
            taken = [one >> 1 for one in stack[size:]]
            del stack[size:]
            if fills and stack[-1] & 1:
                raise ReadProblem(f"its pickle changes a value after it was finished, at byte {position}")
            start = taken[0] if taken and not op.of_mark else start
            ends = [*taken[1:], position] if taken else []
            if note:
                for one, its_end in zip(taken, ends, strict=True):
                    for number in waiting.pop(one, ()):
                        if number in self._terms:
                            raise ReadProblem("its pickle numbers two values alike")
                        self._terms[number] = one, its_end
            if op.name in ("SETITEM", "SETITEMS") and not marks and len(stack) <= 2:
                last = after if op.name == "SETITEM" else position
                places = zip(taken[::2], taken[1::2], ends[1::2], [*taken[2::2], last], strict=True)
                found[len(stack) - 1].extend(CutEntry(*place) for place in places)
            if op.pushes and not fills:
                stack.append(2 * start + (op.name in _GETS))
            position = after
        if note and (self._data[-1:] != b"." or stack or marks):
            raise ReadProblem("its pickle ends early")
        return found[0] or found[1]

    def _copy(self, begin: int, end: int, copy: _Copy, depth: int) -> None:
        """Append the opcodes of a range. What they recall, and was left out, comes where it is first recalled."""
        if depth > _DEEPEST:
            raise ReadProblem("what stays refers to what goes in a circle")
        position = begin
        while position < end:
            again = copy.last.get(position) if depth else None
            if not depth and position in copy.edits:
                position, new = copy.edits[position]
                copy.out += new
                continue
            if again is not None:  # it was copied before
                copy.out += _with_number(b"hj", again)
                position = self._terms[again][1]
                continue
            name, after = self._name(position), self._after(position)
            number = self._number(position) if name in _PUTS or name in _GETS else -1
            if name in _PUTS:
                if number in copy.put:
                    raise ReadProblem("what stays refers to what goes in a circle")
                copy.put.add(number)
                if depth:
                    copy.last[self._terms[number][0]] = number
                copy.out += _with_number(b"qr", number)
            elif number >= 0 and number not in copy.put:
                self._copy(*self._terms[number], copy, depth + 1)
            elif name != "FRAME":
                copy.out += self._data[position:after]
            position = after


class _Copy:
    """What was copied so far, and what of the memo is `put` in it; of what was recalled the `last` number by where its
    value begins."""

    def __init__(self, edits: Mapping[int, tuple[int, bytes]]) -> None:
        self.edits, self.put, self.last, self.out = edits, set[int](), dict[int, int](), bytearray()


def _with_number(codes: bytes, number: int) -> bytes:
    """Return an opcode of the memo: the first code with a number of one byte, else the second."""
    return bytes((codes[0], number)) if number < 256 else codes[1:] + number.to_bytes(4, "little")

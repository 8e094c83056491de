"""The pickle opcodes that push one value without using earlier ones: numbers, texts, bytes, empty containers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckptguard.formats.pickle.inert_values import Call, Global, Kind, Mapping, PersistentId, Sequence, SetOf
from ckptguard.formats.pickle.long_values import LONG, LongBytes, LongText, PickleStream
from ckptguard.formats.structure import ReadProblem

MAX_LONG_BYTES = 4096
MAX_LINE = 16_384
MAX_WIDE_TEXT = 128 << 20
_SHORT_TEXT = 64
UINT32 = struct.Struct("<I").unpack_from
UINT64 = struct.Struct("<Q").unpack_from


class PickleProblem(ReadProblem):
    """The stream is not a pickle that ckptguard reads. `globals` are the names mentioned before the problem.

    Damage must not hide dangerous names.
    """

    globals: frozenset[str] = frozenset()


Opcode = Callable[["Constants", int], int]


def _constant(value: object) -> Opcode:
    """Return an opcode that always pushes the same value."""

    def step(self: Constants, p: int) -> int:
        self.stack.append(value)
        return p

    return step


def _empty(kind: type[Sequence | Mapping | SetOf]) -> Opcode:
    def step(self: Constants, p: int) -> int:
        self.stack.append(kind([]))
        return p

    return step


def _number(form: str) -> Opcode:
    unpack, size = struct.Struct(form).unpack_from, struct.calcsize(form)

    def step(self: Constants, p: int) -> int:
        self.stack.append(unpack(self.data, p)[0])
        return p + size

    return step


def _sized(width: int, value_of: Callable[[Any], object] = lambda raw: raw) -> Opcode:
    """Return an opcode that pushes the value of a byte string, whose length comes first in `width` bytes."""

    def step(self: Constants, p: int) -> int:
        length = int.from_bytes(self.take(p, width), "little")
        if length >= LONG:
            kept = LongBytes(self.stream, self.begin_of_long(p + width, length), length)
            self.stack.append(value_of(kept))
            return p + width + length
        self.stack.append(value_of(self.take(p + width, length)))
        return p + width + length

    return step


def _line_of(value_of: Callable[[bytes], object], what: str = "an integer") -> Opcode:
    """Return an opcode that pushes the value of the text up to the end of the line."""

    def step(self: Constants, p: int) -> int:
        text, p = self.line(p)
        try:
            self.stack.append(value_of(text))
        except PickleProblem:
            raise
        except ValueError as error:
            raise PickleProblem(f"{what} cannot be read") from error
        return p

    return step


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _latin1(raw: bytes | LongBytes) -> str | LongText:
    return raw.as_latin1() if isinstance(raw, LongBytes) else raw.decode("latin-1")


def _bytearray(raw: bytes | LongBytes) -> Call:
    """Return a bytearray in the form of every other protocol."""
    return Call(Global("builtins", "bytearray"), (raw,), kind=Kind.BYTES)


def parse_int(text: bytes) -> int:
    """Parse a decimal integer of limited length."""
    if len(text) > 1000:
        raise PickleProblem("an integer is too long")
    if text.strip().lstrip(b"+-")[:1] == b"0" and text.strip(b"+-0 "):
        raise PickleProblem("an integer begins with a zero")  # some readers would take it as octal
    try:
        return int(text)
    except ValueError as error:
        raise PickleProblem("an integer cannot be read") from error


def _flag_or_int(text: bytes) -> int:
    return text == b"01" if text in (b"00", b"01") else parse_int(text)


def _float(text: bytes) -> float:
    if b"_" in text or text != text.strip():
        raise PickleProblem("a float cannot be read")
    return float(text)


def _long(text: bytes) -> int:
    return parse_int(text.removesuffix(b"L"))


def _string(text: bytes) -> str:
    text = text.strip()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b'"', b"'"):
        raise PickleProblem("a string is not quoted")
    return text[1:-1].decode("latin-1")  # escapes stay as they are: such strings name nothing that matters here


class Constants:
    """The stack and the stream. Each opcode is a method that gets the position after its byte and returns the next."""

    __slots__ = ("data", "kept_out", "protocol", "stack", "stream", "wide")

    def __init__(self, stream: PickleStream) -> None:
        self.stream = stream
        self.data = stream.data  # positions are those in this window
        self.stack: list[object] = []
        self.protocol = 0
        self.wide = 0
        self.kept_out = 0  # bytes of this window that stayed in the file

    none, true, false, empty_tuple = _constant(None), _constant(True), _constant(False), _constant(())
    empty_list, empty_dict, empty_set = _empty(Sequence), _empty(Mapping), _empty(SetOf)
    binint, binint2, binfloat = _number("<i"), _number("<H"), _number(">d")
    text_int, text_long, text_float = _line_of(_flag_or_int), _line_of(_long), _line_of(_float, "a float")
    text_unicode = _line_of(lambda text: text.decode("raw-unicode-escape"), "a text")
    text_string, text_persistent = _line_of(_string), _line_of(lambda text: PersistentId(text.decode("latin-1")))
    short_bytes, bytes4, bytes8, bytearray8 = _sized(1), _sized(4), _sized(8), _sized(8, _bytearray)
    long1, short_string, string4 = _sized(1, _signed), _sized(1, _latin1), _sized(4, _latin1)

    def begin_of_long(self, p: int, length: int) -> int:
        """Return where a long value is in the file."""
        if self.stream.begin + p + length > self.stream.size:
            raise PickleProblem("the pickle ends early", ends_early=True)
        self.kept_out += length
        return self.stream.begin + p

    def take(self, p: int, length: int) -> bytes:
        chunk = self.data[p : p + length]
        if len(chunk) != length:
            raise PickleProblem("the pickle ends early", ends_early=True)
        return chunk

    def line(self, p: int) -> tuple[bytes, int]:
        end = self.data.find(b"\n", p, p + MAX_LINE)
        if end < 0:
            early = p + MAX_LINE > len(self.data)
            raise PickleProblem("the pickle ends early" if early else "a line is too long", ends_early=early)
        return self.data[p:end], end + 1

    def proto(self, p: int) -> int:
        if self.data[p] > 5:
            raise PickleProblem(f"pickle protocol {self.data[p]} is not known")
        self.protocol = self.data[p]
        return p + 1

    def frame(self, p: int) -> int:
        self.take(p, 8)  # the machine itself checks where it ends
        return p + 8

    def binint1(self, p: int) -> int:
        self.stack.append(self.data[p])
        return p + 1

    def long4(self, p: int) -> int:
        length = _signed(self.take(p, 4))
        if not 0 <= length <= MAX_LONG_BYTES:
            raise PickleProblem(f"an integer of {length} bytes is refused")
        self.stack.append(_signed(self.take(p + 4, length)))
        return p + 4 + length

    def short_unicode(self, p: int) -> int:
        return self.push_text(p + 1, p + 1 + self.data[p])

    def unicode(self, p: int) -> int:
        return self.push_text(p + 4, p + 4 + UINT32(self.data, p)[0])

    def unicode8(self, p: int) -> int:
        return self.push_text(p + 8, p + 8 + UINT64(self.data, p)[0])

    def push_text(self, start: int, end: int) -> int:
        if end - start >= LONG:
            begin = self.begin_of_long(start, end - start)
            try:
                self.stack.append(LongText(self.stream, begin, end - start))
            except UnicodeDecodeError as error:
                raise PickleProblem("a text is not UTF-8") from error
            return end
        raw = self.data[start:end]
        if end > len(self.data):
            raise PickleProblem("the pickle ends early", ends_early=True)
        try:
            self.stack.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            try:
                self.stack.append(raw.decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError as error:
                raise PickleProblem("a text is not UTF-8") from error
        if end - start > _SHORT_TEXT and not raw.isascii():
            # One rare letter makes a text take several times its bytes in the file.
            self.wide += max(0, self.stack[-1].__sizeof__() - len(raw))
            if self.wide > MAX_WIDE_TEXT:
                raise PickleProblem("longer texts than ckptguard reads", too_large=True)
        return end

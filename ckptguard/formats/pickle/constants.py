"""The pickle opcodes that push one constant: numbers, texts, bytes."""

from __future__ import annotations

import struct

MAX_LONG_BYTES = 4096
MAX_LINE = 16_384
MAX_WIDE_TEXT = 128 << 20


class PickleProblem(ValueError):
    """The stream is no pickle that we would read; the message says why.

    `ends_early`: it stops in the middle. `globals` are the names that it mentions up to the trouble, because damage
    must not hide what is armed.
    """

    def __init__(self, message: str, *, ends_early: bool = False) -> None:
        super().__init__(message)
        self.ends_early = ends_early
        self.globals: frozenset[str] = frozenset()


class Constants:
    """The stack and the stream. Each opcode is a method that gets the position behind its byte and returns the next."""

    __slots__ = ("data", "stack", "wide")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[object] = []
        self.wide = 0

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
        return p + 1

    def frame(self, p: int) -> int:
        self.take(p, 8)  # the machine itself minds where it ends
        return p + 8

    def none(self, p: int) -> int:
        self.stack.append(None)
        return p

    def true(self, p: int) -> int:
        self.stack.append(True)
        return p

    def false(self, p: int) -> int:
        self.stack.append(False)
        return p

    def binint(self, p: int) -> int:
        self.stack.append(_INT32(self.data, p)[0])
        return p + 4

    def binint1(self, p: int) -> int:
        self.stack.append(self.data[p])
        return p + 1

    def binint2(self, p: int) -> int:
        self.stack.append(_UINT16(self.data, p)[0])
        return p + 2

    def binfloat(self, p: int) -> int:
        self.stack.append(_DOUBLE(self.data, p)[0])
        return p + 8

    def text_int(self, p: int) -> int:
        text, p = self.line(p)
        if text in (b"00", b"01"):
            self.stack.append(text == b"01")
        else:
            self.stack.append(parse_int(text))
        return p

    def text_long(self, p: int) -> int:
        text, p = self.line(p)
        self.stack.append(parse_int(text.removesuffix(b"L")))
        return p

    def text_float(self, p: int) -> int:
        text, p = self.line(p)
        try:
            self.stack.append(float(text))
        except ValueError as error:
            raise PickleProblem("a float cannot be read") from error
        return p

    def long1(self, p: int) -> int:
        length = self.data[p]
        self.stack.append(int.from_bytes(self.take(p + 1, length), "little", signed=True))
        return p + 1 + length

    def long4(self, p: int) -> int:
        length: int = _INT32(self.data, p)[0]
        if not 0 <= length <= MAX_LONG_BYTES:
            raise PickleProblem(f"an integer of {length} bytes is refused")
        self.stack.append(int.from_bytes(self.take(p + 4, length), "little", signed=True))
        return p + 4 + length

    def short_unicode(self, p: int) -> int:
        end = p + 1 + self.data[p]
        return self.push_text(p + 1, end)

    def unicode(self, p: int) -> int:
        return self.push_text(p + 4, p + 4 + UINT32(self.data, p)[0])

    def unicode8(self, p: int) -> int:
        return self.push_text(p + 8, p + 8 + UINT64(self.data, p)[0])

    def push_text(self, start: int, end: int) -> int:
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
            # One rare letter makes a text take several times the bytes that it has in the file.
            self.wide += max(0, self.stack[-1].__sizeof__() - len(raw))
            if self.wide > MAX_WIDE_TEXT:
                raise PickleProblem("its texts are more than we would read")
        return end

    def text_unicode(self, p: int) -> int:
        text, p = self.line(p)
        try:
            self.stack.append(text.decode("raw-unicode-escape"))
        except UnicodeDecodeError as error:
            raise PickleProblem("a text cannot be read") from error
        return p

    def text_string(self, p: int) -> int:
        text, p = self.line(p)
        text = text.strip()
        if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b'"', b"'"):
            raise PickleProblem("a string is not quoted")
        # Escapes are left as they are: such strings name nothing that we look at.
        self.stack.append(text[1:-1].decode("latin-1"))
        return p

    def short_bytes(self, p: int) -> int:
        length = self.data[p]
        self.stack.append(self.take(p + 1, length))
        return p + 1 + length

    def bytes4(self, p: int) -> int:
        length: int = UINT32(self.data, p)[0]
        self.stack.append(self.take(p + 4, length))
        return p + 4 + length

    def bytes8(self, p: int) -> int:
        length: int = UINT64(self.data, p)[0]
        self.stack.append(self.take(p + 8, length))
        return p + 8 + length

    def short_string(self, p: int) -> int:
        length = self.data[p]
        self.stack.append(self.take(p + 1, length).decode("latin-1"))
        return p + 1 + length

    def string4(self, p: int) -> int:
        length: int = UINT32(self.data, p)[0]
        self.stack.append(self.take(p + 4, length).decode("latin-1"))
        return p + 4 + length


def parse_int(text: bytes) -> int:
    """A decimal integer of bearable length."""
    if len(text) > 1000:
        raise PickleProblem("an integer is absurdly long")
    try:
        return int(text)
    except ValueError as error:
        raise PickleProblem("an integer cannot be read") from error


_SHORT_TEXT = 64
_INT32 = struct.Struct("<i").unpack_from
_UINT16 = struct.Struct("<H").unpack_from
UINT32 = struct.Struct("<I").unpack_from
UINT64 = struct.Struct("<Q").unpack_from
_DOUBLE = struct.Struct(">d").unpack_from

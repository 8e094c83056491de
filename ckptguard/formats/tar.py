"""Strict reading of tar archives: bounds, checksums of headers, names that stay inside. Nothing is unpacked."""

from __future__ import annotations

from typing import NamedTuple

from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Problem, ReadProblem, Source
from ckptguard.values.ids import is_safe_path

MAX_MEMBERS = 20_000
_BLOCK = 512
_MAGIC, _MAGIC_AT = b"ustar", 257
_LONGEST_NOTE = 1 << 20  # bytes of a long name or of extended headers
_LONGEST_END = 1 << 20  # zeros after the last member
_MOST_DIGITS = 20  # of a size in an extended header
_AHEAD = 1 << 16
_FILES, _FOLDER, _LINKS = b"\x000", b"5", b"12"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL = b"L", b"K", b"x", b"g"


class TarMember(NamedTuple):
    """One regular file in the archive."""

    name: str
    offset: int
    size: int


class TarContents(NamedTuple):
    """The files of an archive, in order, and the names of `others` that have no content in it or one that is not read:
    links, devices, sparse files."""

    members: tuple[TarMember, ...] = ()
    others: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    truncated: bool = False
    unlisted: bool = False  # there are more files than are read


def read_members(reader: Source) -> TarContents:
    """Return what the headers of an archive say. Everything wrong is in the problems."""
    walk = _Walk(reader)
    try:
        walk.run()
    except ReadProblem as error:
        walk.problems.append(Problem(str(error)))
        walk.truncated = error.ends_early
    return TarContents(tuple(walk.members), tuple(walk.others), tuple(walk.problems), walk.truncated, walk.unlisted)


class _Walk:
    """One way through the headers."""

    def __init__(self, reader: Source) -> None:
        self.members: list[TarMember] = []
        self.others: list[str] = []
        self.problems: list[Problem] = []
        self.truncated = self.unlisted = False
        self._reader, self._size = reader, reader.entry.size
        self._start, self._ahead = 0, b""
        self._seen: set[str] = set()

    def run(self) -> None:
        """Read all headers. Raises ReadProblem where they cannot be followed any further."""
        position, notes = 0, dict[str, str]()
        for _ in range(MAX_MEMBERS):
            header = self._read(position, _BLOCK)
            position += _BLOCK
            if not any(header):
                self._end(position)
                return
            kind, size = self._checked(header, position), _number(header[124:136])
            if size is None or size < 0:
                raise ReadProblem(f"the header at byte {position - _BLOCK} states no size")
            if kind in (_PAX, _PAX_OF_ALL, _LONG_NAME, _LONG_LINK):
                if size > _LONGEST_NOTE:
                    raise ReadProblem(f"the header at byte {position - _BLOCK} is too long")
                notes |= _notes(kind, self._read(position, size))
            else:
                size = self._member(kind, header, position, size, notes)
                notes = {}
            position += -(-size // _BLOCK) * _BLOCK
        self.unlisted = True

    def _read(self, offset: int, length: int) -> bytes:
        if offset + length > self._size:
            raise ReadProblem("the archive has no end: the file is not complete", ends_early=True)
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._ahead):
            # Small members follow each other.
            near = 0 <= begin <= len(self._ahead) + _AHEAD
            self._start, begin = offset, 0
            self._ahead = self._reader.read(offset, min(max(length, _AHEAD if near else 0), self._size - offset))
        return self._ahead[begin : begin + length]

    def _checked(self, header: bytes, position: int) -> bytes:
        """Return the kind of a member whose header is as it was written."""
        stated = _number(header[148:156])
        if stated != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
            raise ReadProblem(f"the checksum of the header at byte {position - _BLOCK} is wrong")
        if not header.startswith(_MAGIC, _MAGIC_AT):
            raise ReadProblem(f"the header at byte {position - _BLOCK} is not one that ckptguard reads")
        return header[156:157]

    def _member(self, kind: bytes, header: bytes, position: int, size: int, notes: dict[str, str]) -> int:
        """Take one member. Returns how many bytes follow its header."""
        prefix = b"" if header[262:264] == b"  " or not header[345:346].strip(b"\0") else _text(header[345:500]) + b"/"
        name = notes.get("path") or (prefix + _text(header[:100])).decode("utf-8", "replace")
        target = notes.get("linkpath") or _text(header[157:257]).decode("utf-8", "replace")
        digits = notes.get("size", "")
        if len(digits) > _MOST_DIGITS:
            raise ReadProblem("an extended header of the archive states an impossible size")
        size = int(digits) if digits.isdecimal() else size
        if kind in _LINKS or kind in b"346":
            size = 0
        inside, shown = name.rstrip("/").removeprefix("./"), printable(name)
        if inside not in ("", ".") and not is_safe_path(inside):
            self.problems.append(Problem(f"file {shown!r}: its name leads out of the archive"))
        elif kind in _LINKS and not is_safe_path(target.removeprefix("./")):
            self.problems.append(Problem(f"file {shown!r}: it is a link that leads out of the archive"))
        elif kind != _FOLDER and inside in self._seen:
            self.problems.append(Problem(f"file {shown!r} is there twice"))
        elif kind in _FILES and "sparse" not in notes:
            if position + size > self._size:
                self.members.append(TarMember(inside, position, self._size - position))
                raise ReadProblem(f"the file ends in the middle of {shown!r}", ends_early=True)
            self.members.append(TarMember(inside, position, size))
        elif kind != _FOLDER:
            self.others.append(inside)
        self._seen.add(inside)
        return size

    def _end(self, position: int) -> None:
        """Check that nothing but zeros follows."""
        left = self._size - position
        if left < _BLOCK:
            raise ReadProblem("the archive has no end: the file is not complete", ends_early=True)
        if left > _LONGEST_END or any(self._reader.read(position, left)):
            raise ReadProblem(f"{left} bytes follow the end of the archive")


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int | None:
    """Return a number of a header: octal digits, or base 256."""
    if field[0] & 0x80:
        return int.from_bytes(bytes((field[0] & 0x7F, *field[1:])), "big") if field[0] == 0x80 else None
    digits = _text(field).strip()
    return int(digits, 8) if digits and not digits.strip(b"01234567") else None


def _notes(kind: bytes, data: bytes) -> dict[str, str]:
    """Return what an extended header says about the next member: path, linkpath, size, and whether it is sparse."""
    if kind in (_LONG_NAME, _LONG_LINK):
        return {"path" if kind == _LONG_NAME else "linkpath": _text(data).decode("utf-8", "replace")}
    notes: dict[str, str] = {}
    while data:
        digits, _, _ = data[:20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not len(digits) + 2 < length <= len(data) or not equals:
            raise ReadProblem("an extended header of the archive is damaged")
        if key in (b"path", b"linkpath", b"size") and kind == _PAX:
            notes[key.decode()] = value.decode("utf-8", "replace")
        elif key.startswith(b"GNU.sparse"):
            notes["sparse"] = "yes"
        elif kind == _PAX_OF_ALL and key in (b"path", b"linkpath", b"size"):
            raise ReadProblem("an extended header states one name or size for all files")
        data = data[length:]
    return notes

"""The text of records: JSON that is checked when it is read, whatever became of it on storage."""

from __future__ import annotations

import re
import zlib
from typing import Any, TypeVar

import msgspec

from ckptguard.errors import RecordsError

_Kind = TypeVar("_Kind")
_MARK = b"crc32 "


def decode_record(text: bytes, kind: type[_Kind], what: str) -> _Kind:
    """The value of a record's JSON; RecordsError, naming `what`, for whatever else the bytes may be."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordsError(f"{what} cannot be read: {what_is_wrong(error)}") from error


def what_is_wrong(error: Exception) -> str:
    """What text is wrong with that was meant to be a record, or a question of that form, in words of ours."""
    if not isinstance(error, msgspec.ValidationError):
        return "it is no JSON"
    missing = re.search(r"missing required field `(\w+)`", str(error))
    place = re.search(r"at `\$\.?(.+)`$", str(error))
    if missing:
        return f"`{missing[1]}` is missing"
    return f"`{place[1]}` is not what belongs there" if place else "it is not what belongs there"


def encode_checked(value: Any) -> bytes:
    """JSON on one line, then its CRC-32: a flipped bit in a record must not read as another record."""
    line = msgspec.json.encode(value, order="deterministic") + b"\n"
    return line + _MARK + f"{zlib.crc32(line):08x}\n".encode()


def decode_checked(text: bytes, kind: type[_Kind], what: str) -> _Kind:
    """The inverse of `encode_checked`; RecordsError if the check fails or is missing."""
    line, found, check = text.rpartition(_MARK)
    if not found or check != f"{zlib.crc32(line):08x}\n".encode():
        raise RecordsError(f"{what} is damaged: its own checksum does not fit")
    return decode_record(line, kind, what)

"""The text of records: JSON that is checked when it is read, because storage may damage it."""

from __future__ import annotations

import os
import re
import threading
import zlib
from typing import Any, TypeVar

import msgspec

from ckptguard.errors import RecordsError

_Kind = TypeVar("_Kind")
_MARK = b"crc32 "
_ready: set[type] = set()
_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


def decodable(kind: type[_Kind]) -> type[_Kind]:
    """Return a type that any thread may decode. msgspec crashes if two threads use one for the first time at once."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)
            _ready.add(kind)
    return kind


def decode_record(text: bytes, kind: type[_Kind], what: str) -> _Kind:
    """Return the value of a record's JSON. For any other bytes, RecordsError names `what`."""
    try:
        return msgspec.json.decode(text, type=decodable(kind))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordsError(f"{what} cannot be read: {what_is_wrong(error)}") from error


def what_is_wrong(error: Exception) -> str:
    """Describe what is wrong with a text that should be a record, or a request of that form."""
    if not isinstance(error, msgspec.ValidationError):
        return "it is not JSON"
    missing = re.search(r"missing required field `(\w+)`", str(error))
    unknown = re.search(r"unknown field `(\w{1,80})`", str(error))
    place = re.search(r"at `\$\.?(.+)`$", str(error))
    if missing:
        return f"`{missing[1]}` is missing"
    if unknown:
        return f"there is no `{unknown[1]}`"
    return f"`{place[1]}` has the wrong type" if place else "it has the wrong type"


def encoded(value: object) -> bytes:
    """Return a value as JSON. Half a character, which no reader of JSON accepts, is escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_in_unicode(msgspec.to_builtins(value)))


def _in_unicode(value: Any) -> Any:
    if isinstance(value, dict):
        return {_in_unicode(k): _in_unicode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_in_unicode(v) for v in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def encode_checked(value: Any) -> bytes:
    """Return JSON on one line, then its CRC-32: a flipped bit must not turn a record into another one."""
    line = msgspec.json.encode(value, order="deterministic") + b"\n"
    return line + _MARK + f"{zlib.crc32(line):08x}\n".encode()


def decode_checked(text: bytes, kind: type[_Kind], what: str) -> _Kind:
    """Invert `encode_checked`. Raises RecordsError if the check fails or is missing."""
    line, found, check = text.rpartition(_MARK)
    if not found or check != f"{zlib.crc32(line):08x}\n".encode():
        raise RecordsError(f"{what} is damaged: its own checksum does not match")
    return decode_record(line, kind, what)

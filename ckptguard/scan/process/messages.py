"""The messages between a process and its scanning processes: length-prefixed MessagePack on two pipes."""

from __future__ import annotations

import struct

import msgspec

from ckptguard.scan.options import ScanOptions
from ckptguard.scan.result import Scan

PREFIX = struct.Struct(">Q")
# The answer for a checkpoint of 100 000 tensors has about 25 MB.
LARGEST_ANSWER = 256 * 1024**2


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Scan these files of a local storage, with at most `cpu_seconds`. `yields`: the process uses only what everything
    else leaves of the processors, from now on."""

    url: str
    keys: tuple[str, ...]
    options: ScanOptions
    cpu_seconds: float
    yields: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The scan, or why there is none: an error's `kind`, `message` and `key`."""

    scan: Scan | None = None
    kind: str = ""
    message: str = ""
    key: str = ""


def frame(value: Request | Answer) -> bytes:
    """Return the bytes to send."""
    body = msgspec.msgpack.encode(value)
    return PREFIX.pack(len(body)) + body

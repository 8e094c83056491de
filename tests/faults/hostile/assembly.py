"""Assembling pickles opcode by opcode, because no pickler writes what attackers write."""

from __future__ import annotations

import struct


def text(word: str) -> bytes:
    """BINUNICODE."""
    raw = word.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def value(thing: object) -> bytes:
    """A constant: None, bool, small int, text, bytes, list, tuple or dict of these; bytes in a `Raw` are opcodes."""
    if isinstance(thing, Raw):
        return thing.opcodes
    if thing is None:
        return b"N"
    if isinstance(thing, bool):
        return b"\x88" if thing else b"\x89"
    if isinstance(thing, int):
        return b"J" + struct.pack("<i", thing)
    if isinstance(thing, str):
        return text(thing)
    if isinstance(thing, bytes):
        return b"B" + struct.pack("<I", len(thing)) + thing
    if isinstance(thing, list):
        return b"](" + b"".join(map(value, thing)) + b"e"
    if isinstance(thing, tuple):
        return b"(" + b"".join(map(value, thing)) + b"t"
    assert isinstance(thing, dict)
    return b"}(" + b"".join(value(k) + value(v) for k, v in thing.items()) + b"u"


class Raw:
    """Opcodes that leave one value on the stack."""

    def __init__(self, opcodes: bytes) -> None:
        self.opcodes = opcodes


def named(module: str, name: str) -> Raw:
    """GLOBAL."""
    return Raw(b"c" + module.encode() + b"\n" + name.encode() + b"\n")


def stack_named(module: str, name: str) -> Raw:
    """STACK_GLOBAL, which also follows dots in the name."""
    return Raw(text(module) + text(name) + b"\x93")


def call(func: Raw, *args: object) -> Raw:
    """REDUCE."""
    return Raw(func.opcodes + value(args) + b"R")


def stream(thing: object, protocol: int = 2) -> bytes:
    """A whole pickle."""
    return b"\x80" + bytes([protocol]) + value(thing) + b"."

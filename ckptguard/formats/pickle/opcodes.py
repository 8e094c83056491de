"""Which method of the pickle machine each opcode is; the other bytes are no opcodes."""

from __future__ import annotations

STOP = 0x2E
FRAME = 0x95

OPCODES: dict[int, str] = {
    ord("("): "mark",
    ord("0"): "pop",
    ord("1"): "drop_mark",
    ord("2"): "duplicate",
    ord("F"): "text_float",
    ord("I"): "text_int",
    ord("J"): "binint",
    ord("K"): "binint1",
    ord("L"): "text_long",
    ord("M"): "binint2",
    ord("N"): "none",
    ord("P"): "text_persistent",
    ord("Q"): "persistent",
    ord("R"): "reduce",
    ord("S"): "text_string",
    ord("T"): "string4",
    ord("U"): "short_string",
    ord("V"): "text_unicode",
    ord("X"): "unicode",
    ord("a"): "append",
    ord("b"): "build",
    ord("c"): "text_global",
    ord("d"): "dict_of_mark",
    ord("}"): "empty_dict",
    ord("e"): "appends",
    ord("g"): "text_get",
    ord("h"): "binget",
    ord("i"): "text_instance",
    ord("j"): "long_binget",
    ord("l"): "list_of_mark",
    ord("]"): "empty_list",
    ord("o"): "object_of_mark",
    ord("p"): "text_put",
    ord("q"): "binput",
    ord("r"): "long_binput",
    ord("s"): "set_item",
    ord("t"): "tuple_of_mark",
    ord(")"): "empty_tuple",
    ord("u"): "set_items",
    ord("G"): "binfloat",
    0x80: "proto",
    0x81: "reduce",  # NEWOBJ: the same to us
    0x82: "refused",  # EXT1, EXT2, EXT4
    0x83: "refused",
    0x84: "refused",
    0x85: "tuple1",
    0x86: "tuple2",
    0x87: "tuple3",
    0x88: "true",
    0x89: "false",
    0x8A: "long1",
    0x8B: "long4",
    ord("B"): "bytes4",
    ord("C"): "short_bytes",
    0x8C: "short_unicode",
    0x8D: "unicode8",
    0x8E: "bytes8",
    0x8F: "empty_set",
    0x90: "add_items",
    0x91: "frozen_set",
    0x92: "new_object_ex",
    0x93: "stack_global",
    0x94: "memoize",
    FRAME: "frame",
    0x96: "bytes8",  # BYTEARRAY8
    0x97: "refused",  # NEXT_BUFFER, READONLY_BUFFER
    0x98: "refused",
}

# About how many bytes each leaves behind, at least what its time is worth.
_DEAR = {
    "]}\x8fl\x91d": 176,  # a list and what wraps it
    "pqr\x94": 128,  # an entry of the memo
    "RioQP\x81\x92": 128,  # objects
    "(t\x85\x86\x87": 88,  # a list or tuple
    "bcXVUTBCSL\x8a\x8b\x8c\x8d\x8e\x96\x93": 80,  # texts, bytes, states
    "GFJMI": 48,  # numbers
}
# Only STOP and FRAME cost nothing: the machine tells by this that it must look up.
COSTS: tuple[int, ...] = tuple(
    0 if code in (STOP, FRAME) else next((cost for codes, cost in _DEAR.items() if chr(code) in codes), 32)
    for code in range(256)
)

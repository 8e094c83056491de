"""The ways through the opcodes to a call: each of these pickles runs `touch` on its canary, or tries to."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import NamedTuple

from faults.hostile.assembly import Raw, call, named, stack_named, stream, text


class Armed(NamedTuple):
    """A pickle, and a global that must be named in the answer (None: the stream itself is refused)."""

    data: bytes
    expected: str | None


Builder = Callable[[str], Armed]


def system(canary: str) -> bytes:
    """The plainest one."""
    return stream(call(named("os", "system"), f"touch '{canary}'"))


def _shell(canary: str) -> bytes:
    return text(f"touch '{canary}'")


def _route(make: Callable[[str], bytes], expected: str | None = "os.system") -> Builder:
    return lambda canary: Armed(make(canary), expected)


_FROM_TYPE = named("torch._tensor", "_rebuild_from_type_v2")
_RECONSTRUCTOR = named("copyreg", "_reconstructor")
_EXTENSION = call(named("copyreg", "add_extension"), "os", "system", 7)
_STR_OF_OS = call(named("builtins", "str"), "os")
_MEMOISED = b"\x80\x04" + text("os") + b"\x94" + text("system")
_OS = b"cos\nsystem\n"


def _got(thing: Raw, name: str) -> Raw:
    return call(named("builtins", "getattr"), thing, name)


def _ran(canary: str) -> Raw:
    return call(named("os", "system"), f"touch '{canary}'")


def _frame(body: bytes, length: int | None = None) -> bytes:
    return b"\x95" + (len(body) if length is None else length).to_bytes(8, "little") + body


def _over_the_frame(canary: str, push: bytes) -> bytes:
    """Given a stream as torch gives it, Python's C reader drops what is left of a frame when a constant needs more,
    and goes on seven bytes behind the place where everybody else does: we would see a text, it sees opcodes."""
    hidden = b"0" + _OS + _shell(canary) + b"\x85R."
    seen = b"U" + bytes([5 + len(hidden)]) + b"AAAAA"
    return b"\x80\x04" + _frame(push + b"AAAAAAA") + b"A" + seen + hidden + b"0."


ROUTES = {
    f"route: {name}": build
    for name, build in {
        "INST": _route(lambda c: b"(S'touch " + c.encode() + b"'\nios\nsystem\n."),
        "OBJ": _route(lambda c: b"(" + _OS + b"S'touch " + c.encode() + b"'\no."),
        "NEWOBJ": _route(lambda c: b"\x80\x02" + _OS + _shell(c) + b"\x85\x81."),
        "NEWOBJ_EX": _route(
            lambda c: b"\x80\x04cpathlib\nPath\n)\x81" + b"0" + _OS + _shell(c) + b"\x85R0csubprocess\nPopen\n)}\x92."
        ),
        "STACK_GLOBAL": _route(lambda c: stream(call(stack_named("os", "system"), f"touch '{c}'"), 4)),
        "memoised name": _route(
            lambda c: _MEMOISED + b"\x9400h\0h\1\x93" + _shell(c) + b"\x85R."
        ),
        "memo by text": _route(lambda c: _OS + b"p7\n0g7\n(" + _shell(c) + b"tR."),
        "memo far away": _route(lambda c: _OS + b"r\xff\xff\x00\x000j\xff\xff\x00\x00(" + _shell(c) + b"tR."),
        "duplicate": _route(lambda c: b"\x80\x02" + _OS + b"2" + _shell(c) + b"\x85R\x86."),
        "getattr of __import__": _route(
            lambda c: stream(call(_got(call(named("builtins", "__import__"), "os"), "system"), f"touch '{c}'")),
            "builtins.__import__",
        ),
        "key of a dict": _route(lambda c: b"\x80\x02}" + _OS + _shell(c) + b"\x85RK\x01s."),
        "item of a set": _route(lambda c: b"\x80\x04\x8f(" + _OS + _shell(c) + b"\x85R\x90."),
        "item of a frozen set": _route(lambda c: b"\x80\x04(" + _OS + _shell(c) + b"\x85R\x91."),
        "inside a tuple that is thrown away": _route(lambda c: b"\x80\x02" + _OS + _shell(c) + b"\x85R\x850}."),
        "behind a mark that is dropped": _route(lambda c: b"\x80\x02}(" + _OS + _shell(c) + b"\x85R1."),
        "BUILD": _route(
            lambda c: b"\x80\x02cshutil\nPurged\n)\x81}" + text("command") + _shell(c) + b"sb.", "shutil.Purged"
        ),
        # The instance's own __setstate__ is a plain attribute by then: the second BUILD calls it.
        "BUILD with __setstate__": _route(
            lambda c: b"\x80\x02ctypes\nSimpleNamespace\n)R}" + text("__setstate__") + _OS + b"sb" + _shell(c) + b"b."
        ),
        "BUILD with slots": _route(
            lambda c: b"\x80\x02ccollections\nOrderedDict\n)RN}" + text("x") + _OS + _shell(c) + b"\x85Rs\x86b."
        ),
        "append to an object": _route(lambda c: b"\x80\x02ccollections\ndeque\n)R" + _OS + _shell(c) + b"\x85Ra."),
        "item of an object": _route(
            lambda c: b"\x80\x02ccollections\nOrderedDict\n)R" + text("k") + _OS + _shell(c) + b"\x85Rs."
        ),
        "default factory": _route(
            lambda c: b"\x80\x02ccollections\ndefaultdict\n"
            + b"cfunctools\npartial\n"
            + _OS
            + _shell(c)
            + b"\x86R\x85R0"
            + _OS
            + _shell(c)
            + b"\x85R."
        ),
        "persistent id": _route(lambda c: b"\x80\x02" + _OS + _shell(c) + b"\x85RQ."),
        "persistent id by text": _route(lambda c: b"Pstorage\n0" + _OS + _shell(c) + b"\x85R."),
        "class of a storage": _route(
            lambda c: b"\x80\x02(" + text("storage") + _OS + text("0") + text("cpu") + b"K\x04tQ."
        ),
        "type of a tensor": _route(
            lambda c: stream(
                call(_FROM_TYPE, named("os", "system"), None, (f"touch '{c}'",), None)
            )
        ),
        "state of a parameter": _route(
            lambda c: stream(
                call(
                    named("torch._utils", "_rebuild_parameter_with_state"),
                    None,
                    True,
                    {},
                    _ran(c),
                )
            )
        ),
        "hooks of a tensor": _route(
            lambda c: stream(
                call(
                    named("torch._utils", "_rebuild_tensor_v2"), None, 0, (1,), (1,), False,
                    call(named("collections", "OrderedDict"), [[1, _ran(c)]]),
                )
            )
        ),
        "bytes to load": _route(
            lambda c: stream(call(named("torch.storage", "_load_from_bytes"), system(c))),
            "torch.storage._load_from_bytes",
        ),
        "reconstructor": _route(
            lambda c: stream(call(_RECONSTRUCTOR, named("subprocess", "Popen"), named("builtins", "object"), None)),
            "subprocess.Popen",
        ),
        "registry": _route(
            lambda c: b"\x80\x02" + _EXTENSION.opcodes + b"0\x82\x07" + _shell(c) + b"\x85R.",
            "copyreg.add_extension",
        ),
        "EXT2": _route(lambda c: b"\x80\x02\x83\x07\x00" + _shell(c) + b"\x85R.", None),
        "out-of-band buffer": _route(lambda c: b"\x80\x05\x97" + _OS + _shell(c) + b"\x85R.", None),
        "computed name": _route(
            lambda c: b"\x80\x04" + _STR_OF_OS.opcodes + text("system") + b"\x93" + _shell(c) + b"\x85R.",
            None,
        ),
        "before the damage": _route(lambda c: b"\x80\x02" + _OS + _shell(c) + b"\x85R\xff"),
        "before the end": _route(lambda c: b"\x80\x02" + _OS + _shell(c) + b"\x85R"),
        "second pickle": _route(lambda c: pickle.dumps({"a": 1}) + system(c), None),
        "protocol 0": _route(lambda c: b"cos\nsystem\n(S'touch " + c.encode() + b"'\ntR."),
        "protocol 1": _route(lambda c: b"cos\nsystem\n(U" + bytes([len(c) + 6]) + b"touch " + c.encode() + b"tR."),
        "protocol 5 with frames": _route(
            lambda c: b"\x80\x05" + _frame(_OS + _shell(c) + b"\x85R.")
        ),
        "over the end of a frame": _route(lambda c: _over_the_frame(c, b"\x8a\x08"), None),
        "bytes over the end of a frame": _route(lambda c: _over_the_frame(c, b"B\x08\0\0\0"), None),
        "dotted name": _route(
            lambda c: stream(call(stack_named("os", "path.os.system"), f"touch '{c}'"), 4), "os.path.os.system"
        ),
        "name of an allowed module": _route(
            lambda c: stream(call(stack_named("pathlib", "os.system"), f"touch '{c}'"), 4), "pathlib.os.system"
        ),
        "alone": _route(lambda c: b"\x80\x02" + _OS + b"."),
        "deep": _route(lambda c: b"\x80\x02" + b"]" * 500 + _OS + _shell(c) + b"\x85R" + b"a" * 500 + b"."),
        "among a million": _route(lambda c: b"\x80\x02](" + b"N" * 1_000_000 + _OS + _shell(c) + b"\x85Re."),
    }.items()
}  # fmt: skip

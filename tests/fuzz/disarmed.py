"""Python's own unpicklers with the dangerous half taken out: an oracle for what loading would look up."""

from __future__ import annotations

import io
import math
import pickle
import struct

from ckptguard.formats.pickle.inert_values import Call, Mapping, PersistentId, Sequence, SetOf

MAX_COMPARED = 20_000
_MAX_MEMO = 100_000


class Inert:
    """Stands for whatever a pickle names: it can be called, made, filled and given a state, and does nothing."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass

    def append(self, item):
        pass

    def extend(self, items):
        pass

    def add(self, item):
        pass

    def __setitem__(self, key, value):
        pass

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return self is other


class _Recorder:
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[str] = set()

    def find_class(self, module, name):
        self.names.add(f"{module}.{name}")
        return Inert

    def persistent_load(self, pid):
        return Inert()


class InC(_Recorder, pickle.Unpickler):
    """The one that everybody uses."""


class InPython(_Recorder, pickle._Unpickler):
    """The one that the C one was made after; they do not always agree."""


class Loaded:
    """What one unpickler made of the bytes: `names` it looked up, `error` or `value`."""

    def __init__(self, kind: type[_Recorder], data: bytes) -> None:
        unpickler = kind(data)
        self.value: object = None
        self.error: BaseException | None = None
        try:
            self.value = unpickler.load()
        except Exception as error:
            self.error = error
        self.names = unpickler.names


def may_take_much_memory(data: bytes) -> bool:
    """Whether the C unpickler could make a table for a far-away memo index."""
    position = data.find(b"r")
    while position >= 0:
        raw = data[position + 1 : position + 5]
        if len(raw) == 4 and struct.unpack("<I", raw)[0] > _MAX_MEMO:
            return True
        position = data.find(b"r", position + 1)
    position = data.find(b"p")
    while position >= 0:
        digits = data[position + 1 : position + 40].partition(b"\n")[0]
        if len(digits) > 5:
            return True
        position = data.find(b"p", position + 1)
    return False


def differs(ours: object, real: object) -> str | None:
    """Where our inert value and the really loaded one say different things; only plain values are compared."""
    waiting = [(ours, real, "value")]
    seen: set[tuple[int, int]] = set()
    for _ in range(MAX_COMPARED):
        if not waiting:
            return None
        own, loaded, where = waiting.pop()
        if isinstance(own, Call | PersistentId) or isinstance(loaded, Inert):
            continue
        if (id(own), id(loaded)) in seen:
            continue
        seen.add((id(own), id(loaded)))
        if type(own) is Sequence:
            if isinstance(loaded, list):
                if len(own.items) != len(loaded):
                    return f"{where}: {len(own.items)} items, really {len(loaded)}"
                waiting += [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(own.items, loaded, strict=True))]
        elif type(own) is tuple:
            if not isinstance(loaded, tuple) or len(own) != len(loaded):
                return f"{where}: a tuple of {len(own)}, really {type(loaded).__name__}"
            waiting += [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(own, loaded, strict=True))]
        elif type(own) is Mapping:
            if not isinstance(loaded, dict) or len(loaded) > len(own.flat) // 2:
                return f"{where}: a dict, really {type(loaded).__name__}"
        elif type(own) is SetOf:
            if not isinstance(loaded, set | frozenset) or len(loaded) > len(own.items):
                return f"{where}: a set, really {type(loaded).__name__}"
        elif own is None or isinstance(own, bool | int | float):
            same = type(own) is type(loaded) and _same_number(own, loaded)
            if not same:
                return f"{where}: {own!r}, really {loaded!r}"
    return None


def _same_number(own: object, loaded: object) -> bool:
    if isinstance(own, float) and isinstance(loaded, float) and math.isnan(own):
        return math.isnan(loaded)
    return own == loaded

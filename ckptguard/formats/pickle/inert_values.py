"""The values of the pickle reader. They are inert: none of them can do anything.

Besides these, a value is None, a bool, int, float, str, bytes, or a tuple of values. Mappings and sets are plain lists
of what was put in, so that nothing from a file is ever hashed or compared.
"""

from __future__ import annotations

import enum

import msgspec

PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # what Python 3 calls its modules


class Kind(enum.Enum):
    """The result of a call, and so what may be done to it."""

    OBJECT = "an object of an unknown class"
    TENSOR = "a tensor"
    MAPPING = "a dict"
    LIST = "a list"
    SET = "a set"
    FIXED = "a value that nothing can change"
    BYTES = "a bytearray"
    ARRAY = "an array"
    RECORD = "a plain object"
    HOOKS = "a tensor's hooks"
    DTYPE = "an array's type"


class _Inert(msgspec.Struct, eq=False):
    __repr__ = object.__repr__  # values from a file may be nested without end, and contain themselves


class Global(_Inert, eq=False):
    """A name that the file mentions. Nothing was imported for it. `meant` is what Python 3 calls it."""

    module: str
    name: str
    dotted: str = ""
    meant: str = ""
    row: object = None  # what is known about calls of it

    def __post_init__(self) -> None:
        self.dotted = f"{self.module}.{self.name}"
        self.meant = f"{PYTHON_2.get(self.module, self.module)}.{self.name}"


class Sequence(_Inert, eq=False):
    """A list (or bytearray, as the bytes it was made from)."""

    items: list[object]


class Mapping(_Inert, eq=False):
    """A dict: `flat` holds key, value, key, value ... in the order they were set."""

    flat: list[object]


class SetOf(_Inert, eq=False):
    """A set or frozenset."""

    items: list[object]
    frozen: bool = False


class PersistentId(_Inert, eq=False):
    """A reference to something outside the pickle (torch: a storage)."""

    value: object


class Call(_Inert, eq=False):
    """A call that loading would make. It would put `flat` and `items` in, and set `state`."""

    func: object
    args: object
    kwargs: object = None
    state: object = None
    flat: list[object] | None = None
    items: list[object] | None = None
    kind: Kind = Kind.OBJECT

    def calls(self, *dotted: str) -> bool:
        """True if the function called is one of these globals, named as in Python 3."""
        return type(self.func) is Global and self.func.meant in dotted

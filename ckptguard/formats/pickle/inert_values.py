"""What the pickle reader yields: inert values. None of them can do anything.

Besides these, a value is None, a bool, int, float, str, bytes, or a tuple of values. Mappings and sets are kept as
plain lists of what was put in, so that nothing from a file is ever hashed or compared.
"""

from __future__ import annotations


class Global:
    """A name that the file mentions. Nothing was imported for it."""

    __slots__ = ("dotted", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.dotted = f"{module}.{name}"


class Sequence:
    """A list (or bytearray, as the bytes it was made from)."""

    __slots__ = ("items",)

    def __init__(self, items: list[object]) -> None:
        self.items = items


class Mapping:
    """A dict: `flat` holds key, value, key, value ... in the order they were set."""

    __slots__ = ("flat",)

    def __init__(self, flat: list[object]) -> None:
        self.flat = flat


class SetOf:
    """A set or frozenset."""

    __slots__ = ("items",)

    def __init__(self, items: list[object]) -> None:
        self.items = items


class PersistentId:
    """A reference to something outside the pickle (torch: a storage)."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Call:
    """What loading would have called.

    `flat` and `items` are what it would have put in, `state` what it would have set.
    """

    __slots__ = ("args", "flat", "func", "items", "kwargs", "state")

    def __init__(self, func: object, args: object, kwargs: object = None) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.state: object = None
        self.flat: list[object] | None = None
        self.items: list[object] | None = None

    def calls(self, *dotted: str) -> bool:
        """Whether the thing called is one of these globals."""
        return type(self.func) is Global and self.func.dotted in dotted

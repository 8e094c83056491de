"""One walk that turns any result into JSON values. What a document says otherwise than its type does is in `forms`."""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ckptguard.documents.forms import FORMS, Form
from ckptguard.values.ids import CheckpointId

SCHEMA = 1
Document = dict[str, Any]


def document(command: str, /, **parts: object) -> Document:
    """The start that every document has, then its own keys in the order given."""
    return {"schema": SCHEMA, "command": command, **{key: plain(value) for key, value in parts.items()}}


def fields(value: Any, form: str = "", **instead: object) -> Document:
    """The keys of one result in the order of its form, else of its fields; `instead` holds values that are not its
    own. A field that is unset has no key; what is not known is null."""
    found: Document = {}
    kind: Any = type(value)
    for key, get, inner in _readers(kind, form):
        part = instead[key] if key in instead else get(value)
        if part is not msgspec.UNSET:
            found[key] = plain(part, inner)
    return found


def plain(value: object, form: str = "") -> object:
    """The value as JSON knows it; a number that is not finite is null, because JSON has no word for it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, CheckpointId):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return fields(value, form)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, form) for inner in value]
    return plain(msgspec.to_builtins(value))


@functools.cache
def _readers(kind: type, name: str) -> tuple[tuple[str, Callable[[Any], object], str], ...]:
    """Each key of a form, what reads its value, and the form of that value."""
    form = FORMS.get(name or f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}", Form())
    readers = []
    for word in form.keys.replace("*", " ".join(getattr(kind, "__struct_fields__", ()))).split():
        rest, _, inner = word.partition(">")
        key, _, attribute = rest.partition("=")
        if key in ("series", "step") and not attribute and not hasattr(kind, key):
            attribute = f"id.{key}"  # of what has an id alone
        readers.append((key, form.made.get(key) or operator.attrgetter(attribute or key), inner))
    return tuple(readers)

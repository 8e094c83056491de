"""Hugging Face's ``trainer_state.json``: the step, and the numbers that were logged last."""

from __future__ import annotations

from ckptguard.formats.strict_json import JsonProblem, parse_object, printable
from ckptguard.formats.structure import Format, Leaf, Problem, Structure
from ckptguard.formats.suffixes import name_of
from ckptguard.storage.protocol import Reader

MAX_SIZE = 256 << 20


def matches(path: str, head: bytes) -> bool:
    """By the name."""
    return name_of(path) == "trainer_state.json"


def read(reader: Reader, path: str) -> Structure:
    """Leaves ``global_step`` and the numbers of the last log entry; the Trainer writes NaN as a bare word."""
    size = reader.entry.size
    if not size or size > MAX_SIZE:
        return _broken("it is empty" if not size else f"it has {size} bytes", truncated=not size)
    text = reader.read(0, size)
    try:
        state = parse_object(text, allow_nan=True)
    except JsonProblem as error:
        return _broken(f"it cannot be read: {error}", truncated=error.ends_early)
    leaves = [Leaf(key, state[key]) for key in ("global_step", "epoch") if _is_number(state.get(key))]  # type: ignore[arg-type]
    history = state.get("log_history")
    last = history[-1] if isinstance(history, list) and history else None
    if isinstance(last, dict):
        prefix = "log_history.-1."
        leaves += [Leaf(prefix + printable(key), value) for key, value in last.items() if _is_number(value)]
    return Structure(format=FORMAT.name, leaves=tuple(leaves))


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def _broken(message: str, *, truncated: bool = False) -> Structure:
    return Structure(format=FORMAT.name, problems=(Problem(message=message),), truncated=truncated)


FORMAT = Format(name="trainer_state", matches=matches, read=read)

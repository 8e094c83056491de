"""Hugging Face's ``trainer_state.json``: the step, and the numbers that were logged last."""

from __future__ import annotations

from ckptguard.formats.strict_json import JsonProblem, printable, read_object
from ckptguard.formats.structure import Leaf, Structure, broken
from ckptguard.storage.protocol import Reader

NAME = "trainer_state"
MAX_SIZE = 256 << 20


def read(reader: Reader, path: str) -> Structure:
    """Leaves ``global_step`` and the numbers of the last log entry; the Trainer writes NaN as a bare word."""
    try:
        state = read_object(reader, MAX_SIZE, allow_nan=True)
    except JsonProblem as error:
        return broken(NAME, f"it cannot be read: {error}", truncated=error.ends_early)
    leaves = [Leaf(key, state[key]) for key in ("global_step", "epoch") if _is_number(state.get(key))]  # type: ignore[arg-type]
    history = state.get("log_history")
    last = history[-1] if isinstance(history, list) and history else None
    if isinstance(last, dict):
        prefix = "log_history.-1."
        leaves += [Leaf(prefix + printable(key), value) for key, value in last.items() if _is_number(value)]
    return Structure(format=NAME, leaves=tuple(leaves))


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)

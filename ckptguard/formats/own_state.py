"""Our own ``state.json``: everything of a checkpoint in our layout that is no tensor."""

from __future__ import annotations

from ckptguard.formats.strict_json import JsonProblem, printable, read_object
from ckptguard.formats.structure import Leaf, Problem, Structure, broken
from ckptguard.storage.protocol import Reader

NAME = "ckptguard_state"
MAX_SIZE = 256 << 20
MAX_LEAVES = 20_000
_MAX_FINITE_LEAVES = 10_000  # the rest of the room is for those that are not finite
_NUMBERS_OF = ("optimizer", "scheduler", "scaler")
_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def read(reader: Reader, path: str) -> Structure:
    """Leaves: the numbers of optimizer, scheduler and scaler, those that are not finite too."""
    try:
        state = read_object(reader, MAX_SIZE)
    except JsonProblem as error:
        return broken(NAME, f"it cannot be read: {error}", truncated=error.ends_early)
    if state.get("ckptguard_state") != 1:
        return broken(NAME, "it is no state of a format that this version reads")
    leaves: list[Leaf] = []
    problems: tuple[Problem, ...] = ()
    waiting: list[tuple[str, object]] = [(key, state[key]) for key in reversed(_NUMBERS_OF) if key in state]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict) and set(value) == {"$float"} and str(value["$float"]) in _FLOATS:
            if len(leaves) < MAX_LEAVES:
                leaves.append(Leaf(name, _FLOATS[str(value["$float"])]))
            else:
                problems = (Problem(message="more numbers that are not finite than we would list"),)
        elif isinstance(value, dict):
            waiting += [(f"{name}.{printable(key)}", value[key]) for key in reversed(value)]
        elif isinstance(value, list):
            waiting += [(f"{name}.{index}", value[index]) for index in reversed(range(len(value)))]
        elif len(leaves) < _MAX_FINITE_LEAVES and (
            isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
        ):
            leaves.append(Leaf(name, value))
    containers = tuple(key for key in _NUMBERS_OF if isinstance(state.get(key), dict | list))
    return Structure(format=NAME, leaves=tuple(leaves), problems=problems, containers=containers)

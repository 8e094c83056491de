"""The JSON files of a checkpoint: configurations, Hugging Face's index and trainer state, and our own state."""

from __future__ import annotations

import json
import re
from typing import TypeGuard

import msgspec

from ckptguard.formats.strict_json import JsonProblem, printable, read_object, why_unread
from ckptguard.formats.structure import Leaf, Problem, Structure, broken, unread
from ckptguard.storage.protocol import Reader
from ckptguard.values.ids import is_safe_path

NAME = "config_json"
_OWN = "ckptguard_state"
MAX_STATE = 256 << 20
_MAX_CONFIG = 128 << 20  # a tokenizer's vocabulary has 33 MB
_MAX_INDEX = 64 << 20
_MAX_LEAVES = 20_000
_MAX_FINITE_LEAVES = 10_000  # the rest of the limit is for those that are not finite
_NUMBERS_OF = ("optimizer", "scheduler", "scaler")
_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
# Settings written by hand may have comments, which only their own reader knows.
_COMMENT = re.compile(rb"^[ \t]*(?://|/\*|#)", re.MULTILINE)


def read(reader: Reader, path: str) -> Structure:
    """Check that a configuration or a tokenizer is JSON: with half of one from a killed writer, nothing loads.

    Duplicate keys and bare NaN are accepted here, because Python writes and reads them. So are lines of JSON, and
    comments.
    """
    size = reader.entry.size
    if size > _MAX_CONFIG:
        return Structure(format=NAME)
    raw = reader.read(0, size)
    if not raw.strip():
        return broken(NAME, "it is empty")
    wrong = why_no_json(raw)
    if wrong is None or (b"\0" not in raw and (_COMMENT.search(raw) or _is_lines(raw))):
        return Structure(format=NAME)
    return broken(NAME, f"it is not JSON: {wrong}")


def why_no_json(raw: bytes) -> str | None:
    """Return why Python's json would not load a text, or None if it would."""
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
        raw.decode("utf-8")
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # a mark of the byte order, another encoding, or NaN
    try:
        json.loads(raw)
    except RecursionError:
        return "it is nested too deeply"
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except ValueError as error:
        return why_unread(error)
    return None


def _is_lines(raw: bytes) -> bool:
    """True if each line is JSON by itself."""
    lines = [line for line in raw.splitlines() if line.strip()]
    return len(lines) > 1 and all(why_no_json(line) is None for line in lines)


def read_index(reader: Reader, path: str) -> Structure:
    """Return which shard holds which tensor. Anything but a map from tensors to plain file names is a problem."""
    try:
        index = read_object(reader, _MAX_INDEX)
    except JsonProblem as error:
        if error.too_large:
            return unread("hf_index", error)
        return broken("hf_index", f"the index cannot be read: {error}", truncated=error.ends_early)
    weights = index.get("weight_map")
    if not isinstance(weights, dict):
        return broken("hf_index", "the index has no weight_map")
    unsafe = [name for name in weights.values() if not isinstance(name, str) or not is_safe_path(name)]
    if unsafe:
        return broken("hf_index", f"the index names {printable(str(unsafe[0]))!r}, which is not a plain file name")
    return Structure(format="hf_index", weight_map=weights)


def read_trainer_state(reader: Reader, path: str) -> Structure:
    """Return ``global_step`` and the numbers of the last log entry. The Trainer writes NaN as a bare word."""
    try:
        state = read_object(reader, MAX_STATE, allow_nan=True)
    except JsonProblem as error:
        if error.too_large:
            return unread("trainer_state", error)
        return broken("trainer_state", f"it cannot be read: {error}", truncated=error.ends_early)
    numbers = [(key, state.get(key)) for key in ("global_step", "epoch")]
    history = state.get("log_history")
    last = history[-1] if isinstance(history, list) and history else None
    if isinstance(last, dict):
        numbers += [(f"log_history.-1.{printable(key)}", value) for key, value in last.items()]
    return Structure(
        format="trainer_state", leaves=tuple(Leaf(name, value) for name, value in numbers if _is_number(value))
    )


def read_own_state(reader: Reader, path: str) -> Structure:
    """Return the numbers of optimizer, scheduler and scaler, also those that are not finite, and where the first is."""
    try:
        state = read_object(reader, MAX_STATE)
    except JsonProblem as error:
        if error.too_large:
            return unread(_OWN, error)
        return broken(_OWN, f"it cannot be read: {error}", truncated=error.ends_early)
    if state.get("ckptguard_state") != 1:
        return broken(_OWN, "it is not a state in a format that this version reads")
    leaves: list[Leaf] = []
    problems: tuple[Problem, ...] = ()
    is_beside = False  # tensors of the optimizer are in another file
    waiting: list[tuple[str, object]] = [(key, state[key]) for key in reversed(_NUMBERS_OF) if key in state]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict) and set(value) == {"$float"} and str(value["$float"]) in _FLOATS:
            if len(leaves) < _MAX_LEAVES:
                leaves.append(Leaf(name, _FLOATS[str(value["$float"])]))
            else:
                problems = (Problem("more numbers that are not finite than ckptguard lists", doubt=True),)
        elif isinstance(value, dict):
            is_beside |= "$tensor" in value and name.startswith("optimizer.")
            waiting += [(f"{name}.{printable(key)}", value[key]) for key in reversed(value)]
        elif isinstance(value, list):
            waiting += [(f"{name}.{index}", value[index]) for index in reversed(range(len(value)))]
        elif _is_number(value) and len(leaves) < _MAX_FINITE_LEAVES:
            leaves.append(Leaf(name, value))
    containers = tuple(key for key in _NUMBERS_OF if isinstance(state.get(key), dict | list))
    where = "nowhere" if _lacks_optimizer(state) else "in a file" if is_beside else ""
    metadata = {"optimizer": where} if where else {}
    return Structure(format=_OWN, leaves=tuple(leaves), problems=problems, containers=containers, metadata=metadata)


def _lacks_optimizer(state: dict[str, object]) -> bool:
    """True if a training with an optimizer saved this state, which has no section of it."""
    ranks = state.get("ranks")
    about = ranks[0] if isinstance(ranks, list) and ranks else state
    saved = about.get("saved") if isinstance(about, dict) else None
    parts = saved.get("parts") if isinstance(saved, dict) else None
    return "optimizer" not in state and isinstance(parts, list) and "optimizer" in parts


def _is_number(value: object) -> TypeGuard[float | int]:
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)

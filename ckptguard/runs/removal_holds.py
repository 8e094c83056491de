"""Find why a checkpoint must stay under any policy: pins, and references from the run itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckptguard.formats.strict_json import JsonProblem, read_object
from ckptguard.layouts import Checkpoint
from ckptguard.records.pins import counts, list_pins
from ckptguard.records.run import Run
from ckptguard.runs.pointers import pointed_to
from ckptguard.runs.run_view import RunView
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import CheckpointId, numbers_of

_STATE = "trainer_state.json"  # of Hugging Face's Trainer, which loads the best one at the end
_LARGEST_STATE = 64 << 20

Holds = dict[str, list[str]]


def pins_of(run: Run) -> dict[CheckpointId, list[str]]:
    """Return why generations are pinned."""
    found: dict[CheckpointId, list[str]] = {}
    for pin in list_pins(run):
        if counts(run, pin):
            found.setdefault(pin.id, []).append(pin.words)
    return found


def references_to(view: RunView) -> Holds:
    """Return what in the run refers to each path. Raises CouldNotTellError.

    These are links, pointers such as ``latest``, the best model that a Trainer will load, and checkpoints inside
    others.
    """
    run, entries, checkpoints = view.run, view.entries, view.checkpoints
    paths = {c.path for c in checkpoints}
    holds: Holds = {}
    for target, key in (*_linked(run, entries), *pointed_to(run, entries).items(), *_best_models(run, checkpoints)):
        path = _owner(target, paths)
        if path is not None and _owner(key, paths) != path:
            holds.setdefault(path, []).append(f"{key} refers to it")
    for path in paths:
        above = _owner(path.rpartition("/")[0], paths)
        if above is not None:
            holds.setdefault(above, []).append(f"{path} is inside it")
    return holds


def _owner(key: str, paths: set[str]) -> str | None:
    """Return the innermost checkpoint that contains a key."""
    while key:
        if key in paths:
            return key
        key = key.rpartition("/")[0]
    return None


def _linked(run: Run, entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    root = run.storage.root
    if root is None:
        return
    real = os.path.realpath(root)
    for entry in entries:
        if entry.kind == "link":
            end = os.path.realpath(os.path.join(root, *entry.key.split("/")))
            if end.startswith(real + os.sep):
                yield os.path.relpath(end, real).replace(os.sep, "/"), entry.key


def _best_models(run: Run, checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[str, str]]:
    """Yield the best model that the newest readable state of each folder names."""
    folders: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for checkpoint in checkpoints:
        key = checkpoint.key(_STATE)
        if key in checkpoint.files:
            folders.setdefault(checkpoint.path.rpartition("/")[0], []).append((numbers_of(checkpoint.step), key))
    for folder, states in folders.items():
        for _, key in sorted(states, reverse=True):
            state = _parsed(run, key)
            if state is not None:
                named = state.get("best_model_checkpoint")
                if isinstance(named, str) and named:
                    yield f"{folder}/{named.rstrip('/').rpartition('/')[2]}".lstrip("/"), key
                break


def _parsed(run: Run, key: str) -> dict[str, object] | None:
    try:
        with run.storage.open(key) as reader:
            return read_object(reader, _LARGEST_STATE, allow_nan=True)
    except JsonProblem:
        return None  # damaged: the verdict on its own checkpoint says so

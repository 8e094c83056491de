"""What the run's own log says: Hugging Face's ``trainer_state.json`` keeps the updates that were logged."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ckptguard.errors import CkptguardError, ObjectMissingError
from ckptguard.formats.json_files import MAX_STATE
from ckptguard.formats.strict_json import JsonProblem, read_object
from ckptguard.layouts import Checkpoint
from ckptguard.layouts.engine_states import has_engine_states
from ckptguard.records.kept import read_kept
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.run import Run
from ckptguard.storage import Storage
from ckptguard.values.ids import MAX_STEP, CheckpointId
from ckptguard.values.incident import Number, Sample, worded

_FILE = "trainer_state.json"
_MOST = 2000  # entries of a log that a report is made of

# A loss scaler overflows and skips now and then; that is how it works. So many in a row are no search for a scale.
_IN_A_ROW = 5


def sick_since(run: Run, checkpoint: Checkpoint) -> tuple[int, str] | None:
    """The step since which every gradient norm in the checkpoint's log is not finite, and a sentence; None if the
    last one is finite, or if there is no such log. Storage errors are raised.

    A few that are not finite are no sickness where a loss scaler was saved, nor a few infinite ones without NaN
    elsewhere: a save of the weights alone, and some versions of the Trainer, leave the scaler out.
    """
    if checkpoint.layout != "hf-trainer":
        return None
    logged = _gradient_norms(run, checkpoint)
    bad: list[tuple[int, float]] = []
    for step, norm in reversed(logged):
        if math.isfinite(norm):
            break
        bad.append((step, norm))
    scaled = checkpoint.key("scaler.pt") in checkpoint.files or has_engine_states(checkpoint)
    if not bad or (len(bad) < _IN_A_ROW and (scaled or not any(math.isnan(norm) for _, norm in bad))):
        return None
    since, norm = bad[-1]
    return since, f"its trainer_state.json logs a gradient norm of {norm} since step {since}"


def logged_samples(run: Run, id: CheckpointId, path: str) -> tuple[Sample, ...]:
    """What a checkpoint's log says of the updates up to it, oldest first; nothing where there is no such log."""
    for storage, folder in _places(run, id, path):
        try:
            with storage.open(f"{folder}/{_FILE}".removeprefix("./")) as reader:
                state = read_object(reader, MAX_STATE, allow_nan=True)
        except (CkptguardError, JsonProblem):
            continue
        history = state.get("log_history")
        entries = history[-_MOST:] if isinstance(history, list) else []
        return tuple(sorted((s for e in entries if (s := _sample(e)) is not None), key=lambda s: s.step))
    return ()


def _gradient_norms(run: Run, checkpoint: Checkpoint) -> list[tuple[int, float]]:
    """(step, norm) of the log's entries that have a gradient norm, oldest first; nothing of a log that cannot be
    parsed: that is for the checks."""
    try:
        with run.storage.open(checkpoint.key(_FILE)) as reader:
            state = read_object(reader, MAX_STATE, allow_nan=True)
    except (ObjectMissingError, JsonProblem):
        return []
    history = state.get("log_history")
    found = []
    for entry in history if isinstance(history, list) else []:
        step, norm = (entry.get("step"), entry.get("grad_norm")) if isinstance(entry, dict) else (None, None)
        if type(step) is int and 0 <= step <= MAX_STEP and isinstance(norm, float):
            found.append((step, norm))
    return found


def _places(run: Run, id: CheckpointId, path: str) -> Iterator[tuple[Storage, str]]:
    """Where the checkpoint may lie: moved aside, in place, kept."""
    mark, copy = read_quarantined(run, id), read_kept(run, id)
    if mark is not None:
        yield run.records, f"{mark.folder}/{mark.path}"
    yield run.storage, path
    if copy is not None:
        yield run.records, copy.checkpoint_key


def _sample(entry: object) -> Sample | None:
    if not isinstance(entry, dict):
        return None
    step = entry.get("step")
    loss, norm, rate = (_number(entry.get(name)) for name in ("loss", "grad_norm", "learning_rate"))
    if type(step) is not int or not 0 <= step <= MAX_STEP or (loss is None and norm is None):
        return None
    return Sample(step, loss, norm, None, rate)


def _number(value: object) -> Number:
    return worded(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None

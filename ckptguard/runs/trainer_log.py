"""Read a run's own log: Hugging Face's ``trainer_state.json`` lists the logged updates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import takewhile

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
_MOST = 2000  # entries of a log that a report shows at most

# A loss scaler overflows and skips an update now and then. This many in a row are not normal.
_IN_A_ROW = 5


def sick_since(run: Run, checkpoint: Checkpoint) -> tuple[int, str] | None:
    """Return the step since which every logged gradient norm is not finite, and a sentence about it.

    None if the last norm is finite, or without such a log. A few bad norms are normal with a loss scaler. Some versions
    of the Trainer do not save the scaler, so a few infinite norms without NaN are normal, too. Raises storage errors.
    """
    if checkpoint.layout != "hf-trainer":
        return None
    logged = reversed(_gradient_norms(run, checkpoint))
    bad = list(takewhile(lambda one: not math.isfinite(one[1]), logged))
    scaled = checkpoint.key("scaler.pt") in checkpoint.files or has_engine_states(checkpoint)
    if not bad or (len(bad) < _IN_A_ROW and (scaled or not any(math.isnan(norm) for _, norm in bad))):
        return None
    since, norm = bad[-1]
    return since, f"its trainer_state.json logs a gradient norm of {norm} since step {since}"


def logged_samples(run: Run, id: CheckpointId, path: str) -> tuple[Sample, ...]:
    """Return the logged updates of a checkpoint, oldest first; empty without a readable log."""
    for storage, folder in _places(run, id, path):
        with contextlib.suppress(CkptguardError, JsonProblem):
            logged = _logged(storage, f"{folder}/{_FILE}".removeprefix("./"), _MOST)
            found = (_sample(step, entry) for step, entry in logged)
            return tuple(sorted((sample for sample in found if sample is not None), key=lambda sample: sample.step))
    return ()


def _gradient_norms(run: Run, checkpoint: Checkpoint) -> list[tuple[int, float]]:
    """Return (step, norm) pairs, oldest first; empty if the log cannot be parsed, which a check reports."""
    with contextlib.suppress(ObjectMissingError, JsonProblem):
        found = ((step, entry.get("grad_norm")) for step, entry in _logged(run.storage, checkpoint.key(_FILE)))
        return [(step, norm) for step, norm in found if isinstance(norm, float)]
    return []


def _logged(storage: Storage, key: str, most: int = 0) -> list[tuple[int, dict[str, object]]]:
    """Return the last `most` entries (0: all) that have a step, with that step."""
    with storage.open(key) as reader:
        history = read_object(reader, MAX_STATE, allow_nan=True).get("log_history")
    entries = history[-most:] if isinstance(history, list) else []
    found = ((entry.get("step"), entry) for entry in entries if isinstance(entry, dict))
    return [(step, entry) for step, entry in found if type(step) is int and 0 <= step <= MAX_STEP]


def _places(run: Run, id: CheckpointId, path: str) -> Iterator[tuple[Storage, str]]:
    """Yield the places of the checkpoint: moved aside, in place, kept."""
    mark, copy = read_quarantined(run, id), read_kept(run, id)
    if mark is not None:
        yield run.records, f"{mark.folder}/{mark.path}"
    yield run.storage, path
    if copy is not None:
        yield run.records, copy.checkpoint_key


def _sample(step: int, entry: dict[str, object]) -> Sample | None:
    loss, norm, rate = (_number(entry.get(name)) for name in ("loss", "grad_norm", "learning_rate"))
    return None if loss is None and norm is None else Sample(step, loss, norm, None, rate)


def _number(value: object) -> Number:
    return worded(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None

"""What the run's own log says: Hugging Face's ``trainer_state.json`` keeps the updates that were logged."""

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
    logged = reversed(_gradient_norms(run, checkpoint))
    bad = list(takewhile(lambda one: not math.isfinite(one[1]), logged))
    scaled = checkpoint.key("scaler.pt") in checkpoint.files or has_engine_states(checkpoint)
    if not bad or (len(bad) < _IN_A_ROW and (scaled or not any(math.isnan(norm) for _, norm in bad))):
        return None
    since, norm = bad[-1]
    return since, f"its trainer_state.json logs a gradient norm of {norm} since step {since}"


def logged_samples(run: Run, id: CheckpointId, path: str) -> tuple[Sample, ...]:
    """What a checkpoint's log says of the updates up to it, oldest first; nothing where there is no such log."""
    for storage, folder in _places(run, id, path):
        with contextlib.suppress(CkptguardError, JsonProblem):
            logged = _logged(storage, f"{folder}/{_FILE}".removeprefix("./"), _MOST)
            found = (_sample(step, entry) for step, entry in logged)
            return tuple(sorted((sample for sample in found if sample is not None), key=lambda sample: sample.step))
    return ()


def _gradient_norms(run: Run, checkpoint: Checkpoint) -> list[tuple[int, float]]:
    """(step, norm), oldest first; nothing of a log that cannot be parsed: that is for the checks."""
    with contextlib.suppress(ObjectMissingError, JsonProblem):
        found = ((step, entry.get("grad_norm")) for step, entry in _logged(run.storage, checkpoint.key(_FILE)))
        return [(step, norm) for step, norm in found if isinstance(norm, float)]
    return []


def _logged(storage: Storage, key: str, most: int = 0) -> list[tuple[int, dict[str, object]]]:
    """The last `most` (0: all) entries of a log, of those that have a step, with it."""
    with storage.open(key) as reader:
        history = read_object(reader, MAX_STATE, allow_nan=True).get("log_history")
    entries = history[-most:] if isinstance(history, list) else []
    found = ((entry.get("step"), entry) for entry in entries if isinstance(entry, dict))
    return [(step, entry) for step, entry in found if type(step) is int and 0 <= step <= MAX_STEP]


def _places(run: Run, id: CheckpointId, path: str) -> Iterator[tuple[Storage, str]]:
    """Where the checkpoint may lie: moved aside, in place, kept."""
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

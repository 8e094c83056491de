"""Logged samples: the updates that Hugging Face's ``trainer_state.json`` logged, for a report made from outside."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.errors import CkptguardError
from ckptguard.formats.strict_json import JsonProblem, read_object
from ckptguard.formats.trainer_state import MAX_SIZE
from ckptguard.records.kept import read_kept
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.run import Run
from ckptguard.storage import Storage
from ckptguard.values.ids import MAX_STEP, CheckpointId
from ckptguard.values.incident import Number, Sample, worded

_FILE = "trainer_state.json"
_MOST = 2000


def logged_samples(run: Run, id: CheckpointId, path: str) -> tuple[Sample, ...]:
    """What a checkpoint's log says of the updates up to it, oldest first; nothing where there is no such log."""
    for storage, folder in _places(run, id, path):
        try:
            with storage.open(f"{folder}/{_FILE}".removeprefix("./")) as reader:
                state = read_object(reader, MAX_SIZE, allow_nan=True)
        except (CkptguardError, JsonProblem):
            continue
        history = state.get("log_history")
        entries = history[-_MOST:] if isinstance(history, list) else []
        return tuple(sorted((s for e in entries if (s := _sample(e)) is not None), key=lambda s: s.step))
    return ()


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

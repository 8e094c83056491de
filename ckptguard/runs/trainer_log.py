"""Read a run's own log: Hugging Face's ``trainer_state.json``, or the ``metrics.csv`` of Lightning's CSVLogger."""

from __future__ import annotations

import contextlib
import csv
import heapq
import math
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile

from ckptguard.errors import CkptguardError, ObjectMissingError
from ckptguard.formats.json_files import MAX_STATE
from ckptguard.formats.strict_json import JsonProblem, read_object
from ckptguard.layouts import Checkpoint
from ckptguard.layouts.engine_states import has_engine_states
from ckptguard.records.kept import read_kept
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.run import Run
from ckptguard.storage import Entry, Storage
from ckptguard.values.curve import Row
from ckptguard.values.ids import MAX_STEP, CheckpointId
from ckptguard.values.incident import Sample, worded

_FILE, _TABLE = "trainer_state.json", "metrics.csv"
# What trainers write all the time, besides saves. Our own logs show nothing.
_LOG = re.compile(
    r"(metrics|progress)\.csv|events\.out\.tfevents\..+|.+\.wandb|slurm-.+\.out|log_\d+\.txt|(?!ckptguard).+\.log"
)
_MOST = 2000  # entries of a log that a report shows at most
_MOST_LOGS = 3
_MOST_BYTES = 16 << 20  # of a log that is read as a whole
_MOST_TABLE = 8 << 20  # of a longer table only its end counts
_MOST_HEADER = 1 << 16
_HELD_OUT = re.compile(r"val|test|eval", re.IGNORECASE)
# The names of columns, the best first. Users of Lightning choose them, it adds `_step` and `_epoch`.
_LOSSES = [r"(train[/_.]?)?loss_step", r"(train[/_.]?)?loss", r".*loss_step", r".*loss"]
_NORMS = [r"grad_?norm(_step)?", r"grad_2(\.0)?_norm_total(_step)?", r".*grad.*norm.*total.*", r".*grad_?norm.*"]
_RATES = [r"lr|learning_rate", r"lr-[^/]*", r"lr-.*", r".*learning_rate.*"]

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


def find_logs(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the run's own logs among its files, the one that was written last first: it may be half written."""

    def age(log: Entry) -> tuple[int, list[int], str]:
        return log.mtime_ns or 0, [int(number) for number in re.findall(r"\d{1,18}", log.key)], log.key

    logs = (entry for entry in entries if entry.kind == "file" and entry.name in (_FILE, _TABLE))
    return tuple(heapq.nlargest(_MOST_LOGS, logs, key=age))


def logged_at(entries: Iterable[Entry]) -> float | None:
    """Return when a trainer last wrote into a log in the run, in seconds since 1970; None if it has none."""
    logs = (entry.mtime_ns for entry in entries if entry.kind == "file" and _LOG.fullmatch(entry.name))
    newest = max((time for time in logs if time is not None), default=None)
    return None if newest is None else newest / 1e9


def read_log(storage: Storage, log: Entry) -> list[Row]:
    """Return the updates in a log, in their order. Raises CkptguardError, or ReadProblem if it is no log."""
    with storage.open(log.key) as reader:
        size = reader.entry.size
        if log.name == _FILE:
            found = _entries(read_object(reader, _MOST_BYTES, allow_nan=True))
            rows = [_row(step, entry) for step, entry in found]
        elif size <= _MOST_TABLE:
            rows = list(_table(reader.read(0, size)))
        else:
            header, _, _ = reader.read(0, min(size, _MOST_HEADER)).partition(b"\n")
            _, _, end = reader.read(size - _MOST_TABLE, _MOST_TABLE).partition(b"\n")
            rows = list(_table(header + b"\n" + end))
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _table(text: bytes) -> Iterator[Row]:
    """Yield the updates of a table. Its last line may be half written, and an update may have several lines."""
    try:
        lines = csv.reader(text.decode("utf-8", "replace").splitlines())
        names = next(lines, [])
        if "step" not in names:
            raise JsonProblem("it has no column of steps")
        at = names.index("step")
        columns = [_column(names, patterns) for patterns in (_LOSSES, _NORMS, _RATES)]
        nothing: list[float | None] = [None, None, None]
        step, signals = -1, nothing
        for cells in lines:
            if len(cells) != len(names) or not (cells[at].isascii() and cells[at].isdigit()):
                continue
            now = min(int(cells[at][:18]) + 1, MAX_STEP)  # Lightning counts from 0
            if now != step:
                if step >= 0:
                    yield step, signals[0], signals[1], None, signals[2]
                step, signals = now, nothing
            found = [None if column is None else _float(cells[column]) for column in columns]
            signals = [new if new is not None else old for new, old in zip(found, signals, strict=True)]
        if step >= 0:
            yield step, signals[0], signals[1], None, signals[2]
    except csv.Error as error:
        raise JsonProblem(f"it is no table: {error}") from error


def _column(names: list[str], patterns: list[str]) -> int | None:
    """Return the column whose name fits best."""
    for pattern in patterns:
        for place, name in enumerate(names):
            if re.fullmatch(pattern, name[:200], re.IGNORECASE) and not _HELD_OUT.search(name):
                return place
    return None


def _gradient_norms(run: Run, checkpoint: Checkpoint) -> list[tuple[int, float]]:
    """Return (step, norm) pairs, oldest first; empty if the log cannot be parsed, which a check reports."""
    with contextlib.suppress(ObjectMissingError, JsonProblem):
        found = ((step, entry.get("grad_norm")) for step, entry in _logged(run.storage, checkpoint.key(_FILE)))
        return [(step, norm) for step, norm in found if isinstance(norm, float)]
    return []


def _logged(storage: Storage, key: str, most: int = 0) -> list[tuple[int, dict[str, object]]]:
    """Return the last `most` entries (0: all) that have a step, with that step."""
    with storage.open(key) as reader:
        return _entries(read_object(reader, MAX_STATE, allow_nan=True), most)


def _entries(state: dict[str, object], most: int = 0) -> list[tuple[int, dict[str, object]]]:
    history = state.get("log_history")
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
    _, loss, norm, _, rate = _row(step, entry)
    return None if loss is None and norm is None else Sample(step, worded(loss), worded(norm), None, worded(rate))


def _row(step: int, entry: dict[str, object]) -> Row:
    loss, norm, rate = (_float(entry.get(name)) for name in ("loss", "grad_norm", "learning_rate"))
    return step, loss, norm, None, rate


def _float(value: object) -> float | None:
    """Return a number, or the text of one, as a float."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value[:400] if isinstance(value, str) else value)
    return None

"""The curve of a run: from the record of its guard, and from the trainer's own log where that knows more."""

from __future__ import annotations

import contextlib
import zlib

import msgspec

from ckptguard.catalogue.look import RunLook, below
from ckptguard.catalogue.rows import CurveRow
from ckptguard.decisions.thinning import thinned
from ckptguard.errors import ChangedWhileReadError, CkptguardError, DeniedError, ObjectMissingError
from ckptguard.formats.structure import ReadProblem
from ckptguard.records.run import Run
from ckptguard.records.samples import FOLDER as SAMPLES
from ckptguard.records.samples import read_samples
from ckptguard.runs.trainer_log import read_log
from ckptguard.values.curve import Curve, Row, curve_of
from ckptguard.values.ids import escape
from ckptguard.values.record_text import decodable

_RECORD = "the record of the guard"
_LONGEST = 300  # characters of a log's path


def see_curve(run: Run, look: RunLook) -> CurveRow | None:
    """Read the curve of a run. None if it must be tried again. What can never be read is passed over."""
    recorded: list[Curve] = []
    try:
        with contextlib.suppress(DeniedError):
            recorded = [samples.curve for samples in read_samples(run, below(SAMPLES, look.names)).values()]
        name, logged = _newest_log(run, look)
    except CkptguardError:
        return None
    steps = [step for curve in recorded for step in curve.step]
    first, last = min(steps, default=0), max(steps, default=-1)
    before, after = ([row for row in logged if row[0] < first], [row for row in logged if row[0] > last])
    parts = [part for part in (curve_of(before), *recorded, curve_of(after)) if part.step]
    curve = recorded[0] if parts and parts == recorded[:1] else thinned(parts)
    packed = zlib.compress(msgspec.json.encode(curve), 6) if curve.step else b""
    sources = [_RECORD] * bool(recorded) + [name] * bool(before or after)
    return CurveRow(identity=look.curve, source=" and ".join(sources) or None, packed=packed)


def _newest_log(run: Run, look: RunLook) -> tuple[str, list[Row]]:
    """Return the path of the newest log that can be read, and its updates. Raises StorageError."""
    for log in look.logs:
        with contextlib.suppress(ChangedWhileReadError, ObjectMissingError, DeniedError, ReadProblem):
            return escape(log.key[:_LONGEST]), read_log(run.storage, log)
    return "", []


def unpacked(row: CurveRow) -> Curve:
    """Return the curve in a row; an empty one if there is none."""
    if not row.packed:
        return Curve()
    return msgspec.json.decode(zlib.decompress(row.packed), type=decodable(Curve))

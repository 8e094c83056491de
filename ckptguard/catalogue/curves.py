"""The curve of a run: from the record of its guard, and from the trainer's own log where that knows more."""

from __future__ import annotations

import contextlib
import zlib

import msgspec

from ckptguard.catalogue.look import RunLook, below
from ckptguard.catalogue.rows import CurveRow
from ckptguard.decisions.thinning import thinned
from ckptguard.errors import CkptguardError
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
    """Read the curve of a run. None if the trainer's own log cannot be read now, and there is no other."""
    recorded = [samples.curve for samples in read_samples(run, below(SAMPLES, look.names)).values()]
    parts, sources = recorded, [_RECORD] * bool(recorded)
    if look.log is not None:
        logged: list[Row] | None = None
        with contextlib.suppress(CkptguardError, ReadProblem):
            logged = read_log(run.storage, look.log)
        if logged is None and not recorded:
            return None
        steps = [step for curve in recorded for step in curve.step]
        first, last = min(steps, default=0), max(steps, default=-1)
        before, after = (
            [row for row in logged or () if row[0] < first],
            [row for row in logged or () if row[0] > last],
        )
        parts = [curve_of(before), *recorded, curve_of(after)]
        sources += [escape(look.log.key[:_LONGEST])] * bool(before or after)
    curve = recorded[0] if recorded and parts == recorded[:1] else thinned(part for part in parts if part.step)
    packed = zlib.compress(msgspec.json.encode(curve), 6) if curve.step else b""
    return CurveRow(identity=look.curve, source=" and ".join(sources) or None, packed=packed)


def unpacked(row: CurveRow) -> Curve:
    """Return the curve in a row; an empty one if there is none."""
    if not row.packed:
        return Curve()
    return msgspec.json.decode(zlib.decompress(row.packed), type=decodable(Curve))

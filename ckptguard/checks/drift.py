"""Find weights that jumped, collapsed or died since the last good checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptguard.checks.completeness import precedes
from ckptguard.checks.evidence import Evidence
from ckptguard.checks.headroom import largest_weight
from ckptguard.checks.order import began_anew
from ckptguard.checks.stale import STATISTICS
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import MOST_CONSTANT, Finding, Severity

_FACTOR = 10.0
_SMALLEST = 64  # elements; a smaller tensor may well change by a factor
_NEGLIGIBLE = 1e-3  # of a typical weight; smaller ones may vanish unnoticed
_NAMED = 3
_NEARLY_ALL = 0.9  # share of zeros of a dead weight
_SPARSE = 0.5  # with this share of zeros it was already pruned before
_SICK = 0.25  # share of the weights that were alive; a reset head has fewer
_BEGINS_AT_ZERO = re.compile(r"(?:.*[._])?(?:lora_(?:B|embedding_A|up)|hada_w2_a|lokr_w\d(?:_\w)?)(?:\..*)?")


class Magnitudes(NamedTuple):
    """One weight's largest magnitude, and its root mean square if it was computed."""

    elements: int
    largest: float
    rms: float | None


class _Jump(NamedTuple):
    name: str
    what: str
    before: float
    now: float

    @property
    def factor(self) -> float:
        """How far apart the two are, in either direction."""
        low, high = sorted((self.before, self.now))
        return high / low if low else math.inf


def check_drift(evidence: Evidence) -> Iterator[Finding]:
    """Report how many weights grew or fell tenfold as one notice, with the worst of them: it may be intended.

    A weight that starts at zero (a LoRA's B, a fresh bias) grows by any factor while small. So growth counts only above
    this model's typical weight. Dead weights are a sickness if there are many, otherwise warnings.
    """
    if evidence.reference is None or precedes(evidence, evidence.reference):
        return
    yield from _died(evidence, evidence.reference)
    role = "model" if any(t.role == "model" for f in evidence.reference.files for t in f.tensors) else "ema"
    before = _joined(
        (t.name, Magnitudes(math.prod(t.shape), t.largest, t.rms))
        for f in evidence.reference.files
        for t in f.tensors
        if t.role == role and t.largest is not None
    )
    if not before:
        # The reference was sealed without magnitudes: only the largest of all is known, from its verdict.
        largest, name, file = largest_weight(evidence)
        former = evidence.reference_facts.largest_magnitude if evidence.reference_facts else None
        if former and largest > _FACTOR * former:
            message = f"the largest magnitude grew from {former:.6g} to {largest:.6g} since the reference"
            yield Finding("drift", Severity.NOTICE, message, file, name)
        return
    now = _joined((t.name, Magnitudes(math.prod(t.shape), n.largest, n.rms)) for t, n in evidence.weights())
    jumps = sorted(_jumps(before, now), key=lambda j: (-j.factor, j.name))
    if not jumps:
        return
    worst = "; ".join(f"{j.name}: {j.what} {j.before:.6g} became {j.now:.6g}" for j in jumps[:_NAMED])
    more = f", and {len(jumps) - _NAMED} more" if len(jumps) > _NAMED else ""
    where = f"{evidence.reference.path}{evidence.reference.id.nth_save}"
    noun = "weight" if len(jumps) == 1 else "weights"
    message = f"{len(jumps)} {noun} grew tenfold or fell to a tenth since {where}: {worst}{more}"
    file = next((t.file for t, _ in evidence.weights() if t.name == jumps[0].name), None)
    yield Finding("drift", Severity.NOTICE, message, file, jumps[0].name, len(jumps))


def _died(evidence: Evidence, reference: Manifest) -> Iterator[Finding]:
    """Find matrices that now hold a single value or almost only zeros, unlike in the reference.

    They may be what was left after something set NaN to zero. If training restarted, as its counters show, they are
    normal.
    """
    facts = evidence.reference_facts
    if facts is None or facts.largest_magnitude is None or len(facts.constant) >= MOST_CONSTANT:
        return
    zeros = {t.name: t.zeros for f in reference.files for t in f.tensors}
    alive, dead = 0, []
    for tensor, numbers in evidence.weights():
        begins_so = tensor.name in facts.constant or _BEGINS_AT_ZERO.fullmatch(tensor.name)
        if len(tensor.shape) < 2 or numbers.count < 2 or tensor.name not in zeros or begins_so:
            continue
        alive += 1
        before = zeros[tensor.name]
        emptied = before is not None and before < _SPARSE and (numbers.zeros or 0.0) >= _NEARLY_ALL
        equal = numbers.constant or numbers.zero
        if numbers.first_bad is None and (equal or emptied):
            dead.append((tensor, "all its elements are equal" if equal else "nearly all of it is zero"))
    if not dead or began_anew(evidence, reference):
        return
    first, _ = dead[0]
    if len(dead) > 1 and len(dead) >= _SICK * alive:
        where = f"{reference.path}{reference.id.nth_save}"
        message = f"{len(dead)} of {alive} weights that were alive in {where} are zero or constant now"
        yield Finding("drift", Severity.SICKNESS, message, first.file, first.name, len(dead))
        return
    for tensor, what in dead:
        message = f"{what}, unlike in the reference"
        yield Finding("drift", Severity.WARNING, message, tensor.file, tensor.name)


def _jumps(before: dict[str, Magnitudes], now: dict[str, Magnitudes]) -> Iterator[_Jump]:
    typical_rms = _typical(m.rms for m in before.values())
    typical_largest = _typical(m.largest for m in before.values())
    for name, new in now.items():
        old = before.get(name)
        if old is None or old.elements != new.elements or STATISTICS.fullmatch(name):
            continue
        if old.rms is not None and new.rms is not None and _is_jump(old.rms, new.rms, typical_rms):
            yield _Jump(name, "rms", old.rms, new.rms)
        elif _is_jump(old.largest, new.largest, typical_largest):
            yield _Jump(name, "largest magnitude", old.largest, new.largest)


def _is_jump(old: float, new: float, typical: float) -> bool:
    grew = new > _FACTOR * old and new > typical
    return old > 0 and (grew or (new * _FACTOR < old and old > _NEGLIGIBLE * typical))


def _typical(values: Iterable[float | None]) -> float:
    """Return the median of the values that are not zero. It is the upper one, so that a LoRA's grown half counts."""
    present = sorted(v for v in values if v)
    return present[len(present) // 2] if present else 0.0


def _joined(tensors: Iterable[tuple[str, Magnitudes]]) -> dict[str, Magnitudes]:
    """Group by name: the pieces of one weight on several ranks count together."""
    found: dict[str, Magnitudes] = {}
    for name, piece in tensors:
        other = found.get(name)
        if other is not None:
            elements = other.elements + piece.elements
            rms = None
            if other.rms is not None and piece.rms is not None and elements:
                rms = math.hypot(other.rms * math.sqrt(other.elements), piece.rms * math.sqrt(piece.elements))
                rms /= math.sqrt(elements)
            piece = Magnitudes(elements, max(other.largest, piece.largest), rms)
        found[name] = piece
    return {name: m for name, m in found.items() if m.elements >= _SMALLEST}

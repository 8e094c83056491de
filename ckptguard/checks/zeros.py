"""Check that weights are not zero where a writer, a download or a disk may have left nothing.

Some layers begin at zero: a LoRA's second half, zero convolutions, residual gains. Then each of their kind is zero, and
kinds differ in their names, digits aside. Zeros that nothing wrote do not stop at kinds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from ckptguard.checks.evidence import Evidence, ScannedTensor
from ckptguard.checks.schema import is_of_rank
from ckptguard.checks.stale import is_master
from ckptguard.checks.state import State
from ckptguard.formats import UNSUMMED
from ckptguard.values.verdict import Finding, Severity

_SHARE = 0.1  # of a file's weights or of a matrix: more zeros at its end are no padding
_HINT = "as after a killed writer or a broken download; if they are meant: ckptguard clear"
_PART = re.compile(r"\d+|\[.*\]$")


def check_zeros(evidence: Evidence) -> Iterator[Finding]:
    """Report weights that are all zero, of the checkpoint or a file, and files that end in zeros.

    If a matrix was not zero in the reference it is an error, otherwise a doubt. What may be layers that begin at zero
    is a warning.
    """
    weights = _weights(evidence)
    if weights and all(map(_is_zero, weights)):
        if not any(len(t.shape) > 1 for t in weights):  # of matrices check_finite says so
            message = f"all {len(weights)} weights are zero, {_HINT}"
            yield Finding("zeros", Severity.SICKNESS, message, weights[0].file, weights[0].name, len(weights))
        return
    state = State(evidence)
    for file in evidence.scan.files:
        own = [t for t in weights if t.file == file.entry.key and t.span is not None]
        own.sort(key=lambda t: (-(t.span or 0), t.name))
        own = list({(t.span, t.shape): t for t in reversed(own)}.values())[::-1]  # under two names it is one
        if own and (_is_zero(own[0]) or _is_cut(own[0])):  # whatever an optimizer is called, its zeros are no weights
            of_optimizer = state.of(file).role_of_number
            own = [t for t in own if is_master(t.role, t.name) or of_optimizer(t.name) != "optimizer"]
        zeros = list(takewhile(_is_zero, own))
        whole = len(zeros) == len(own)
        if not own or is_of_rank(file.entry.key) or not (whole or file.structure.format in UNSUMMED):
            continue
        # Each storage of torch's old format states its size before it, so what nothing wrote is in the last one only.
        last = len(file.structure.spans) - 1 if file.structure.format == "torch_legacy" and not whole else None
        unwritten = [t for t in zeros if last is None or t.span == last]
        if zeros or _is_cut(own[0]):
            yield from _of_file(evidence, zeros, unwritten, own, weights)


def _of_file(
    evidence: Evidence,
    zeros: Sequence[ScannedTensor],
    unwritten: Sequence[ScannedTensor],
    own: Sequence[ScannedTensor],
    weights: Sequence[ScannedTensor],
) -> Iterator[Finding]:
    """Report the zeros at the end of a file, or in all of it. `unwritten` are those that a writer may have left out."""
    facts = evidence.reference_facts
    matrices = [t for t in zeros if len(t.shape) > 1]
    edge = own[len(zeros)] if len(zeros) < len(own) else None
    if facts is not None:
        known = [t for t in matrices if t.name not in facts.constant]
        severity = Severity.ERROR
    else:
        known = matrices or ([edge] if edge is not None and _is_cut(edge) else [])
        kinds, alive = Counter(map(_kind, weights)), {_kind(t) for t in weights if not _is_zero(t)}
        share = sum(map(_elements, zeros)) / sum(map(_elements, own))
        several = len([t for t in unwritten if len(t.shape) > 1 or t.name.endswith("weight")]) > 1
        alone = any(kinds[_kind(t)] == 1 for t in matrices) and several and share >= _SHARE
        broken = any(_kind(t) in alive for t in matrices)
        doubt = broken or alone or (edge is not None and _is_cut(edge))
        severity = Severity.SICKNESS if doubt else Severity.WARNING
    if not known or (severity is Severity.WARNING and len(known) == 1):
        return
    what = "all of it is zero" if edge is None else f"it ends in {len(known)} matrices of zeros"
    yield Finding("zeros", severity, f"{what}, {_HINT}", known[0].file, known[0].name, len(known))


def _is_cut(tensor: ScannedTensor) -> bool:
    """True for a matrix whose last part is zero, and whose first part is not."""
    numbers = tensor.numbers
    if numbers is None or numbers.first_bad is not None or len(tensor.shape) < 2:  # such as a mask
        return False
    return 0 < _SHARE * numbers.count <= numbers.ending < numbers.count


def _weights(evidence: Evidence) -> list[ScannedTensor]:
    """Return the weights of several elements; where only an optimizer holds any, its master weights."""
    found = [tensor for tensor, numbers in evidence.weights() if numbers.count > 1]
    masters = (t for t in evidence.tensors() if t.numbers is not None and t.numbers.count > 1)
    return found or [t for t in masters if is_master(t.role, t.name)]


def _is_zero(tensor: ScannedTensor) -> bool:
    return tensor.numbers is not None and tensor.numbers.zero


def _kind(tensor: ScannedTensor) -> str:
    return _PART.sub("#", tensor.name)


def _elements(tensor: ScannedTensor) -> int:
    return math.prod(tensor.shape)

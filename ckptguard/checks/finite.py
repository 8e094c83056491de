"""Check that weights, buffers, optimizer state and the numbers beside them are finite."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from functools import partial

from ckptguard.checks.evidence import Evidence, ScannedTensor
from ckptguard.checks.state import State
from ckptguard.formats import Leaf
from ckptguard.scan.result import Numbers, ScannedFile
from ckptguard.values.masks import may_be_mask
from ckptguard.values.verdict import Finding, Severity

_MOST_PARTS = 64  # parts of a name to check
_COUNTED = re.compile(r"(?<!\S)(\d{1,18}) (NaN|[+-]Inf)")
_ALIKE = re.compile(r"all (\d{1,18}) elements are (NaN|[+-]Inf)")
_finding = partial(Finding, "finite")


def check_finite(evidence: Evidence) -> Iterator[Finding]:
    """Report NaN or Inf in state as an error with tensor, count and first index; elsewhere as a notice.

    A mask is a notice, too: -Inf beside one single finite value, no NaN or +Inf, and a mask's name or form. So are
    tensors with the same bytes in the reference, and tensors that the user allows.
    """
    same: set[tuple[str, str]] = set()
    learnt: frozenset[str] | None = None
    state = State(evidence)
    for file in evidence.scan.files:
        for tensor in evidence.tensors_of(file):
            numbers = tensor.numbers
            if numbers is None or not (numbers.nan or numbers.posinf or numbers.neginf):
                continue
            if learnt is None:
                learnt, same = _named_by_optimizer(evidence), _unchanged_spans(evidence)
            in_reference = (tensor.file, tensor.name) in same
            is_state = _is_state(state, file, tensor, numbers)
            yield _non_finite(evidence, tensor, numbers, in_reference=in_reference, learnt=learnt, is_state=is_state)
    yield from _degenerate(evidence)
    yield from _loose_numbers(evidence, state)
    for file in evidence.scan.files:
        unread = file.structure.unread
        if unread:
            more = f" (so may {len(unread) - 1} more values in this file)" if len(unread) > 1 else ""
            message = f"it may hold numbers in a form that ckptguard does not read{more}"
            yield _finding(Severity.WARNING, message, file.entry.key, unread[0], len(unread))


def _is_state(state: State, file: ScannedFile, tensor: ScannedTensor, numbers: Numbers) -> bool:
    """True if a tensor that is not finite makes the checkpoint bad. One float is judged as a number."""
    own = state.of(file)
    if own.is_weight(tensor) and own.holds(tensor):
        return True
    if own.weighs(own.as_number(tensor, numbers), "nan" if numbers.nan else "inf"):
        return True
    return not state.has_any() and (numbers.count > 1 or bool(numbers.nan))


def is_mask(tensor: ScannedTensor, numbers: Numbers, learnt: Collection[str] = ()) -> bool:
    """True for a mask of a model: no NaN, no +Inf, -Inf beside one single finite value, and a mask's name or form.

    A learnt tensor is never a mask, by its name or because it is among the `learnt`.
    """
    if tensor.role == "optimizer" or not numbers.single_finite:
        return False
    if not numbers.neginf or numbers.nan or numbers.posinf:
        return False
    if not may_be_mask(tensor.name, tensor.shape, numbers.neginf, numbers.first_bad):
        return False
    parts = tensor.name.split(".")
    return not any(".".join(parts[start:]) in learnt for start in range(min(len(parts), _MOST_PARTS)))


def _named_by_optimizer(evidence: Evidence) -> frozenset[str]:
    """Return the parameters whose optimizer state is kept by name (``optim.state.layers.0.weight.exp_avg``)."""
    states = [f".{t.name}".partition(".state.")[2] for t in evidence.tensors() if t.role == "optimizer"]
    names = (state.rpartition(".")[0] for state in states)
    return frozenset(name for name in names if name and not name.isdecimal())


def _non_finite(
    evidence: Evidence,
    tensor: ScannedTensor,
    numbers: Numbers,
    *,
    in_reference: bool,
    learnt: Collection[str],
    is_state: bool,
) -> Finding:
    count = numbers.nan + numbers.posinf + numbers.neginf
    counts = ((numbers.nan, "NaN"), (numbers.posinf, "+Inf"), (numbers.neginf, "-Inf"))
    what = ", ".join(f"{n} {word}" for n, word in counts if n)
    message = f"{what} of {numbers.count} elements, the first at index {numbers.first_bad}"
    if count == numbers.count and sum(n > 0 for n, _ in counts) == 1:
        message = f"all {count} elements are {what.partition(' ')[2]}"
    severity = Severity.NOTICE
    if not is_state:
        message += "; it is not model or optimizer state"
    elif any(p == tensor.name or fnmatchcase(tensor.name, p) for p in evidence.allow_nonfinite):
        message += "; allowed by --allow-nonfinite"
    elif in_reference and not numbers.nan:  # a constant buffer may hold infinities, but never NaN
        message += "; the reference has the same bytes"
    elif is_mask(tensor, numbers, learnt):
        message += "; it looks like a mask"
    elif _is_open_bound(tensor.name, numbers):
        message += "; it is an open bound, which may be infinite"
    else:
        severity = Severity.ERROR
    return _finding(severity, message, tensor.file, tensor.name, count)


def _is_open_bound(name: str, numbers: Numbers) -> bool:
    """True if all of it is infinite and its name is that of a bound. Constraints of Gaussian processes have such
    buffers."""
    infinite = {"upper_bound": numbers.posinf, "lower_bound": numbers.neginf}
    return infinite.get(name.rpartition(".")[2], 0) == numbers.count


def _unchanged_spans(evidence: Evidence) -> set[tuple[str, str]]:
    """Return each (file, tensor) whose bytes are those of the reference."""
    if evidence.reference is None:
        return set()
    stored = ((f, t, t.span) for f in evidence.reference.files for t in f.tensors if t.span is not None)
    before = {(t.name, t.role): f.spans[span].blake3 for f, t, span in stored}
    return {
        (t.file, t.name)
        for f in evidence.scan.files
        for t in evidence.tensors_of(f)
        if t.span is not None and before.get((t.name, t.role)) == f.span_digests[t.span]
    }


def _degenerate(evidence: Evidence) -> Iterator[Finding]:
    """Report a model whose float matrices are all zero: zeros pass every digest. A single number is no matrix."""
    matrices = [(t, n) for t, n in evidence.weights() if len(t.shape) >= 2 and n.count > 1]
    if matrices and all(n.zero for _, n in matrices):
        message = f"all {len(matrices)} float matrices of the model are zero"
        yield _finding(Severity.ERROR, message, matrices[0][0].file, matrices[0][0].name)


def _loose_numbers(evidence: Evidence, state: State) -> Iterator[Finding]:
    """Report numbers beside the tensors that are not finite: errors among weights, in optimizers, schedulers and
    scalers, and wherever nothing else is state.

    A logged gradient norm is a notice; check_stale judges it. Notices about one subtree of a file are merged. A
    configuration may hold anything.
    """
    for file in evidence.scan.files:
        harmless: dict[str, list[Leaf]] = {}
        for leaf in file.structure.leaves:
            if math.isfinite(leaf.value):
                continue
            bad = "nan" if math.isnan(leaf.value) else "inf"
            heavy = state.of(file).weighs(leaf, bad) or (bad == "nan" and not state.has_any())
            first = leaf.name.partition(".")[0]
            if heavy:
                yield _number(file, [leaf], Severity.ERROR)
            elif not first.endswith(("config", "hyper_parameters")):
                harmless.setdefault(first, []).append(leaf)
        for leaves in harmless.values():
            yield _number(file, leaves, Severity.NOTICE)


def _number(file: ScannedFile, leaves: list[Leaf], severity: Severity) -> Finding:
    more = f" (and {len(leaves) - 1} more beside it are not finite, either)" if len(leaves) > 1 else ""
    return _finding(severity, f"this number is {leaves[0].value}{more}", file.entry.key, leaves[0].name, len(leaves))


def counts_in(message: str) -> tuple[int, int] | None:
    """Return how many NaN and infinities a finding of this check is about, by its message; None if it names none."""
    alike = _ALIKE.match(message)
    found = [(alike[1], alike[2])] if alike else _COUNTED.findall(message.partition(" of ")[0])
    nan = sum(int(count) for count, word in found if word == "NaN")
    infinite = sum(int(count) for count, word in found if word != "NaN")
    return (nan, infinite) if nan or infinite else None

"""Is everything there that the layout, the manifest and the reference say belongs to it?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import takewhile

from ckptguard.checks.evidence import Evidence
from ckptguard.checks.resumable import roles_present
from ckptguard.formats import tensor_suffix
from ckptguard.formats.suffixes import may_be_foreign
from ckptguard.layouts.roles import file_role, key_role
from ckptguard.scan.result import ScannedFile
from ckptguard.values.ids import numbers_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Finding, Severity

_STATE_ROLES = ("model", "optimizer", "ema")
_SETTINGS = re.compile(
    r"(?:train(?:ing)?_)?(?:args|options|config|cfg|h(?:yper_?)?param(?:eter)?s|settings|counters?|metrics|meta)(?:[-_.].*)?"
)
_TENSORS_ONLY = ("safetensors", "npz", "npy")  # formats that are for nothing else
_finding = partial(Finding, "completeness")


def check_completeness(evidence: Evidence) -> Iterator[Finding]:
    """Errors for gaps that make the checkpoint unusable, warnings for the others. Files added after the seal
    (evaluation results, a README) are a notice."""
    broken = {f.entry.key for f in evidence.scan.files if f.structure.problems}
    for gap in evidence.gaps:
        if gap.file in broken:
            continue  # its own finding says why
        severity = Severity.ERROR if gap.fatal else Severity.WARNING
        yield _finding(severity, gap.message, gap.file)
    for file in evidence.scan.files:
        if file.structure.truncated and not file.structure.problems:
            yield _finding(Severity.ERROR, "it is not whole yet", file.entry.key)
    yield from _nothing_held(evidence)
    yield from _zero_tails(evidence)
    if evidence.sealed is not None:
        yield from _against_seal(evidence, evidence.sealed)
    else:
        yield from _unbound(evidence)
    if evidence.reference is not None:
        yield from _against_reference(evidence, evidence.reference)


def _nothing_held(evidence: Evidence) -> Iterator[Finding]:
    """A checkpoint of weights that holds no number at all is no checkpoint."""
    meant = [f for f in evidence.scan.files if tensor_suffix(f.entry.key) and _means_weights(evidence, f)]
    held = any(f.structure.spans or any(leaf.of_array for leaf in f.structure.leaves) for f in evidence.scan.files)
    if meant and not held:
        yield _finding(Severity.ERROR, "it holds no tensors", meant[0].entry.key)


def _means_weights(evidence: Evidence, file: ScannedFile) -> bool:
    """True if a whole file was to hold some: by its name, by its checkpoint's, which states a step, or by keys that
    are for weights (of which another rank may have saved none). Settings and counters in a file of their own
    (``args_100.pt``) were not, nor what only happens to be named .bin, nor the state of an optimizer without any."""
    stated = file_role(file.entry.key)
    if file.structure.problems or stated not in ("", "model", "ema") or _SETTINGS.fullmatch(file.entry.name.lower()):
        return False
    if stated or evidence.checkpoint.step is not None or file.structure.format in _TENSORS_ONLY:
        return True
    if not file.structure.leaves:
        return not may_be_foreign(file.entry.key)
    return any(key_role(c) in _STATE_ROLES for c in file.structure.containers)


def _zero_tails(evidence: Evidence) -> Iterator[Finding]:
    """A killed writer leaves zeros: safetensors sets a file's full length first. Matrices at the end of a file that
    are all zero, and were not so in the reference, are an error; without a reference, a warning."""
    facts = evidence.reference_facts
    for file in evidence.scan.files:
        if file.structure.format != "safetensors":
            continue
        tensors = [t for t in evidence.tensors_of(file) if t.span is not None and t.numbers is not None]
        tensors.sort(key=lambda t: -(t.span or 0))
        zeros = takewhile(lambda t: t.numbers is not None and t.numbers.zero, tensors)
        # A moment is zero for as long as its weight gets no gradient: only weights tell.
        weights = [t.name for t in zeros if len(t.shape) >= 2 and t.role == "model"]
        tail = [name for name in weights if facts is None or name not in facts.constant]
        if tail and (facts is not None or len(tail) > 1):
            message = f"it ends in {len(tail)} matrices of zeros, as a killed writer leaves it"
            yield _finding(Severity.WARNING if facts is None else Severity.ERROR, message, file.entry.key, tail[0])


def _unbound(evidence: Evidence) -> Iterator[Finding]:
    """Files of two saves may each be whole: only a manifest, or an index that lists all of them, tells. A DCP's
    ``.metadata`` says where pieces lie and how long they are, but no piece says of which save or tensor it is."""
    files = [f for f in evidence.scan.files if tensor_suffix(f.entry.key)]
    state = {f.entry.key for f in files if set(evidence.roles[f.entry.key]).intersection(_STATE_ROLES)}
    for file in evidence.scan.files:
        folder = file.entry.key.rpartition("/")[0]
        shards = {f"{folder}/{name}" if folder else name for name in set((file.structure.weight_map or {}).values())}
        if state & shards:
            state = state - shards | {file.entry.key}
    if len(state) > 1:
        message = f"whether its {len(state)} files with state are of one save is unknown: nothing but a manifest tells"
        yield _finding(Severity.NOTICE, message)


def _against_seal(evidence: Evidence, sealed: Manifest) -> Iterator[Finding]:
    present = set(evidence.checkpoint.files)
    told = {gap.file for gap in evidence.gaps if gap.fatal}
    for file in sealed.files:
        if file.path not in present and file.path not in told:
            yield _finding(Severity.ERROR, "the manifest lists this file, but it is not there", file.path)
    for path in sorted(present - {f.path for f in sealed.files}):
        yield _finding(Severity.NOTICE, "was added after the checkpoint was sealed", path)


def _against_reference(evidence: Evidence, reference: Manifest) -> Iterator[Finding]:
    """Files that the reference has, digits in names aside, and this checkpoint has not; and fewer RNG states: every
    rank writes its own, and which is the last of them nothing else may state."""
    where, present = f"{reference.path}{reference.id.nth_save}", roles_present(evidence)
    now = Counter(_shape(evidence.checkpoint.inside(key)) for key in evidence.checkpoint.files)
    before: Counter[str] = Counter()
    for file in reference.files:
        inside = file.path.removeprefix(reference.path + "/")
        before[_shape(inside)] += 1
        if evidence.checkpoint.layout != "file" and _shape(inside) not in now:
            roles = {t.role for t in file.tensors}.intersection(_STATE_ROLES)
            if roles and (evidence.sealed is not None or (roles == {"optimizer"} and "optimizer" in present)):
                continue  # nothing is unfinished: other tensors than the reference's are a question, of check_schema
            severity = Severity.ERROR if roles else Severity.WARNING
            if roles == {"optimizer"} and precedes(evidence, reference):
                severity = Severity.NOTICE  # optimizer state appears with the first update
            yield _finding(severity, f"{where} has {inside}; this checkpoint has nothing like it")
    for name, count in sorted(before.items()):
        if file_role(name) == "rng" and 0 < now[name] < count:
            yield _finding(Severity.WARNING, f"{where} has {count} files {name}; here are {now[name]}")


def precedes(evidence: Evidence, reference: Manifest) -> bool:
    """True if the checkpoint is of an earlier step than its reference, which only the first ones of a run are."""
    own = numbers_of(evidence.checkpoint.step)
    return own != () and own < numbers_of(reference.step)


def _shape(name: str) -> str:
    return re.sub(r"\d+", "#", name)

"""Check that everything exists that the layout, the manifest and the reference imply."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial

from ckptguard.checks.evidence import Evidence
from ckptguard.checks.resumable import roles_present
from ckptguard.formats import tensor_suffix
from ckptguard.formats.table import may_be_foreign
from ckptguard.layouts.roles import file_role, key_role
from ckptguard.scan.result import ScannedFile
from ckptguard.values.ids import numbers_of
from ckptguard.values.manifest import WHOLE_FORMATS, Manifest
from ckptguard.values.verdict import Finding, Severity

_STATE_ROLES = ("model", "optimizer", "ema")
_SETTINGS = re.compile(
    r"(?:train(?:ing)?_)?(?:args|options|config|cfg|h(?:yper_?)?param(?:eter)?s|settings|counters?|metrics|meta)(?:[-_.].*)?"
)
_TENSORS_ONLY = ("safetensors", "npz", "npy")  # formats that hold nothing else
_OF_STATE = WHOLE_FORMATS | {"torch_zip"}  # by their bytes, whatever their names say
_finding = partial(Finding, "completeness")


def check_completeness(evidence: Evidence) -> Iterator[Finding]:
    """Report gaps: errors if the checkpoint is unusable without the file, else warnings.

    Files added after the seal (evaluation results, a README) are a notice.
    """
    broken = {f.entry.key for f in evidence.scan.files if f.structure.problems}
    for gap in evidence.gaps:
        if gap.file in broken:
            continue  # its own finding says why
        severity = Severity.ERROR if gap.fatal else Severity.WARNING
        yield _finding(severity, gap.message, gap.file)
    for file in evidence.scan.files:
        if file.structure.truncated and not file.structure.problems:
            yield _finding(Severity.ERROR, "it is not complete yet", file.entry.key)
    yield from _nothing_held(evidence)
    if evidence.sealed is not None:
        yield from _against_seal(evidence, evidence.sealed)
    else:
        yield from _unbound(evidence)
    if evidence.reference is not None:
        yield from _against_reference(evidence, evidence.reference)


def _nothing_held(evidence: Evidence) -> Iterator[Finding]:
    """A checkpoint of weights without any number is no checkpoint."""
    if any(f.structure.spans or any(leaf.of_array for leaf in f.structure.leaves) for f in evidence.scan.files):
        return
    files = (f for f in evidence.scan.files if tensor_suffix(f.entry.key) or f.structure.format in _OF_STATE)
    meant = next((f for f in files if _means_weights(evidence, f)), None)
    if meant is not None:
        yield _finding(Severity.ERROR, "it holds no tensors", meant.entry.key)


def _means_weights(evidence: Evidence, file: ScannedFile) -> bool:
    """True if a file should hold weights: by its name, by its checkpoint's name with a step, or by its keys.

    Not meant are files of settings and counters (``args_100.pt``), optimizer state without any tensor, and foreign .bin
    files. A key for weights counts even if this rank saved none.
    """
    stated = file_role(file.entry.key)
    if (
        file.structure.problems
        or file.structure.not_understood
        or stated not in ("", "model", "ema")
        or _SETTINGS.fullmatch(file.entry.name.lower())
    ):
        return False
    if stated or evidence.checkpoint.step is not None or file.structure.format in _TENSORS_ONLY:
        return True
    if not file.structure.leaves:
        return not may_be_foreign(file.entry.key)
    return any(key_role(c) in _STATE_ROLES for c in file.structure.containers)


def _unbound(evidence: Evidence) -> Iterator[Finding]:
    """Report files that may belong to two saves, each of them whole. Only a manifest or a full index could show that.

    A DCP's ``.metadata`` says where pieces are and how long, but no piece says to which save or tensor it belongs.
    """
    files = [f for f in evidence.scan.files if tensor_suffix(f.entry.key)]
    state = {f.entry.key for f in files if set(evidence.roles[f.entry.key]).intersection(_STATE_ROLES)}
    for file in evidence.scan.files:
        folder = file.entry.key.rpartition("/")[0]
        shards = {f"{folder}/{name}" if folder else name for name in set((file.structure.weight_map or {}).values())}
        if state & shards:
            state = state - shards | {file.entry.key}
    if len(state) > 1:
        message = f"its {len(state)} files with state may come from different saves: only a manifest could tell"
        yield _finding(Severity.NOTICE, message)


def _against_seal(evidence: Evidence, sealed: Manifest) -> Iterator[Finding]:
    present = set(evidence.checkpoint.files)
    reported = {gap.file for gap in evidence.gaps if gap.fatal}
    for file in sealed.files:
        if file.path not in present and file.path not in reported:
            yield _finding(Severity.ERROR, "the manifest lists this file, but it is not there", file.path)
    for path in sorted(present - {f.path for f in sealed.files}):
        yield _finding(Severity.NOTICE, "was added after the checkpoint was sealed", path)


def _against_reference(evidence: Evidence, reference: Manifest) -> Iterator[Finding]:
    """Report files that the reference has, digits in names aside, and this checkpoint lacks; also missing RNG states.

    Every rank writes its own RNG state, and nothing else may say how many there are.
    """
    where, present = f"{reference.path}{reference.id.nth_save}", roles_present(evidence)
    now = Counter(_shape(evidence.checkpoint.inside(key)) for key in evidence.checkpoint.files)
    before: Counter[str] = Counter()
    for file in reference.files:
        inside = file.path.removeprefix(reference.path + "/")
        before[_shape(inside)] += 1
        if evidence.checkpoint.layout != "file" and _shape(inside) not in now:
            roles = {t.role for t in file.tensors}.intersection(_STATE_ROLES)
            if roles and (evidence.sealed is not None or (roles == {"optimizer"} and "optimizer" in present)):
                continue  # nothing is unfinished: check_schema asks about other tensors
            severity = Severity.ERROR if roles else Severity.WARNING
            if roles == {"optimizer"} and precedes(evidence, reference):
                severity = Severity.NOTICE  # optimizer state appears with the first update
            yield _finding(severity, f"{where} has {inside}; this checkpoint has no such file")
    for name, count in sorted(before.items()):
        if file_role(name) == "rng" and 0 < now[name] < count:
            yield _finding(Severity.WARNING, f"{where} has {count} files {name}; this checkpoint has {now[name]}")


def precedes(evidence: Evidence, reference: Manifest) -> bool:
    """True if the checkpoint has an earlier step than its reference, as only the first of a run have."""
    own = numbers_of(evidence.checkpoint.step)
    return own != () and own < numbers_of(reference.step)


def _shape(name: str) -> str:
    return re.sub(r"\d+", "#", name)

"""Do keys, shapes and dtypes match the reference?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from ckptguard.checks.completeness import precedes
from ckptguard.checks.evidence import Evidence, ScannedTensor
from ckptguard.values.manifest import Manifest, Tensor
from ckptguard.values.schema import SchemaDifference, compare_schemas, schema_of
from ckptguard.values.verdict import Finding, Severity

_DCP_METADATA = "dcp_metadata"
_ACCEPT = "if the change is deliberate: ckptguard accept RUN --step N"
# What is laid out by rank: its sizes, and how many there are, change with the number of ranks.
_BY_RANK = re.compile(
    r".*zero_pp_rank_\d+_mp_rank_\d+_(?:optim|model)_states\.pt|.*distrib_optim\.pt|.*\.distcp|.*shard-\d+-model-.*\.safetensors"
)
_FLAT = re.compile(
    r"(?:.*[._])?flat_param(?:_\d+)?(?:\..*)?|(?:.*\.)?(?:single_partition_of_)?fp32(?:_flat)?_groups\b.*"
)


class _Place(NamedTuple):
    """One tensor of either side. `kind`: its file's name in the checkpoint, without digits; `partitioned`: its shape
    depends on the number of ranks."""

    file: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    partitioned: bool


def check_schema(evidence: Evidence) -> Iterator[Finding]:
    """Errors for model tensors that are missing, unexpected, reshaped or re-typed, and for optimizer state that
    vanished or was reshaped: against this checkpoint's own manifest if it was sealed, and against the reference."""
    for manifest, where in (
        (evidence.sealed, "the sealed manifest"),
        (evidence.reference, evidence.reference and f"{evidence.reference.path} ({evidence.reference.id})"),
    ):
        if manifest is not None and where and evidence.scan.files:
            for role in ("model", "ema"):
                yield from _compare_role(evidence, manifest, role, where)
            yield from _optimizer(evidence, manifest, where)


def _compare_role(evidence: Evidence, reference: Manifest, role: str, where: str) -> Iterator[Finding]:
    expected, found = _of_manifest(reference, role), _of_scan(evidence, role)
    if not expected or _undescribed(evidence):
        return
    broken = {f.entry.key for f in evidence.scan.files if f.structure.problems}
    aliases = {a for f in evidence.scan.files for a in f.structure.metadata if a != "format"}
    known = {a for f in reference.files for a in f.aliases} - {t.name for t in expected}
    reported: set[Finding] = set()
    for old, new in _groups(expected, [t for t in found if t.name not in known]):
        sources = {t.name: t.file for t in old}
        places = {t.name: t.file for t in new}
        difference = compare_schemas(_schema(old), _schema(new), aliases=aliases)
        for finding in _differences(difference, where):
            name = finding.tensor or ""
            file = places.get(name) or (sources.get(name) if reference is evidence.sealed else None)
            absent = file is not None and evidence.scan.file(file) is None
            if file in broken or absent or finding in reported:
                continue  # a broken or missing file is named by its own findings already
            reported.add(finding)
            yield msgspec.structs.replace(finding, file=file)


def _groups(expected: list[_Place], found: list[_Place]) -> list[tuple[list[_Place], list[_Place]]]:
    """What to compare with what. Names repeat in the files of several ranks, and in those of several models: files
    are told apart by their names without digits, if both sides have the same ones; else only names count."""
    kinds = {t.kind for t in expected}
    if kinds != {t.kind for t in found}:
        return [(expected, found)]
    return [([t for t in expected if t.kind == k], [t for t in found if t.kind == k]) for k in sorted(kinds)]


def _schema(tensors: Iterable[_Place]) -> dict[str, set[tuple[str, tuple[int, ...]]]]:
    return schema_of((t.name, t.dtype, () if t.partitioned else t.shape) for t in tensors)


def _of_manifest(manifest: Manifest, role: str) -> list[_Place]:
    described = _described((f.path, f.format) for f in manifest.files)
    return [
        place
        for f in manifest.files
        if f.path not in described
        for place in _places(f.path, manifest.path, (t for t in f.tensors if t.role == role))
    ]


def _of_scan(evidence: Evidence, role: str) -> list[_Place]:
    described = _described((f.entry.key, f.structure.format) for f in evidence.scan.files)
    return [
        place
        for f in evidence.scan.files
        if f.entry.key not in described
        for place in _places(
            f.entry.key, evidence.checkpoint.path, (t for t in evidence.tensors_of(f) if t.role == role)
        )
    ]


def _places(file: str, checkpoint: str, tensors: Iterable[Tensor | ScannedTensor]) -> Iterator[_Place]:
    inside = file.removeprefix(checkpoint + "/")
    kind, by_rank = re.sub(r"\d+", "#", inside), _BY_RANK.fullmatch(inside) is not None
    for t in tensors:
        yield _Place(file, kind, t.name, t.dtype, t.shape, by_rank or _FLAT.fullmatch(t.name) is not None)


def _described(files: Iterable[tuple[str, str]]) -> set[str]:
    """Files that hold only pieces of tensors which a ``.metadata`` beside them lists whole."""
    pairs = list(files)
    folders = {path.rpartition("/")[0] for path, format in pairs if format == _DCP_METADATA}
    return {path for path, _ in pairs if path.endswith(".distcp") and path.rpartition("/")[0] in folders}


def _undescribed(evidence: Evidence) -> bool:
    """Whether there are pieces of tensors, and no ``.metadata`` that says of what; that has a finding of its own."""
    described = {
        f.entry.key.rpartition("/")[0]
        for f in evidence.scan.files
        if f.structure.format == _DCP_METADATA and not f.structure.problems
    }
    return any(k.endswith(".distcp") and k.rpartition("/")[0] not in described for k in evidence.checkpoint.files)


def _differences(difference: SchemaDifference, where: str) -> Iterator[Finding]:
    if difference.prefix:
        added, removed = difference.prefix
        change = f'"{added}" was put before' if added else f'"{removed}" is gone from'
        if added and removed:
            change = f'"{removed}" became "{added}" in'
        yield _finding(f"{change} every tensor name, compared with {where}; {_ACCEPT}")
    for name in difference.missing:
        yield _finding(f"{where} has this tensor; here it is missing; {_ACCEPT}", name)
    for name in difference.unexpected:
        yield _finding(f"{where} does not have this tensor; {_ACCEPT}", name)
    for name, shape, now in difference.reshaped:
        yield _finding(f"the shape differs from {where}; {_ACCEPT}", name, str(list(shape)), str(list(now)))
    for name, dtype, kind in difference.retyped:
        yield _finding(f"the dtype differs from {where}; {_ACCEPT}", name, dtype, kind)


def _optimizer(evidence: Evidence, reference: Manifest, where: str) -> Iterator[Finding]:
    """Optimizer state may appear after the first step, but never vanish or change its shape.

    Of partitions only the kinds of state count (``exp_avg``), because ranks cut them anew.
    """
    expected, found = _of_manifest(reference, "optimizer"), _of_scan(evidence, "optimizer")
    broken = any(f.structure.problems for f in evidence.scan.files)
    missing = any(f.path not in evidence.checkpoint.files for f in (evidence.sealed.files if evidence.sealed else ()))
    if not expected or broken or missing or _undescribed(evidence):
        return
    before = {_state_name(t): t for t in reversed(expected)}
    now = {_state_name(t) for t in found}
    lost = sorted(set(before) - now) if not precedes(evidence, reference) else []
    if lost:
        first = before[lost[0]]
        yield Finding(
            check="schema",
            severity=Severity.ERROR,
            message=f"{len(lost)} optimizer tensors that {where} has are gone; {_ACCEPT}",
            file=first.file if reference is evidence.sealed else None,
            tensor=first.name,
            count=len(lost),
        )
    whole = [t for t in found if not t.partitioned]
    difference = compare_schemas(
        _schema(t for t in expected if not t.partitioned), schema_of((t.name, t.dtype, t.shape) for t in whole)
    )
    if difference.reshaped:
        name, shape, was_found = difference.reshaped[0]
        yield Finding(
            check="schema",
            severity=Severity.ERROR,
            message=f"{len(difference.reshaped)} optimizer tensors have other shapes than in {where}; {_ACCEPT}",
            file=next((t.file for t in whole if t.name == name), None),
            tensor=name,
            expected=str(list(shape)),
            found=str(list(was_found)),
            count=len(difference.reshaped),
        )


def _state_name(tensor: _Place) -> str:
    return re.sub(r"\d+", "#", tensor.name) if tensor.partitioned else tensor.name


def _finding(message: str, tensor: str | None = None, expected: str | None = None, found: str | None = None) -> Finding:
    return Finding(
        check="schema", severity=Severity.ERROR, message=message, tensor=tensor, expected=expected, found=found
    )

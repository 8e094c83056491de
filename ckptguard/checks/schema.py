"""Check that keys, shapes and dtypes match the reference."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ckptguard.checks.completeness import precedes
from ckptguard.checks.evidence import Evidence, ScannedTensor
from ckptguard.formats.dtypes import DTYPES
from ckptguard.values.manifest import BY_PLUGIN, Manifest, Tensor
from ckptguard.values.verdict import PLUGIN, UNDERSTOOD, Finding, Severity

PREFIXES = ("module.", "_orig_mod.", "model.", "base_model.model.", "network.", "net.")
_DCP_METADATA = "dcp_metadata"
QUESTION = "schema"  # the check whose suspicions are questions, which say nothing about a sick training
UNCLEAR_SAVE = "resave"  # questions, too: was it saved again, or damaged?
QUESTIONS = frozenset((QUESTION, UNCLEAR_SAVE, UNDERSTOOD, PLUGIN))
# Files by rank: their sizes and their number change with the number of ranks.
_BY_RANK = re.compile(
    r".*zero_pp_rank_\d+_mp_rank_\d+_(?:optim|model)_states\.pt|.*distrib_optim\.pt|.*\.distcp|.*shard-\d+-model-.*\.safetensors"
)
_FLAT = re.compile(
    r"(?:.*[._])?flat_param(?:_\d+)?(?:\..*)?|(?:.*\.)?(?:single_partition_of_)?fp32(?:_flat)?_groups\b.*"
)
_error = partial(Finding, QUESTION, Severity.ERROR)

_Kind = tuple[str, tuple[int, ...]]  # dtype and shape
TensorSchema = Mapping[str, Collection[_Kind]]  # several kinds: ranks hold their own pieces under one name


_Files = tuple[str, str, "Sequence[Tensor | ScannedTensor]"]  # path, format and tensors of one


class SchemaDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's tensors differ from the reference's. `prefix` (added, removed) explains all names at once."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, expected, found
    retyped: tuple[tuple[str, str, str], ...]  # name, expected, found
    prefix: tuple[str, str] | None

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.retyped or self.prefix)


class _Place(NamedTuple):
    """One tensor of either side. `kind`: its file's name in the checkpoint, without digits. `partitioned`: its shape
    depends on the number of ranks."""

    file: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    partitioned: bool


def check_schema(evidence: Evidence) -> Iterator[Finding]:
    """Compare tensors with this checkpoint's own manifest, if sealed, and with the reference.

    Errors are model tensors that are missing, unexpected, reshaped or re-typed, and optimizer state that vanished, was
    reshaped, or has another dtype while its siblings keep theirs. A difference from another checkpoint may be intended
    (another head, another optimizer). So it is only a suspicion there, unless the user asked for a match.
    """
    reference, question = evidence.reference, Severity.ERROR if evidence.must_match else Severity.SICKNESS
    described = {
        f.entry.key.rpartition("/")[0]
        for f in evidence.scan.files
        if f.structure.format == _DCP_METADATA and not f.structure.problems
    }
    pieces = (key for key in evidence.checkpoint.files if key.endswith(".distcp"))
    if not evidence.scan.files or any(key.rpartition("/")[0] not in described for key in pieces):
        return  # without a `.metadata` for them, which is a finding of its own
    if any(f.structure.not_understood for f in evidence.scan.files):
        return  # that is a finding of its own, too, and these tensors are not known
    scanned: list[_Files] = [(f.entry.key, f.structure.format, evidence.tensors_of(f)) for f in evidence.scan.files]
    found = _places(evidence.checkpoint.path, scanned)
    for manifest, where, severity in (
        (evidence.sealed, "the sealed manifest", Severity.ERROR),
        (reference, reference and f"{reference.path}{reference.id.nth_save}", question),
    ):
        if manifest is not None and where:
            stored: list[_Files] = [(f.path, f.format, f.tensors) for f in manifest.files]
            expected, here = _places(manifest.path, stored), found
            if any(form == BY_PLUGIN for _, form, _ in (*scanned, *stored)):
                both = _read_alike((evidence.checkpoint.path, scanned), (manifest.path, stored))
                here, expected = _places(evidence.checkpoint.path, both[0]), _places(manifest.path, both[1])
            compared = [
                compare(evidence, manifest, expected[role], here[role], where)
                for role, compare in (("model", _weights), ("ema", _weights), ("optimizer", _optimizer))
            ]
            for finding in itertools.chain(*compared):
                yield msgspec.structs.replace(finding, severity=severity)


def is_of_rank(path: str) -> bool:
    """True if a file holds what one rank held, of which padding may be a part."""
    return _BY_RANK.fullmatch(path) is not None


def compare_schemas(reference: TensorSchema, found: TensorSchema, *, aliases: Iterable[str] = ()) -> SchemaDifference:
    """Return the differences. `aliases` are tied names that the file states without storing them: they count as
    present.

    Of a name with several kinds, the first that differs is reported.
    """
    missing = sorted(set(reference) - set(found) - set(aliases))
    unexpected = sorted(set(found) - set(reference))
    prefix = _prefix_change(reference, found) if missing and unexpected else None
    renamed = {_renamed(name, prefix): name for name in found} if prefix else {name: name for name in found}
    if prefix:
        missing, unexpected = [], []
    reshaped, retyped = [], []
    for expected in sorted(set(reference) & set(renamed)):
        name = renamed[expected]
        if set(reference[expected]) == set(found[name]):
            continue
        dtypes, shapes = _parts(reference[expected])
        dtypes_now, shapes_now = _parts(found[name])
        if shapes != shapes_now:
            reshaped.append((name, min(shapes - shapes_now or shapes), min(shapes_now - shapes or shapes_now)))
        if dtypes != dtypes_now:
            retyped.append((name, min(dtypes - dtypes_now or dtypes), min(dtypes_now - dtypes or dtypes_now)))
    return SchemaDifference(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        reshaped=tuple(reshaped),
        retyped=tuple(retyped),
        prefix=prefix,
    )


def _parts(kinds: Collection[_Kind]) -> tuple[set[str], set[tuple[int, ...]]]:
    return {dtype for dtype, _ in kinds}, {shape for _, shape in kinds}


def _renamed(name: str, prefix: tuple[str, str]) -> str:
    added, removed = prefix
    return removed + name.removeprefix(added)


def _prefix_change(reference: TensorSchema, found: TensorSchema) -> tuple[str, str] | None:
    """Return the (prefix added, prefix removed) that turns all found names into the reference's, or None."""
    for prefix in itertools.permutations(("", *PREFIXES), 2):
        fits = len(found) == len(reference) and all(name.startswith(prefix[0]) for name in found)
        if fits and {_renamed(name, prefix) for name in found} == set(reference):
            return prefix
    return None


def _weights(
    evidence: Evidence, reference: Manifest, expected: list[_Place], found: list[_Place], where: str
) -> Iterator[Finding]:
    if not expected:
        return
    whole = evidence.is_whole()
    aliases = {a for f in evidence.scan.files for a in f.structure.metadata if a != "format"}
    known = {a for f in reference.files for a in f.aliases} - {t.name for t in expected}
    reported: set[Finding] = set()
    for old, new in _groups(expected, [t for t in found if t.name not in known]):
        sources = {t.name: t.file for t in old}
        places = {t.name: t.file for t in new}
        difference = compare_schemas(_schema(old), _schema(new), aliases=aliases)
        if not whole:
            difference = msgspec.structs.replace(difference, missing=())
        for finding in _differences(difference, where):
            name = finding.tensor or ""
            file = places.get(name) or (sources.get(name) if reference is evidence.sealed else None)
            if finding in reported:
                continue
            reported.add(finding)
            yield msgspec.structs.replace(finding, file=file)


def _groups(expected: list[_Place], found: list[_Place]) -> list[tuple[list[_Place], list[_Place]]]:
    """Return the groups to compare. Names repeat in the files of several ranks or models.

    Files are distinguished by their names without digits, if both sides have the same ones. Otherwise only tensor names
    count.
    """
    kinds = {t.kind for t in expected}
    if kinds != {t.kind for t in found}:
        return [(expected, found)]
    return [([t for t in expected if t.kind == k], [t for t in found if t.kind == k]) for k in sorted(kinds)]


def _schema(tensors: Iterable[_Place]) -> dict[str, set[_Kind]]:
    """Map each name to its kinds. Shapes of tensors split by rank do not count."""
    schema: dict[str, set[_Kind]] = {}
    for t in tensors:
        schema.setdefault(t.name, set()).add((t.dtype, () if t.partitioned else t.shape))
    return schema


def _read_alike(*sides: tuple[str, list[_Files]]) -> list[list[_Files]]:
    """Return the files of both sides without those that a plugin read on one side only. What they hold is not known on
    the other: the plugin was installed or removed in between."""

    def kind(checkpoint: str, path: str) -> str:
        return re.sub(r"\d+", "#", path.removeprefix(checkpoint + "/"))

    read, others = [{kind(at, path) for path, form, _ in files if form == BY_PLUGIN} for at, files in sides]
    return [[one for one in files if kind(at, one[0]) not in read ^ others] for at, files in sides]


def _places(checkpoint: str, files: Sequence[_Files]) -> Mapping[str, list[_Place]]:
    """Return the tensors by role, from (path, format, tensors) of each file.

    Files with only pieces of tensors are left out if a ``.metadata`` beside them lists the whole tensors.
    """
    described = {path.rpartition("/")[0] for path, format, _ in files if format == _DCP_METADATA}
    found: defaultdict[str, list[_Place]] = defaultdict(list)
    for path, _, tensors in files:
        if path.endswith(".distcp") and path.rpartition("/")[0] in described:
            continue
        inside = path.removeprefix(checkpoint + "/")
        kind, by_rank = re.sub(r"\d+", "#", inside), _BY_RANK.fullmatch(inside) is not None
        for t in tensors:
            cut = by_rank or _FLAT.fullmatch(t.name) is not None
            found[t.role].append(_Place(path, kind, t.name, t.dtype, t.shape, cut))
    return found


def _differences(difference: SchemaDifference, where: str) -> Iterator[Finding]:
    if difference.prefix:
        added, removed = difference.prefix
        change = f'"{added}" was added to the start of' if added else f'"{removed}" is missing from the start of'
        if added and removed:
            change = f'"{removed}" became "{added}" in'
        yield _error(f"{change} every tensor name, compared with {where}")
    for name in difference.missing:
        yield _error(f"{where} has this tensor; this checkpoint does not", tensor=name)
    for name in difference.unexpected:
        yield _error(f"{where} does not have this tensor", tensor=name)
    for name, shape, now in difference.reshaped:
        message = f"the shape differs from {where}"
        yield _error(message, tensor=name, expected=str(list(shape)), found=str(list(now)))
    for name, dtype, kind in difference.retyped:
        yield _error(f"the dtype differs from {where}", tensor=name, expected=dtype, found=kind)


def _optimizer(
    evidence: Evidence, reference: Manifest, expected: list[_Place], found: list[_Place], where: str
) -> Iterator[Finding]:
    """Report optimizer state that vanished or changed its shape. It may appear after the first step.

    Of partitions only the kinds of state count (``exp_avg``), because another number of ranks splits them differently.
    """
    if not expected or not evidence.is_whole():
        return
    before = {_state_name(t): t for t in reversed(expected)}
    now = {_state_name(t) for t in found}
    lost = sorted(set(before) - now) if not precedes(evidence, reference) else []
    if lost:
        first = before[lost[0]]
        message = f"{len(lost)} optimizer tensors of {where} are missing"
        yield _error(message, first.file if reference is evidence.sealed else None, first.name, len(lost))
    whole = [t for t in found if not t.partitioned]
    reshaped = compare_schemas(_schema(t for t in expected if not t.partitioned), _schema(whole)).reshaped
    if reshaped:
        name, shape, shape_now = reshaped[0]
        yield _error(
            f"{len(reshaped)} optimizer tensors have other shapes than in {where}",
            next((t.file for t in whole if t.name == name), None),
            name,
            len(reshaped),
            expected=str(list(shape)),
            found=str(list(shape_now)),
        )
    yield from _retyped_alone(expected, found, where)


def _retyped_alone(expected: list[_Place], found: list[_Place], where: str) -> Iterator[Finding]:
    """Report optimizer tensors whose dtype changed while others of their kind (``exp_avg``) kept theirs.

    Another optimizer or another precision changes them all. A resume may round most of them: those of weights that are
    not float32.
    """
    before, of_kind, now = (
        _dtypes(expected, _state_name),
        _dtypes(expected, _kind),
        defaultdict[str, list[_Place]](list),
    )
    for t in found:
        now[_kind(t)].append(t)
    for kind, tensors in now.items():
        known = {t: of_kind.get(kind) if t.partitioned else before.get(t.name) for t in tensors}
        changed = [t for t, dtypes in known.items() if dtypes is not None and t.dtype not in dtypes]
        kept = sum(dtypes is not None for dtypes in known.values()) - len(changed)
        floats = all(_is_float(t.dtype) and any(map(_is_float, known[t] or ())) for t in changed)
        rounded = floats and len(changed) > kept
        if changed and kept and not rounded:
            first = changed[0]
            yield _error(
                f"{len(changed)} optimizer tensors have another dtype than in {where}, others of their kind do not",
                first.file,
                first.name,
                len(changed),
                expected=min(known[first] or ()),
                found=first.dtype,
            )


def _dtypes(tensors: Iterable[_Place], key: Callable[[_Place], str]) -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for t in tensors:
        found[key(t)].add(t.dtype)
    return found


def _kind(tensor: _Place) -> str:
    """Return the last part of a name that is no number: ``exp_avg`` of ``state.3.exp_avg``."""
    return next((part for part in reversed(tensor.name.split(".")) if not part.isdigit()), "")


def _is_float(dtype: str) -> bool:
    known = DTYPES.get(dtype)
    return known is not None and known.float is not None


def _state_name(tensor: _Place) -> str:
    return re.sub(r"\d+", "#", tensor.name) if tensor.partitioned else tensor.name

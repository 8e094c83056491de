"""What is wrong inside a bad checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.inspect.tensor_table import TensorSource
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.values.verdict import Finding, Severity
from ckptguard.verification.collect_evidence import roles_of

_FIRST_ROLES = ("model", "ema", "optimizer")  # a sick model makes a sick optimizer more often than the reverse


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `check` is the check that found it. `file` is relative to the checkpoint.

    `nan`, `inf`, `elements` and `first_index` (in stored order) are set for numbers that are not finite.
    """

    check: str
    file: str | None
    tensor: str | None
    role: str | None
    message: str
    nan: int | None = None
    inf: int | None = None
    elements: int | None = None
    first_index: int | None = None


def find_culprits(
    source: TensorSource | None, path: str, findings: Sequence[Finding], *, work: Work = PLAIN
) -> tuple[Culprit, ...]:
    """Return recorded errors about bytes and structure first, then every tensor that is not finite, in file order.

    `path` is the checkpoint's path when it was judged, `source` its place now (None: only `findings` are left).
    """
    recorded = [
        Culprit(check=f.check, file=_inside(f.file, path), tensor=f.tensor, role=None, message=f.message)
        for f in findings
        if f.severity is Severity.ERROR and not isinstance(f.omitted, int)
    ]
    if source is None:
        return tuple(sorted(recorded, key=lambda c: c.check == "finite"))
    wrong = {(c.file, c.tensor) for c in recorded}
    # A mask, or a tensor that the user allows, is only a notice.
    noticed = {(_inside(f.file, path), f.tensor) for f in findings if f.severity is Severity.NOTICE} - wrong
    sick = [c for c in _not_finite(source, work) if (c.file, c.tensor) not in noticed]
    seen = {(c.file, c.tensor) for c in sick}
    rest = [c for c in recorded if c.check == "finite" and (c.file, c.tensor) not in seen]
    return (*(c for c in recorded if c.check != "finite"), *sick, *rest)


def _inside(file: str | None, path: str) -> str | None:
    return None if file is None else file.rpartition("/")[2] if file == path else file.removeprefix(path + "/")


def _not_finite(source: TensorSource, work: Work) -> list[Culprit]:
    """Return tensors of the first roles with NaN or infinity: the model's first, then in file order."""
    found = work.scanner(source.storage, source.checkpoint.files, ScanOptions(md5=False), work.progress).files
    roles = roles_of(found)
    culprits = []
    for file in found:
        inside = _inside(file.entry.key, source.checkpoint.path)
        for tensor, role, numbers in zip(file.structure.tensors, roles[file.entry.key], file.numbers, strict=True):
            if numbers is None or numbers.first_bad is None or role not in _FIRST_ROLES:
                continue
            kinds = ((numbers.nan, "NaN"), (numbers.posinf, "+Inf"), (numbers.neginf, "-Inf"))
            culprit = Culprit(
                check="finite",
                file=inside,
                tensor=tensor.name,
                role=role,
                message=", ".join(f"{count} {kind}" for count, kind in kinds if count),
                nan=numbers.nan,
                inf=numbers.posinf + numbers.neginf,
                elements=numbers.count,
                first_index=numbers.first_bad,
            )
            culprits.append(culprit)
    return sorted(culprits, key=lambda c: _FIRST_ROLES.index(c.role or ""))

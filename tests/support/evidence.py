"""Evidence made by hand: a checkpoint of a few tensors, and the manifests of others to compare it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptguard.checks import Evidence, run_checks
from ckptguard.formats.structure import Leaf, SpanPlace, Structure, TensorPlace
from ckptguard.layouts import Checkpoint
from ckptguard.scan.result import Numbers, Scan, ScannedFile
from ckptguard.storage.protocol import Entry
from ckptguard.values.manifest import File, Manifest, Span, Tensor
from ckptguard.values.verdict import Finding, Severity


class T(NamedTuple):
    """One tensor: equal digests mean equal bytes. A digest of None: it has no bytes of its own."""

    name: str
    digest: str | None = "d"
    role: str = "model"
    shape: tuple[int, ...] = (16, 16)
    dtype: str = "float32"
    largest: float = 1.0
    rms: float | None = 0.5
    zeros: float | None = 0.0
    constant: bool = False
    numbers: Numbers | None = None  # instead of those above


Files = Mapping[str, Sequence[T]]


def format_of(name: str) -> str:
    """The format of a file by its name."""
    if name.endswith(".metadata"):
        return "dcp_metadata"
    return "safetensors" if name.endswith(".safetensors") else "torch_zip"


def evidence(
    files: Files, *, step: int = 2, leaves: Mapping[str, Sequence[Leaf]] | None = None, **more: Any
) -> Evidence:
    """A checkpoint ``ckpt-<step>`` as it was scanned; `leaves` by file."""
    path = f"ckpt-{step}"
    every = {name: files.get(name, ()) for name in (*files, *(leaves or {}))}
    scanned = []
    for name, tensors in every.items():
        spans = [t for t in tensors if t.digest is not None]
        places = [SpanPlace(10 * i, 10) for i in range(len(spans))]
        structure = Structure(
            format=format_of(name),
            spans=tuple(places),
            tensors=tuple(
                TensorPlace(t.name, t.dtype, t.shape, spans.index(t) if t.digest is not None else None) for t in tensors
            ),
            leaves=tuple((leaves or {}).get(name, ())),
        )
        numbers = [
            t.numbers or Numbers(count=4, largest=t.largest, rms=t.rms, zeros=t.zeros, constant=t.constant)
            if t.digest is not None and "int" not in t.dtype
            else None
            for t in tensors
        ]
        scanned.append(
            ScannedFile(
                entry=Entry(key=f"{path}/{name}", kind="file", size=100),
                structure=structure,
                envelope="e",
                span_digests=tuple(t.digest for t in spans if t.digest is not None),
                numbers=tuple(numbers),
            )
        )
    entries = tuple(sorted((f.entry for f in scanned), key=lambda e: e.key))
    return Evidence(
        checkpoint=Checkpoint(path=path, layout="folder", series="ckpt-#", step=step, entries=entries),
        scan=Scan(files=tuple(scanned), seconds=0.1),
        roles={f"{path}/{name}": tuple(t.role for t in tensors) for name, tensors in every.items()},
        **more,
    )


def manifest(files: Files, *, step: int = 1) -> Manifest:
    """The manifest of a checkpoint ``ckpt-<step>``."""
    kept = []
    for name, tensors in files.items():
        spans = [t for t in tensors if t.digest is not None]
        kept.append(
            File(
                path=f"ckpt-{step}/{name}",
                size=100,
                format=format_of(name),
                envelope="e",
                spans=tuple(Span(10 * i, 10, t.digest or "") for i, t in enumerate(spans)),
                tensors=tuple(
                    Tensor(
                        t.name,
                        t.dtype,
                        t.shape,
                        spans.index(t) if t.digest is not None else None,
                        t.role,
                        t.largest if t.digest is not None else None,
                        t.rms,
                        t.zeros,
                    )
                    for t in tensors
                ),
            )
        )
    return Manifest(
        series="ckpt-#",
        path=f"ckpt-{step}",
        layout="folder",
        step=step,
        generation=1,
        digest_origin="observer",
        sealed_at="",
        version="",
        nonce="",
        files=tuple(kept),
    )


def found_by(check: str, given: Evidence) -> list[Finding]:
    """The findings of one check."""
    return [f for f in run_checks(given) if f.check == check]


def errors(given: Evidence) -> list[tuple[str, str | None]]:
    """(check, tensor) of errors."""
    return [(f.check, f.tensor) for f in run_checks(given) if f.severity is Severity.ERROR]

"""Show one checkpoint, as its manifest and its verdicts describe it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ckptguard.checks.order import counters_of
from ckptguard.decisions.known_good import CurrentVerdict
from ckptguard.formats.dtypes import DTYPES, SAFETENSORS_DTYPES
from ckptguard.layouts import Checkpoint
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.target import Target, resolve_target, several_checkpoints
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import File, Manifest, Tensor
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Verdict
from ckptguard.verification.collect_evidence import (
    collect_evidence,
    manifest_files,
    manifest_without_seal,
    scan_checkpoint,
)

_BITS = dict(SAFETENSORS_DTYPES.values())  # of one element, by our names


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's manifest, its current verdict and its history: the entries of the ledger about it.

    Without `sealed`, the manifest was made now by reading the files, there is no verdict, and `problems` say what is
    wrong. `nonfinite` has (file, tensor) of numbers that are not finite. `left_out` names what is not a regular file.
    `changed` is as in `CheckpointState`.
    """

    target: str
    id: CheckpointId | None
    sealed: bool
    manifest: Manifest
    verdict: Verdict | None
    history: tuple[CurrentVerdict, ...]
    problems: tuple[str, ...] = ()
    nonfinite: frozenset[tuple[str, str]] = frozenset()
    left_out: tuple[str, ...] = ()
    changed: bool = False


def show(target: str, settings: Settings, *, magnitudes: bool = False, work: Work = PLAIN) -> Shown:
    """Describe a checkpoint. One of a run that was never verified is described from its files.

    With `magnitudes`, the files are read once if the manifest lacks the size of the numbers. Raises NotFoundError for a
    run, or for what is not a checkpoint.
    """
    resolved = resolve_target(target, settings)
    checkpoint, view = resolved.checkpoint, resolved.view
    if checkpoint is None:
        raise several_checkpoints(resolved, target)
    id = view.current(checkpoint) if view is not None else None
    sealed = view.history.manifest(id) if view is not None and id is not None else None
    if view is None or id is None or sealed is None:
        return _as_it_lies(resolved, checkpoint, work)
    if magnitudes and not any(t.largest is not None for f in sealed.files for t in f.tensors):
        scan = scan_checkpoint(resolved.storage, checkpoint, ScanOptions(md5=False), work)
        read = manifest_files(collect_evidence(resolved.storage, checkpoint, scan))
        sealed = msgspec.structs.replace(sealed, files=_with_magnitudes(sealed.files, read))
    verdict = view.history.verdict(id)
    nonfinite = [f for f in (verdict.findings if verdict else ()) if f.check == "finite" and f.count is not None]
    entries = view.history.entries(id).values()
    return Shown(
        target=resolved.url,
        id=id,
        sealed=True,
        manifest=sealed,
        verdict=verdict,
        history=tuple(sorted(entries, key=lambda entry: (entry.number, entry.outcome.value))),
        changed=verdict is not None and not looks_as_read(checkpoint.entries, sealed, verdict),
        left_out=tuple(checkpoint.inside(entry.key) for entry in checkpoint.irregular),
        nonfinite=frozenset((f.file or "", f.tensor) for f in nonfinite if f.tensor is not None),
    )


def _as_it_lies(resolved: Target, checkpoint: Checkpoint, work: Work) -> Shown:
    """Describe a checkpoint without records, by reading all of it."""
    scan = scan_checkpoint(resolved.storage, checkpoint, ScanOptions(md5=False), work)
    evidence = collect_evidence(resolved.storage, checkpoint, scan)
    manifest = manifest_without_seal(
        evidence.checkpoint, manifest_files(evidence), counters_of(evidence.checkpoint, evidence.scan)
    )
    return Shown(
        target=resolved.url,
        id=None,
        sealed=False,
        manifest=manifest,
        verdict=None,
        history=(),
        left_out=tuple(checkpoint.inside(entry.key) for entry in checkpoint.irregular),
        problems=tuple(
            f"{checkpoint.inside(f.entry.key)}: {p.message}" for f in scan.files for p in f.structure.problems
        ),
        nonfinite=frozenset(
            (file.entry.key, tensor.name)
            for file in scan.files
            for tensor, numbers in zip(file.structure.tensors, file.numbers, strict=True)
            if numbers is not None and numbers.first_bad is not None
        ),
    )


def stored_bytes(tensor: Tensor) -> int | None:
    """Return how many bytes its elements take; None for a type of unknown size."""
    if tensor.span is None:
        return 0
    known = DTYPES.get(tensor.dtype)
    bits = 8 * known.size if known is not None else _BITS.get(tensor.dtype)
    return None if bits is None else math.prod(tensor.shape) * bits // 8


def _with_magnitudes(files: Sequence[File], read: Sequence[File]) -> tuple[File, ...]:
    """Return the sealed files, with the magnitudes of those that still have the sealed bytes."""
    now = {f.path: f for f in read}
    return tuple(
        msgspec.structs.replace(file, tensors=now[file.path].tensors)
        if file.path in now and (now[file.path].envelope, now[file.path].spans) == (file.envelope, file.spans)
        else file
        for file in files
    )

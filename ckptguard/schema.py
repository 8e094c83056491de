"""Comparing the tensors of two checkpoints by name, shape and dtype. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ckptguard.manifest import Manifest

PREFIXES = ("module.", "_orig_mod.", "model.", "base_model.model.", "network.", "net.")
TensorSchema = Mapping[str, tuple[str, tuple[int, ...]]]


class SchemaDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's tensors differ from the reference's. `prefix` (added, removed) explains all names at once."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()  # name, expected, found
    retyped: tuple[tuple[str, str, str], ...] = ()  # name, expected, found
    prefix: tuple[str, str] | None = None

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.retyped or self.prefix)


def schema_of(manifest: Manifest, role: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of one role: name -> (dtype, shape), over all files."""
    return {t.name: (t.dtype, t.shape) for f in manifest.files for t in f.tensors if t.role == role}


def compare_schemas(reference: TensorSchema, found: TensorSchema, *, aliases: Iterable[str] = ()) -> SchemaDifference:
    """What differs. `aliases` are tied names that the file states without storing them again: they count as there."""
    present = set(found) | set(aliases)
    missing = sorted(set(reference) - present)
    unexpected = sorted(set(found) - set(reference))
    prefix = _prefix_change(reference, found) if missing and unexpected else None
    if prefix:
        renamed = {_renamed(name, prefix): name for name in found}
        missing = sorted(set(reference) - set(renamed))
        unexpected = sorted(renamed[n] for n in set(renamed) - set(reference))
        pairs = [(name, renamed[name]) for name in sorted(set(reference) & set(renamed))]
    else:
        pairs = [(name, name) for name in sorted(set(reference) & set(found))]
    return SchemaDifference(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        reshaped=tuple((b, reference[a][1], found[b][1]) for a, b in pairs if reference[a][1] != found[b][1]),
        retyped=tuple((b, reference[a][0], found[b][0]) for a, b in pairs if reference[a][0] != found[b][0]),
        prefix=prefix,
    )


def _renamed(name: str, prefix: tuple[str, str]) -> str:
    added, removed = prefix
    return removed + (name.removeprefix(added) if added else name)


def _prefix_change(reference: TensorSchema, found: TensorSchema) -> tuple[str, str] | None:
    """(prefix added, prefix removed) that makes the found names the reference's, all of them."""
    candidates = [(a, r) for a in ("", *PREFIXES) for r in ("", *PREFIXES) if a != r]
    for added, removed in candidates:
        fits = all(n.startswith(added) for n in found)
        if fits and {_renamed(n, (added, removed)) for n in found} == set(reference):
            return added, removed
    return None

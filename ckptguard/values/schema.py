"""Comparing the tensors of two checkpoints by name, shape and dtype. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

PREFIXES = ("module.", "_orig_mod.", "model.", "base_model.model.", "network.", "net.")
Kind = tuple[str, tuple[int, ...]]  # dtype and shape
TensorSchema = Mapping[str, Collection[Kind]]  # several kinds: ranks hold pieces of their own under one name


class SchemaDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's tensors differ from the reference's. `prefix` (added, removed) explains all names at once."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()  # name, expected, found
    retyped: tuple[tuple[str, str, str], ...] = ()  # name, expected, found
    prefix: tuple[str, str] | None = None

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.retyped or self.prefix)


def schema_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, set[Kind]]:
    """Name -> the kinds under it, from (name, dtype, shape)."""
    schema: dict[str, set[Kind]] = {}
    for name, dtype, shape in tensors:
        schema.setdefault(name, set()).add((dtype, shape))
    return schema


def compare_schemas(reference: TensorSchema, found: TensorSchema, *, aliases: Iterable[str] = ()) -> SchemaDifference:
    """What differs. `aliases` are tied names that the file states without storing them again: they count as there.

    Of a name with several kinds the first that differs is told.
    """
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
    reshaped, retyped = [], []
    for expected, name in pairs:
        if set(reference[expected]) == set(found[name]):
            continue
        shapes, now = {k[1] for k in reference[expected]}, {k[1] for k in found[name]}
        if shapes != now:
            reshaped.append((name, min(shapes - now or shapes), min(now - shapes or now)))
        dtypes, kinds = {k[0] for k in reference[expected]}, {k[0] for k in found[name]}
        if dtypes != kinds:
            retyped.append((name, min(dtypes - kinds or dtypes), min(kinds - dtypes or kinds)))
    return SchemaDifference(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        reshaped=tuple(reshaped),
        retyped=tuple(retyped),
        prefix=prefix,
    )


def _renamed(name: str, prefix: tuple[str, str]) -> str:
    added, removed = prefix
    return removed + (name.removeprefix(added) if added else name)


def _prefix_change(reference: TensorSchema, found: TensorSchema) -> tuple[str, str] | None:
    """(prefix added, prefix removed) that makes the found names the reference's, all of them."""
    candidates = [(a, r) for a in ("", *PREFIXES) for r in ("", *PREFIXES) if a != r]
    for added, removed in candidates:
        fits = len(found) == len(reference) and all(n.startswith(added) for n in found)
        if fits and {_renamed(n, (added, removed)) for n in found} == set(reference):
            return added, removed
    return None

"""What two checkpoints differ in, as people read it: the command line prints it, and a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.documents.report_lines import Line, Table
from ckptguard.inspect.diff import Diff, DiffedCheckpoint, TensorChange, shown
from ckptguard.scan.result import Difference
from ckptguard.values.ids import escape

_DEFAULT_TOP = 20


def damage_notes(diff: Diff) -> list[str]:
    """Why a difference may not be all: a sentence for each damaged file."""
    sides = {"a": diff.a, "b": diff.b}
    what = "is damaged, so this is not all"
    return [f"{sides[one.side].path} {what}: {one.file}: {one.message}" for one in diff.damaged]


def diff_blocks(diff: Diff, *, top: int | None = None) -> Iterator[Line | Table]:
    """Both sides, the changes as a table, and a line that sums up. `top` limits the tensors of each kind of change."""
    for name, side in (("a", diff.a), ("b", diff.b)):
        yield Line(f"{name}  {escape(side.path)}{side.id.nth_save if side.id else ''}  ({_side(side)})")
    for prefix in diff.prefixes:
        where = f"({prefix.tensors} tensors, role {escape(prefix.role)})"
        yield Line(f"names: {_quoted(prefix.a)} in a is {_quoted(prefix.b)} in b {where}")
    most = _DEFAULT_TOP if top is None else top
    kept = shown(diff.changes, most)
    if kept:
        yield Line()
        many = len({s.file for c in diff.changes for s in (c.a, c.b) if s is not None}) > 2
        titles = ("change", "rel. L2", "largest", "tensor", "type", "remark")
        yield Table(titles, [_row(change, many) for change in kept])
    counts = diff.counts
    left = {kind: n - most for kind, n in counts.items() if n > most}
    if left:
        more = ", ".join(f"{n} more {kind}" for kind, n in left.items())
        yield Line(f"... and {more} (--top {max(counts.values())})")
    yield Line()
    parts = [f"{n} {kind}" for kind, n in counts.items() if n]
    yield Line(", ".join([f"{diff.same} the same", *parts]))


def _side(side: DiffedCheckpoint) -> str:
    tensors = f"{side.tensors} tensor{'s' * (side.tensors != 1)}"
    stated = [side.outcome.value if side.outcome else None, tensors]
    return ", ".join(s for s in stated if s)


def _quoted(prefix: str) -> str:
    return f'"{escape(prefix)}"' if prefix else "nothing"


def _row(change: TensorChange, with_file: bool) -> tuple[object, ...]:
    found = change.difference
    sides = [s for s in (change.a, change.b) if s is not None]
    return (
        change.change,
        None if found is None or found.relative_l2 is None else f"{found.relative_l2:.3g}",
        None if found is None or found.largest_change is None else f"{found.largest_change:.4g}",
        f"{sides[-1].file}: {change.name}" if with_file else change.name,
        f"{_arrow([s.dtype for s in sides])} {_arrow([str(list(s.shape)) for s in sides])}",
        change.note or (_remark(found) if found is not None else None),
    )


def _arrow(texts: list[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))


def _remark(found: Difference) -> str:
    """What the distance does not say."""
    if found.became_nonfinite:
        kinds = [name for name, n in (("NaN", found.nan_b), ("Inf", found.inf_b)) if n]
        return (
            f"{found.became_nonfinite} of {found.count} became {' or '.join(kinds)},"
            f" first at {list(found.first_nonfinite or ())}"
        )
    before, after = found.nan_a + found.inf_a, found.nan_b + found.inf_b
    if before or after:
        return f"not finite: {before} in a, {after} in b"
    if not found.differing:
        return "the same values"
    where = f"largest at {list(found.largest_index)}" if found.largest_index else ""
    all_differ = found.differing == found.count and found.largest_change is not None
    share = "" if all_differ else f"{found.differing} of {found.count} differ"
    return ", ".join(text for text in (share, where) if text)

"""What two checkpoints differ in, as text: for `diff` and `bisect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptguard.cli.output import say, trouble
from ckptguard.cli.render import cell, columns

if TYPE_CHECKING:
    from ckptguard.inspect.diff import Diff, DiffedCheckpoint, TensorChange
    from ckptguard.scan.tensor_difference import Difference

TITLES = ("change", "rel. L2", "largest", "tensor", "type", "remark")
DEFAULT_TOP = 20


def print_diff(diff: Diff, *, top: int | None) -> None:
    """Both sides, the changes as a table, and a line that sums up."""
    from ckptguard.inspect.diff import shown

    for name, side in (("a", diff.a), ("b", diff.b)):
        say(f"{name}  {cell(side.path)}  ({_side(side)})")
    for prefix in diff.prefixes:
        say(
            f"names: {_quoted(prefix.a)} in a is {_quoted(prefix.b)} in b"
            f" ({prefix.tensors} tensors, role {cell(prefix.role)})"
        )
    for damaged in diff.damaged:
        side = diff.a if damaged.side == "a" else diff.b
        trouble(f"warning: {side.path} is damaged, so this is not all: {damaged.file}: {damaged.message}")
    most = DEFAULT_TOP if top is None else top
    kept = shown(diff.changes, most)
    if kept:
        say("")
        many = _has_many_files(diff)
        columns(TITLES, [_row(change, many) for change in kept])
    counts = diff.counts
    left = {kind: n - most for kind, n in counts.items() if n > most}
    if left:
        say("... and " + ", ".join(f"{n} more {kind}" for kind, n in left.items()) + f" (--top {max(counts.values())})")
    say("")
    parts = [f"{n} {kind}" for kind, n in counts.items() if n]
    say(", ".join([f"{diff.same} the same", *parts]))


def _side(side: DiffedCheckpoint) -> str:
    tensors = f"{side.tensors} tensor{'s' * (side.tensors != 1)}"
    stated = [side.id and str(side.id), side.outcome.value if side.outcome else None, tensors]
    return ", ".join(s for s in stated if s)


def _quoted(prefix: str) -> str:
    return f'"{cell(prefix)}"' if prefix else "nothing"


def _has_many_files(diff: Diff) -> bool:
    return len({s.file for c in diff.changes for s in (c.a, c.b) if s is not None}) > 2


def _row(change: TensorChange, with_file: bool) -> tuple[object, ...]:
    found = change.difference
    sides = [s for s in (change.a, change.b) if s is not None]
    return (
        change.change,
        None if found is None or found.relative_l2 is None else f"{found.relative_l2:.3g}",
        None if found is None or found.largest_change is None else f"{found.largest_change:.4g}",
        f"{sides[-1].file}: {change.name}" if with_file else change.name,
        f"{_arrow([s.dtype for s in sides])} {_arrow([str(list(s.shape)) for s in sides])}",
        change.note or (remark(found) if found is not None else None),
    )


def _arrow(texts: list[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))


def remark(found: Difference) -> str:
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

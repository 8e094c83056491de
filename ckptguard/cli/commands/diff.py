"""``ckptguard diff``: what two checkpoints differ in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_text, table
from ckptguard.terminal.output import emit, say, warn, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.documents.build import Document
    from ckptguard.inspect.diff import Diff, DiffedCheckpoint, TensorChange
    from ckptguard.scan.result import Difference

DEFAULT_TOP = 20
CODES = (ExitCode.BAD, ExitCode.NOT_FOUND)


@command("diff", "Compare two checkpoints tensor by tensor.", CODES)
@click.argument("a", type=PathOrUrl())
@click.argument("b", type=PathOrUrl())
@click.option("--top", type=click.IntRange(min=0), metavar="N", help="Show at most N tensors of each kind of change.")
def diff(a: str, b: str, top: int | None, shared: Shared) -> None:
    """Compare checkpoint B with checkpoint A, tensor by tensor: what was added, removed, reshaped, re-typed or changed.

    Tensors are matched by name within their role (model, optimizer, ...), also across formats. What became NaN or
    infinite comes first. Then come the changes by their relative L2 distance |b - a| / |a|, the largest first.

    The exit code is 0 whatever differs, and 3 if A or B is damaged.
    """
    from ckptguard.inspect.diff import diff

    settings = shared.settings([a, b])
    with working("comparing") as work:
        found = diff(a, b, settings, work=work)
    if shared.as_json:
        emit("diff", **diff_fields(found, top))
    else:
        print_diff(found, top=top)
    raise click.exceptions.Exit(ExitCode.BAD if found.damaged else ExitCode.GOOD)


def diff_fields(found: Diff, top: int | None) -> Document:
    """A difference as documents show it; `top` limits the tensors of each kind of change."""
    from ckptguard.documents.build import fields
    from ckptguard.inspect.diff import shown

    changes = shown(found.changes, top)
    return fields(found, changes=changes, omitted=len(found.changes) - len(changes))


def print_diff(diff: Diff, *, top: int | None) -> None:
    """Both sides, the changes as a table, and a line that sums up."""
    from ckptguard.inspect.diff import shown

    for name, side in (("a", diff.a), ("b", diff.b)):
        say_text(f"{name}  {side.path}{side.id.nth_save if side.id else ''}  ({_side(side)})")
    for prefix in diff.prefixes:
        where = f"({prefix.tensors} tensors, role {prefix.role})"
        say_text(f"names: {_quoted(prefix.a)} in a is {_quoted(prefix.b)} in b {where}")
    for damaged in diff.damaged:
        side = diff.a if damaged.side == "a" else diff.b
        warn(f"{side.path} is damaged, so this is not all: {damaged.file}: {damaged.message}")
    most = DEFAULT_TOP if top is None else top
    kept = shown(diff.changes, most)
    if kept:
        say("")
        many = len({s.file for c in diff.changes for s in (c.a, c.b) if s is not None}) > 2
        table(("change", "rel. L2", "largest", "tensor", "type", "remark"), [_row(change, many) for change in kept])
    counts = diff.counts
    left = {kind: n - most for kind, n in counts.items() if n > most}
    if left:
        more = ", ".join(f"{n} more {kind}" for kind, n in left.items())
        say_text(f"... and {more} (--top {max(counts.values())})")
    say("")
    parts = [f"{n} {kind}" for kind, n in counts.items() if n]
    say_text(", ".join([f"{diff.same} the same", *parts]))


def _side(side: DiffedCheckpoint) -> str:
    tensors = f"{side.tensors} tensor{'s' * (side.tensors != 1)}"
    stated = [side.outcome.value if side.outcome else None, tensors]
    return ", ".join(s for s in stated if s)


def _quoted(prefix: str) -> str:
    return f'"{prefix}"' if prefix else "nothing"


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

"""``ckptguard diff``: what two checkpoints differ in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_blocks
from ckptguard.terminal.output import emit, warn, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.documents.build import Document
    from ckptguard.inspect.diff import Diff

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
    from ckptguard.documents.diff_lines import damage_notes, diff_blocks

    warn(*damage_notes(diff))
    say_blocks(diff_blocks(diff, top=top))

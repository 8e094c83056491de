"""``ckptguard diff``: what two checkpoints differ in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit
from ckptguard.cli.progress import working

if TYPE_CHECKING:
    from ckptguard.documents.build import Document
    from ckptguard.inspect.diff import Diff

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND)


@click.command("diff", cls=Command, codes=CODES, short_help="Compare two checkpoints tensor by tensor.")
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.option("--top", type=click.IntRange(min=0), metavar="N", help="Show N tensors of each kind of change.")
@shared_options
def command(a: str, b: str, top: int | None, shared: Shared) -> None:
    """Compare checkpoint B with checkpoint A, tensor by tensor: what was added, removed, reshaped, re-typed or changed.

    Tensors are matched by name within their role (model, optimizer, ...), also between files and folders of other
    formats. What became NaN or infinite comes first, then the changes by their relative L2 distance |b - a| / |a|.
    It ends with 0 whatever the difference; with 3 if one of the two is damaged.
    """
    from ckptguard.cli.render_diff import print_diff
    from ckptguard.inspect.diff import diff

    settings = shared.settings()
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

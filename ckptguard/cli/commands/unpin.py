"""``ckptguard unpin``: let a policy decide about a checkpoint again."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.commands.pin import checkpoint_of_run
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say


@click.command("unpin", cls=Command, codes=(ExitCode.NOT_FOUND,), short_help="Lift a checkpoint's pins.")
@click.argument("ckpt", type=Place())
@shared_options
def command(ckpt: str, shared: Shared) -> None:
    """Lift every pin of CKPT that somebody set. What is being loaded or restored stays until that has ended."""
    from ckptguard.cli.render import cell
    from ckptguard.retention.pin import unpin

    view, checkpoint = checkpoint_of_run(ckpt, shared.settings())
    released = unpin(view, checkpoint)
    if shared.as_json:
        emit("unpin", target=view.run.url, pins=released)
    else:
        say(f"unpinned {cell(checkpoint.path)}")

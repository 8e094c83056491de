"""``ckptguard list``: every checkpoint that the records or the storage know, and where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, trouble

if TYPE_CHECKING:
    from ckptguard.inspect.list_states import CheckpointState


@click.command("list", cls=Command, short_help="List a run's checkpoints and verdicts.", codes=(ExitCode.NOT_FOUND,))
@click.argument("run", type=Place())
@shared_options
def command(run: str, shared: Shared) -> None:
    """List RUN's checkpoints with their verdicts, from the records; nothing is read back."""
    from ckptguard.cli.render import size, table
    from ckptguard.inspect.list_states import survey
    from ckptguard.runs.target import open_named_run

    view = open_named_run(run, shared.settings())
    states = survey(view)
    if shared.as_json:
        emit("list", target=view.run.url, checkpoints=states)
        return
    if not states:
        trouble("no checkpoints yet")
        return
    titles = ["path", "id", "outcome", "where", "size", "reason"]
    rows = [[s.path, s.id, s.outcome.value, where(s), size(s.bytes), s.reason or "; ".join(s.pins)] for s in states]
    if any(s.kept for s in states):
        titles.insert(-1, "copy")
        for row, state in zip(rows, states, strict=True):
            row.insert(-1, copy_cost(state))
    table(titles, rows)


def where(state: object) -> str:
    """In which places the checkpoint's files are, in one word each."""
    places = [("in_place", "run"), ("kept", "kept"), ("quarantined", "quarantine"), ("trashed", "trash")]
    return "+".join(word for field, word in places if getattr(state, field)) or "gone"


def copy_cost(state: CheckpointState) -> str | None:
    """What the kept copy takes on storage that would be free without it."""
    from ckptguard.cli.render import size

    if not state.kept:
        return None
    return "shared" if state.kept_bytes is None else size(state.kept_bytes)

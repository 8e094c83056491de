"""``ckptguard list``: every checkpoint that the records or the storage know, and where it stands."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, escape, say, trouble
from ckptguard.cli.render import size, table

_LONGEST_REASON = 100
_CHANGED = "was {} when it was read; changed since"
_PLACES = (("in_place", "run"), ("kept", "kept"), ("quarantined", "quarantine"), ("trashed", "trash"))


@click.command("list", cls=Command, short_help="List a run's checkpoints and verdicts.", codes=(ExitCode.NOT_FOUND,))
@click.argument("run", type=Place())
@shared_options
def command(run: str, shared: Shared) -> None:
    """List RUN's checkpoints with their verdicts, from the records; nothing is read back."""
    from ckptguard.decisions.known_good import order_words
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
    copies = any(s.kept for s in states)
    counted = any(s.counter is not None and s.id is not None and s.id.number is None for s in states)
    titles = ("path", "id", *(("counter inside",) if counted else ()), "outcome", "where", "size")
    titles = (*titles, *(("copy",) if copies else ()), "reason")
    rows = []
    for s in states:
        cost = ("shared" if s.kept_bytes is None else size(s.kept_bytes)) if s.kept else None
        copy = (cost,) if copies else ()
        reason = _CHANGED.format(s.outcome.value) if s.changed else _short(s.reason) or "; ".join(s.pins)
        where = "+".join(word for field, word in _PLACES if getattr(s, field)) or "gone"
        counter = (s.counter,) if counted else ()
        rows.append(
            (s.path, s.id, *counter, "changed" if s.changed else s.outcome.value, where, size(s.bytes), *copy, reason)
        )
    table(titles, rows)
    kinds = {s.series: order_words(s.step) for s in states}
    if len(set(kinds.values())) > 1 or not all(isinstance(s.step, int) for s in states):
        for series, words in sorted(kinds.items()):
            say(f"{escape(series)} is ordered by {words}")


def _short(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else reason[: _LONGEST_REASON - 1] + "…"

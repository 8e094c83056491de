"""``ckptguard list``: every checkpoint that the records or the storage know, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import size, table, warn_not_understood
from ckptguard.terminal.output import emit, escape, is_quiet, say_well, trouble, warn
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.inspect.list_states import CheckpointState
    from ckptguard.runs.run_view import RunView

_TITLES = ("path", "id", "counter inside", "outcome", "where", "size", "copy", "reason")
_LONGEST_REASON = 200
_CHANGED = "was {} when it was read; changed since"
_PLACES = (("in_place", "run"), ("kept", "kept"), ("quarantined", "quarantine"), ("trashed", "trash"))


@command("list", "List a run's checkpoints and verdicts.", (ExitCode.NOT_FOUND,), common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--saves", is_flag=True, help="List what was saved together, and why it counts as one save.")
def list_checkpoints(run: str, saves: bool, shared: Shared) -> None:
    """List RUN's checkpoints with their verdicts, from the records. Nothing is read back."""
    from ckptguard.inspect.list_states import survey
    from ckptguard.runs.target import open_named_run

    view = open_named_run(run, shared.settings([run]))
    if saves:
        _show_saves(view, shared)
        return
    states = survey(view)
    if shared.as_json:
        emit("list", target=view.run.url, checkpoints=states, not_understood=view.listing.not_understood)
    elif states:
        _show(states, view.run.url)
    else:
        trouble("there are no checkpoints yet")
    warn(*view.listing.unread_notes)
    if view.listing.not_understood is not None:
        warn_not_understood(view.listing.not_understood)


def _show_saves(view: RunView, shared: Shared) -> None:
    """A row for each part of each save."""
    from ckptguard.inspect.list_saves import list_saves
    from ckptguard.values.ids import step_text

    found = list_saves(view)
    if shared.as_json:
        emit("list", target=view.run.url, saves=found)
        return
    if not found:
        trouble("there are no saves on record yet")
        return
    rows: list[tuple[object, ...]] = []
    for number, save in enumerate(found, 1):
        for part in save.parts:
            age = f"{part.behind} save{'s' * (part.behind > 1)} earlier" if part.behind else ""
            outcome = "good" if part.good else "not good"
            rows.append((number, part.series, step_text(part.step), part.id, outcome, part.rule or "alone", age))
        rows += [(number, name, "-", None, "missing", "", "") for name in save.lacks]
    table(("save", "series", "step", "id", "outcome", "joined by", "from"), rows)


def _show(states: Sequence[CheckpointState], url: str) -> None:
    from ckptguard.decisions.known_good import order_words
    from ckptguard.values.ids import named_path

    wanted = [s for s in states if s.changed or s.outcome.value != "good"] if is_quiet() else states
    counted = any(s.counter is not None and s.id is not None and s.id.number is None for s in wanted)
    # A path says which checkpoint is meant, unless several contents were saved under one name.
    saves = any(s.id is not None and s.id.generation > 1 for s in wanted)
    rows = []
    for s in wanted:
        like = max(s.bytes or 0, s.kept_bytes or 0)
        cost = ("shared" if s.kept_bytes is None else size(s.kept_bytes, like=like)) if s.kept else None
        reason = _CHANGED.format(s.outcome.value) if s.changed else _short(s.reason) or "; ".join(s.pins)
        where = "+".join(word for field, word in _PLACES if getattr(s, field)) or "gone"
        id, counter = s.id if saves else None, s.counter if counted else None
        outcome = "changed" if s.changed else s.outcome.value
        rows.append((named_path(s.path, url), id, counter, outcome, where, size(s.bytes, like=like), cost, reason))
    if rows:
        table(_TITLES, rows, right=("size", "copy"), optional=("id", "counter inside", "copy"))
    kinds = {s.series: order_words(s.step) for s in wanted}
    if len(set(kinds.values())) > 1 or not all(isinstance(s.step, int) for s in wanted):
        for series, words in sorted(kinds.items()):
            say_well(f"{escape(series)} is ordered by {words}")


def _short(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON].rpartition(' ')[0]} …"

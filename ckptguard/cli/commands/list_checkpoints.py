"""``ckptguard list``: every checkpoint that the records or the storage know, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, PathOrUrl, Shared, quiet_option, shared_options
from ckptguard.cli.render import size, table, warn_not_understood
from ckptguard.terminal.output import emit, escape, has_reader, is_quiet, say, say_well, trouble
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.inspect.list_states import CheckpointState
    from ckptguard.values.settings import Settings

_LOCAL_PAUSE = 2.0  # seconds between two looks at a local run

_LONGEST_REASON = 200
_CHANGED = "was {} when it was read; changed since"
_PLACES = (("in_place", "run"), ("kept", "kept"), ("quarantined", "quarantine"), ("trashed", "trash"))


@click.command("list", cls=Command, short_help="List a run's checkpoints and verdicts.", codes=(ExitCode.NOT_FOUND,))
@click.argument("run", type=PathOrUrl())
@click.option("--watch", is_flag=True, help="Go on, and show every change, until you press Ctrl-C.")
@quiet_option
@shared_options
def command(run: str, watch: bool, shared: Shared) -> None:
    """List RUN's checkpoints with their verdicts, from the records. Nothing is read back."""
    from ckptguard.inspect.list_states import survey
    from ckptguard.runs.target import open_named_run

    settings = shared.settings([run])
    if watch:
        if shared.as_json:
            raise click.UsageError("--watch never ends, and --json prints one document: give only one of them")
        _watch(run, settings)
        return
    view = open_named_run(run, settings)
    states = survey(view)
    if shared.as_json:
        emit("list", target=view.run.url, checkpoints=states, not_understood=view.listing.not_understood)
    elif states:
        _show(states, view.run.url)
    else:
        trouble("there are no checkpoints yet")
    for note in view.listing.unnamed_notes:
        trouble(f"warning: {note}")
    if view.listing.not_understood is not None:
        warn_not_understood(view.listing.not_understood)


def _watch(run: str, settings: Settings) -> None:
    """Show the list again whenever it has changed, while anybody reads it."""
    from ckptguard.inspect.list_states import survey
    from ckptguard.records.who_and_when import utc_now
    from ckptguard.runs.target import open_named_run

    # A look at a store costs money and time there; a local one costs neither.
    pause = settings.scan_interval if "://" in run else min(settings.scan_interval, _LOCAL_PAUSE)
    shown = None
    while has_reader():
        view = open_named_run(run, settings)
        states = survey(view)
        if states != shown:
            shown = states
            click.clear()  # nothing, where there is no terminal
            say(f"{escape(view.run.url)} at {utc_now()}")
            if states:
                _show(states, view.run.url)
        wait(pause)


def wait(seconds: float) -> None:
    """Until the next look."""
    time.sleep(seconds)


def _show(states: Sequence[CheckpointState], url: str) -> None:
    from ckptguard.decisions.known_good import order_words
    from ckptguard.values.ids import named_path

    wanted = [s for s in states if s.changed or s.outcome.value != "good"] if is_quiet() else states
    copies = any(s.kept for s in wanted)
    counted = any(s.counter is not None and s.id is not None and s.id.number is None for s in wanted)
    # A path says which checkpoint is meant, unless several contents were saved under one name.
    saves = any(s.id is not None and s.id.generation > 1 for s in wanted)
    titles = (
        "path",
        *(("id",) if saves else ()),
        *(("counter inside",) if counted else ()),
        "outcome",
        "where",
        "size",
    )
    titles = (*titles, *(("copy",) if copies else ()), "reason")
    rows = []
    for s in wanted:
        cost = ("shared" if s.kept_bytes is None else size(s.kept_bytes)) if s.kept else None
        copy = (cost,) if copies else ()
        reason = _CHANGED.format(s.outcome.value) if s.changed else _short(s.reason) or "; ".join(s.pins)
        where = "+".join(word for field, word in _PLACES if getattr(s, field)) or "gone"
        counter = (s.counter,) if counted else ()
        outcome = "changed" if s.changed else s.outcome.value
        rows.append(
            (
                named_path(s.path, url),
                *((s.id,) if saves else ()),
                *counter,
                outcome,
                where,
                size(s.bytes),
                *copy,
                reason,
            )
        )
    if rows:
        table(titles, rows)
    kinds = {s.series: order_words(s.step) for s in wanted}
    if len(set(kinds.values())) > 1 or not all(isinstance(s.step, int) for s in wanted):
        for series, words in sorted(kinds.items()):
            say_well(f"{escape(series)} is ordered by {words}")


def _short(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON].rpartition(' ')[0]} …"

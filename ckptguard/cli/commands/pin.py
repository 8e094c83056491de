"""``ckptguard pin`` and ``ckptguard unpin``: have a checkpoint stay, whatever a policy says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Parsed, PathOrUrl, Shared, ShortText, command
from ckptguard.cli.render import cell
from ckptguard.terminal.output import emit, say_well
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from ckptguard.layouts import Checkpoint
    from ckptguard.records.pins import Pin
    from ckptguard.runs.run_view import RunView
    from ckptguard.values.settings import Settings

_UNTIL = Parsed("when", "ckptguard.records.who_and_when:lasts_until")


@command("pin", "Keep a checkpoint from being pruned.", (ExitCode.NOT_FOUND,), common="quiet json config records")
@click.argument("ckpt", type=PathOrUrl())
@click.option("--note", type=ShortText(), default="", help="Say why. `prune` and `list` show it.")
@click.option("--until", type=_UNTIL, help="Pin it until a date, a time (2027-01-31T12:00) or for a span (30d).")
def pin(ckpt: str, note: str, until: timedelta | None, shared: Shared) -> None:
    """Keep CKPT and its copies from being pruned, until you unpin it or --until passes.

    What is saved together with CKPT is pinned with it.

    Your trainer's own rotation (save_total_limit) knows nothing of pins.
    """
    from ckptguard.retention.pin import pin

    view, checkpoint = checkpoint_of_run(ckpt, shared.settings([ckpt]))
    pins = pin(view, checkpoint, note=note, lasts=until)
    if shared.as_json:
        emit("pin", target=view.run.url, pins=pins)
    else:
        ends = f" until {pins[0].until}" if pins[0].until else ""
        say_well(f"pinned {cell(checkpoint.path)}{beside(pins)}{ends}")


@command("unpin", "Let a pinned checkpoint be pruned again.", (ExitCode.NOT_FOUND,), common="quiet json config records")
@click.argument("ckpt", type=PathOrUrl())
def unpin(ckpt: str, shared: Shared) -> None:
    """Remove every pin that somebody set on CKPT, and those set with it on what is saved together.

    What is being loaded or restored stays until that has ended.
    """
    from ckptguard.retention.pin import unpin

    view, checkpoint = checkpoint_of_run(ckpt, shared.settings([ckpt]))
    released = unpin(view, checkpoint)
    if shared.as_json:
        emit("unpin", target=view.run.url, pins=released)
    else:
        say_well(f"unpinned {cell(checkpoint.path)}{beside(released)}")


def beside(pins: Sequence[Pin]) -> str:
    """Say of how many other checkpoints these pins are."""
    others = len({pin.id for pin in pins}) - 1
    return f" and {others} saved with it" if others else ""


def checkpoint_of_run(ckpt: str, settings: Settings) -> tuple[RunView, Checkpoint]:
    """The view of a run with records, and the checkpoint of it that a path names. NotFoundError."""
    from ckptguard.errors import NotFoundError
    from ckptguard.runs.target import resolve_target

    target = resolve_target(ckpt, settings)
    if target.view is None or target.checkpoint is None:
        hint = (
            "name the checkpoint's own path" if target.checkpoint is None else "ckptguard verify RUN begins its records"
        )
        raise NotFoundError(f"{ckpt} is no checkpoint of a run with records", hint=hint)
    return target.view, target.checkpoint

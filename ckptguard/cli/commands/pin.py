"""``ckptguard pin`` and ``ckptguard unpin``: have a checkpoint stay, whatever a policy says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, PathOrUrl, Shared, quiet_option, shared_options
from ckptguard.cli.render import cell
from ckptguard.terminal.output import emit, say_well
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptguard.layouts import Checkpoint
    from ckptguard.records.pins import Pin
    from ckptguard.runs.run_view import RunView
    from ckptguard.values.settings import Settings

_LONGEST_NOTE = 1000


@click.command("pin", cls=Command, codes=(ExitCode.NOT_FOUND,), short_help="Keep a checkpoint from being pruned.")
@click.argument("ckpt", type=PathOrUrl())
@click.option("--note", default="", metavar="TEXT", help="Say why. `prune` and `list` show it.")
@click.option("--until", metavar="WHEN", help="Pin it until a date, a time (2027-01-31T12:00) or for a span (30d).")
@quiet_option
@shared_options
def pin(ckpt: str, note: str, until: str | None, shared: Shared) -> None:
    """Keep CKPT and its copies from being pruned, until you unpin it or --until passes.

    What is saved together with CKPT is pinned with it.

    Your trainer's own rotation (save_total_limit) knows nothing of pins.
    """
    from ckptguard.errors import SettingsError
    from ckptguard.records.who_and_when import lasts_until
    from ckptguard.retention.pin import pin

    if len(note) > _LONGEST_NOTE:
        raise click.BadParameter(f"it has more than {_LONGEST_NOTE} characters", param_hint="--note")
    try:
        lasts = None if until is None else lasts_until(until)
    except SettingsError as error:
        raise click.BadParameter(error.message, param_hint="--until") from error
    view, checkpoint = checkpoint_of_run(ckpt, shared.settings([ckpt]))
    pins = pin(view, checkpoint, note=note, lasts=lasts)
    if shared.as_json:
        emit("pin", target=view.run.url, pins=pins)
    else:
        until = f" until {pins[0].until}" if pins[0].until else ""
        say_well(f"pinned {cell(checkpoint.path)}{beside(pins)}{until}")


@click.command("unpin", cls=Command, codes=(ExitCode.NOT_FOUND,), short_help="Let a pinned checkpoint be pruned again.")
@click.argument("ckpt", type=PathOrUrl())
@quiet_option
@shared_options
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

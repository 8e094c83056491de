"""``ckptguard doctor``: what does this storage really do?"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_text, table
from ckptguard.errors import ObjectMissingError
from ckptguard.terminal.output import emit, trouble
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.inspect.doctor import StorageDiagnosis

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)


@command("doctor", "Test which guarantees a storage gives.", CODES)
@click.argument("url", type=PathOrUrl())
@click.option(
    "--seconds",
    type=click.FloatRange(1.0, 3600.0),
    metavar="SECONDS",
    help="How long all probes together may take: 7.5 seconds unless you say more.",
)
def doctor(url: str, seconds: float | None, shared: Shared) -> None:
    """Probe what the storage at URL does and does not, and say what follows.

    The probes write a few small objects beside the run's files, and remove them. Where the records of a run lie
    elsewhere, that place is probed instead, and URL is only listed.
    """
    from ckptguard.inspect.doctor import diagnose, words
    from ckptguard.storage import open_storage

    settings = shared.settings([url])
    if settings.records is not None:
        storage = open_storage(url, must_exist="://" not in url, options=settings.storage)
        with contextlib.suppress(ObjectMissingError):  # a store has no empty folders
            storage.list("")
    found = diagnose(settings.records or url, settings.storage, seconds=seconds)
    if shared.as_json:
        emit("doctor", found)
    else:
        say_text(words(found))
        _show(found)
    codes = {"bad": ExitCode.BAD, "unknown": ExitCode.FAILED, "limited": ExitCode.UNDECIDED}
    raise click.exceptions.Exit(codes.get(found.outcome, ExitCode.GOOD))


def _show(found: StorageDiagnosis) -> None:
    """A line for each probe; those that have no answer for one reason share theirs."""
    rows = []
    for (answer, means), group in itertools.groupby(found.probes, lambda probe: (probe.answer, probe.means)):
        names = [probe.name for probe in group]
        several = len(names) > 1
        rows.append(
            (f"{len(names)} probes", answer, f"{means}: {', '.join(names)}") if several else (*names, answer, means)
        )
    table(("probe", "answer", "what follows"), rows)
    if any(probe.means.startswith("no answer") for probe in found.probes):
        trouble("hint: give it more time, with --seconds 60")

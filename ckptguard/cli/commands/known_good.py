"""``ckptguard known-good``: the path to go back to, alone on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.errors import CkptguardError
from ckptguard.terminal.output import emit, escape, say, warn, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.runs.find_known_good import Candidate, KnownGood, Wanted
    from ckptguard.runs.history import History
    from ckptguard.runs.run_view import RunView
    from ckptguard.values.settings import Settings

CODES = (ExitCode.NOT_FOUND, ExitCode.NO_KNOWN_GOOD)


@command("known-good", "Print the path of the known-good checkpoint.", CODES)
@click.argument("run", type=PathOrUrl())
@click.option("--before-step", type=click.IntRange(min=0), metavar="N", help="Look only at steps before N.")
@click.option("--series", metavar="NAME", help="Look only at this series, such as checkpoint-#.")
@click.option("--all", "every", is_flag=True, help="Print the paths of all checkpoints of its save.")
@click.option("--read", is_flag=True, help="Read every byte of the answer first.")
def known_good(run: str, before_step: int | None, series: str | None, every: bool, read: bool, shared: Shared) -> None:
    """Print the path of RUN's last known-good checkpoint, and nothing else.

    Of a save of several files that is the path of its weights, and all of the save is good.

    If its files changed since they were read, or anything happened to them (chmod, a link, a backup), they are read
    first. A kept copy is always read. If RUN has lost its good checkpoints, the replicas in the settings are asked.
    """
    from ckptguard.runs.find_known_good import Wanted, best_on_record, openable

    settings, wanted = shared.settings([run]), Wanted(before_step=before_step, series=series, thinned=True)
    known_good: KnownGood | None = None
    if not settings.replicas and not read:
        from ckptguard.records.run import open_run
        from ckptguard.runs.history import names_alone

        opened = open_run(run, settings)
        best = best_on_record(opened, wanted, history := names_alone(opened))
        is_sure = not any(part.changed or part.answer.kept or part.touched(opened) for part in best.save)
        if is_sure:
            known_good = best.answer
            _say_unread(history, known_good)
    if known_good is None:
        known_good = _read(run, settings, wanted, everything=read)
    known_good = openable(known_good)
    if known_good.thinned:
        warn(f"only thinned ones are good: a resume would restart: {', '.join(known_good.thinned)}")
    if shared.as_json:
        emit("known-good", known_good)
        return
    paths = [part.path for part in known_good.save if part.path != known_good.path] if every else []
    for path in (known_good.path, *paths):
        if escape(path) != path:
            # A script would take a line, or the escapes, for another path.
            raise CkptguardError(
                f"the path has characters that no line can hold: {path}", hint="--json prints it exactly"
            )
    for path in (known_good.path, *paths):
        say(path)


def _read(run: str, settings: Settings, wanted: Wanted, *, everything: bool) -> KnownGood:
    """The answer, after what must be read for it was read."""
    from ckptguard.replicas.replicate import find_known_good_anywhere
    from ckptguard.runs.run_view import open_view
    from ckptguard.scan import scanner_of
    from ckptguard.verification.read_known_good import read_known_good

    with working("reading", scanner=scanner_of(settings)) as work:

        def choose(view: RunView, wanted: Wanted) -> Candidate | None:
            return read_known_good(view, wanted, work, everything=everything)

        view = open_view(run, settings, must_exist=not settings.replicas)
        answer = find_known_good_anywhere(view, wanted, choose)
        _say_unread(view.history, answer)
        return answer


def _say_unread(history: History, answer: KnownGood) -> None:
    """Name the checkpoints that were passed over because nobody can look at them."""
    warn(*(f"passed over: {error.message}" for id, error in history.unread.items() if id != answer.id))

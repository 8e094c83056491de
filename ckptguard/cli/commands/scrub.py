"""``ckptguard scrub``: read again what has a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from ckptguard.cli.command import Command, Place, Shared, parse_rate, shared_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import emit, say, trouble, working
from ckptguard.cli.render import cell, print_findings, size, word

if TYPE_CHECKING:
    from ckptguard.repair.scrub import Scrubbed

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)
_HOOK_SECONDS = 65.0

Value = TypeVar("Value")


@click.command("scrub", cls=Command, codes=CODES, short_help="Read again what has a verdict, to find rot.")
@click.argument("run", type=Place())
@click.option("--max-duration", metavar="SPAN", help="Stop after SPAN (2h); the next scrub goes on there.")
@click.option("--max-age", metavar="SPAN", help="Leave out what was read within SPAN (7d).")
@click.option("--subset", metavar="N/T", help="Only the N-th of T parts of all checkpoints.")
@click.option("--rate", metavar="RATE", help="Bytes a second to read at most: 100MB, 50MiB.")
@click.option("--md5", is_flag=True, help="Compare MD5 too, where it is on record.")
@shared_options
def command(
    run: str,
    max_duration: str | None,
    max_age: str | None,
    subset: str | None,
    rate: str | None,
    md5: bool,
    shared: Shared,
) -> None:
    """Read RUN's checkpoints and kept copies again, what nobody has read for the longest time first.

    Bytes come from the disk, not from the page cache, and are compared by BLAKE3. Damage turns the verdict BAD, is an
    incident, and is told to hooks; a damaged kept copy counts no more. `ckptguard repair` puts the right bytes back.
    """
    from ckptguard.repair.scrub import ScrubListener, ScrubOrder, parse_subset, scrub
    from ckptguard.reporting.notify import Hooks
    from ckptguard.runs.target import open_named_run
    from ckptguard.scan.scanners import scanner_of
    from ckptguard.values.retention_policy import parse_span

    def said(parse: Callable[[str], Value], text: str | None) -> Value | None:
        return None if text is None else parse(text)

    order = ScrubOrder(
        max_duration=said(parse_span, max_duration),
        max_age=said(parse_span, max_age),
        subset=said(parse_subset, subset),
        md5=md5,
    )
    fastest = said(parse_rate, rate)
    settings = shared.settings()
    view = open_named_run(run, settings)
    hooks = Hooks(settings, _log)
    try:
        with scanner_of(settings) as scanner, working("scrubbing", scanner=scanner, rate=fastest) as work:
            done = scrub(view, order, watcher=ScrubListener(tell=hooks.tell), work=work)
    finally:
        hooks.close(patience=_HOOK_SECONDS)
    if shared.as_json:
        emit("scrub", done, target=view.run.url)
    else:
        _show(done)
    for sentence in done.could_not_tell:
        trouble(f"error: {sentence}")
    code = of_outcomes([one.outcome for one in done.places], could_not_tell=bool(done.could_not_tell))
    if not done.places and done.next is not None and not done.could_not_tell:
        code = ExitCode.GOOD  # nothing was due: all was read recently enough
    raise click.exceptions.Exit(code)


def _show(done: Scrubbed) -> None:
    for one in done.places:
        what = " (kept copy)" if one.place == "kept" else ""
        say(f"{word(one.outcome.value, 10)} {cell(one.path)}{what} ({one.id})  {size(one.bytes)}")
        print_findings((f for f in one.findings if f.severity.value != "notice"), one.path)
    total = size(sum(one.bytes for one in done.places))
    if not done.places and done.next is None:
        say("nothing here has a verdict yet: `ckptguard verify` gives one")
        return
    left = f"; time was up, {done.left} left" if done.stopped else ""
    say(f"read {len(done.places)} again ({total}){left}")


def _log(event: str, *, level: str = "info", **fields: object) -> None:
    if level != "info":
        trouble(f"warning: {event}: " + ", ".join(f"{name}={value}" for name, value in fields.items()))

"""``ckptguard scrub``: read again what has a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import RATE, SPAN, PathOrUrl, Shared, command
from ckptguard.cli.render import cell, print_findings, size, word
from ckptguard.terminal.output import emit, is_quiet, log_trouble, say, say_errors, say_well, working
from ckptguard.values.exit_codes import ExitCode, of_outcomes

if TYPE_CHECKING:
    from ckptguard.repair.scrub import Scrubbed

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)
_HOOK_SECONDS = 65.0


@command("scrub", "Read verified checkpoints again, to find rot.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--max-duration", type=SPAN, help="Stop after SPAN (2h); the next scrub goes on there.")
@click.option("--max-age", type=SPAN, help="Skip what was read within SPAN (7d).")
@click.option("--rate", type=RATE, help="Read at most this many bytes a second: 100MB, 50MiB.")
def scrub(run: str, max_duration: float | None, max_age: float | None, rate: float | None, shared: Shared) -> None:
    """Read RUN's verified checkpoints and kept copies again, the least recently read first.

    Bytes come from the disk, not from the page cache, and are compared by BLAKE3. Damage makes the verdict bad, opens
    an incident, and is reported to your hooks. `ckptguard repair` puts the right bytes back.
    """
    import msgspec

    from ckptguard.repair.scrub import ScrubListener, ScrubOrder, scrub
    from ckptguard.reporting.notify import Hooks
    from ckptguard.runs.target import open_named_run
    from ckptguard.scan import scanner_of

    order = ScrubOrder(max_duration=max_duration, max_age=max_age)
    settings = shared.settings([run])
    view = open_named_run(run, settings)
    hooks = Hooks(settings, log_trouble)
    hooks.begin(view)
    try:
        with working("scrubbing", scanner=scanner_of(settings), rate=rate) as work:
            done = scrub(view, order, watcher=ScrubListener(tell=hooks.tell), work=work)
    finally:
        hooks.close(timeout=_HOOK_SECONDS)
    in_order = sorted(done.places, key=lambda one: (one.id.series, one.id.order, one.place))
    done = msgspec.structs.replace(done, places=tuple(in_order))
    if shared.as_json:
        emit("scrub", done, target=view.run.url)
    else:
        _show(done)
    say_errors(done.could_not_tell)
    code = of_outcomes([one.outcome for one in done.places], could_not_tell=bool(done.could_not_tell))
    if not done.places and done.next is not None and not done.could_not_tell:
        code = ExitCode.GOOD  # nothing was due: all was read recently enough
    raise click.exceptions.Exit(code)


def _show(done: Scrubbed) -> None:
    for one in done.places:
        if is_quiet() and one.outcome.value == "good":
            continue
        what = " (kept copy)" if one.place == "kept" else ""
        say(f"{word(one.outcome.value, 10)} {cell(one.path)}{what}{one.id.nth_save}  {size(one.bytes)}")
        print_findings((f for f in one.findings if f.severity.value != "notice"), one.path)
    total = size(sum(one.bytes for one in done.places))
    if not done.places and done.next is None:
        say("nothing here has a verdict yet: run `ckptguard verify` first")
        return
    left = f"; time was up, {done.left} left" if done.stopped else ""
    say_well(f"read {len(done.places)} again ({total}){left}")

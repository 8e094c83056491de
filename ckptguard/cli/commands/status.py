"""``ckptguard status``: am I protected?"""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, escape, say
from ckptguard.cli.render import age, facts, size, some


@click.command("status", cls=Command, short_help="Am I protected?", codes=(ExitCode.NOT_FOUND, ExitCode.NO_KNOWN_GOOD))
@click.argument("run", type=Place())
@shared_options
def command(run: str, shared: Shared) -> None:
    """Say whether RUN is protected: known-good checkpoint, its age, pending saves, last incident, daemon, copies and
    replicas."""
    from ckptguard.cli.commands.replicate import standing_text
    from ckptguard.inspect.status import status
    from ckptguard.runs.run_view import open_view

    found = status(open_view(run, shared.settings()))
    if shared.as_json:
        emit("status", found)
    else:
        known_good, incident, daemon = found.known_good, found.last_incident, found.daemon
        where = f"step {incident.step}: " if incident and incident.step is not None else ""
        say(f"protected? {escape(found.explanation)}")
        facts(
            ("known-good", known_good and f"{known_good.path} ({known_good.id})"),
            ("age", age(found.known_good_age_seconds)),
            ("verdicts", ", ".join(f"{n} {outcome}" for outcome, n in found.outcomes.items() if n)),
            ("pending", some(found.pending)),
            ("changed", f"{some(found.changed)}: not read again yet (ckptguard verify)" if found.changed else None),
            ("last incident", incident and f"{where}{incident.reason} ({incident.state})"),
            ("daemon", daemon and f"pid {daemon.pid} on {daemon.host} since {daemon.started_at}"),
            ("kept copies", ", ".join(found.kept_kinds)),
            ("they take", size(found.kept_bytes) if found.kept_bytes else None),
            *(("replica", f"{r.url}: {r.trouble or standing_text(r)}") for r in found.replicas),
        )
    if found.known_good is None:
        raise click.exceptions.Exit(ExitCode.NO_KNOWN_GOOD)

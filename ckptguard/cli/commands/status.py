"""``ckptguard status``: am I protected?"""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say
from ckptguard.values.ids import escape


@click.command("status", cls=Command, short_help="Am I protected?", codes=(ExitCode.NOT_FOUND, ExitCode.NO_KNOWN_GOOD))
@click.argument("run", type=Place())
@json_option
@settings_options
def command(run: str, as_json: bool, config: str | None, records: str | None) -> None:
    """Say whether RUN is protected: known-good checkpoint, its age, pending saves, last incident, daemon, copies and
    replicas."""
    from ckptguard.cli.commands.replicate import standing_text
    from ckptguard.cli.documents import status_document
    from ckptguard.cli.render import age, facts, some
    from ckptguard.inspect.status import status
    from ckptguard.records.run import open_run

    settings = settings_from(config, records)
    found = status(open_run(run, settings), settings)
    if as_json:
        emit(status_document(found))
    else:
        known_good, incident, daemon = found.known_good, found.last_incident, found.daemon
        say(f"protected? {escape(found.explanation)}")
        facts(
            [
                ("known-good", known_good and f"{known_good.path} ({known_good.id})"),
                ("age", age(found.known_good_age_seconds)),
                ("verdicts", ", ".join(f"{n} {outcome}" for outcome, n in found.outcomes.items() if n)),
                ("pending", some(found.pending)),
                ("last incident", incident and f"step {incident.step}: {incident.reason} ({incident.state})"),
                ("daemon", daemon and f"pid {daemon.pid} on {daemon.host} since {daemon.started_at}"),
                ("kept copies", ", ".join(found.kept_kinds)),
                *(("replica", f"{r.url}: {r.trouble or standing_text(r)}") for r in found.replicas),
            ]
        )
    if found.known_good is None:
        raise click.exceptions.Exit(ExitCode.NO_KNOWN_GOOD)

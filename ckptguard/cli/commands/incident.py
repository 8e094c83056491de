"""``ckptguard incident``: one incident's report: what happened, why, and what to do."""

from __future__ import annotations

import os

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say
from ckptguard.cli.progress import progress_bar
from ckptguard.errors import CkptguardError
from ckptguard.values.ids import escape


@click.command("incident", cls=Command, short_help="Show an incident's report.", codes=(ExitCode.NOT_FOUND,))
@click.argument("run", type=Place())
@click.argument("incident_id", metavar="[ID]", required=False)
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write one self-contained HTML page.")
@click.option("--read", is_flag=True, help="Read the last good and the first bad checkpoint again, tensor by tensor.")
@json_option
@settings_options
def command(
    run: str,
    incident_id: str | None,
    html: str | None,
    read: bool,
    as_json: bool,
    config: str | None,
    records: str | None,
) -> None:
    """Show what is known about an incident of RUN: when it began, which tensors went first, its likely causes and
    what to do about them. The newest incident, or the one whose ID (or the start of it) is given."""
    from ckptguard.cli.documents_of_incidents import incident_document
    from ckptguard.incidents.build_report import choose_incident, report_of
    from ckptguard.incidents.report_text import report_text
    from ckptguard.records.run import open_run

    settings = settings_from(config, records)
    opened = open_run(run, settings)
    incident = choose_incident(opened, incident_id)
    with progress_bar("reading") as advance:
        report = report_of(opened, incident, read=read, progress=advance)
    if html is not None:
        from ckptguard.incidents.report_html import report_html

        _write(html, report_html(report))
    if as_json:
        emit(incident_document(report))
    elif html is not None:
        say(escape(os.path.abspath(html)))
    else:
        say(report_text(report).rstrip("\n"))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise CkptguardError(f"{path} cannot be written: {error.strerror}") from error

"""``ckptguard incidents`` and ``ckptguard incident``: what happened to a run, why, and what was done about it."""

from __future__ import annotations

import os

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_text, table
from ckptguard.errors import CkptguardError
from ckptguard.terminal.output import emit, escape, say, working
from ckptguard.values.exit_codes import ExitCode


@command("incidents", "List a run's incidents.", (ExitCode.NOT_FOUND,))
@click.argument("run", type=PathOrUrl())
def incidents(run: str, shared: Shared) -> None:
    """List the incidents of RUN, oldest first: when training or a save went wrong, and what was done about it. Then
    list what operators had done to RUN over HTTP, and why.

    `ckptguard incident RUN ID` shows one of the incidents.
    """
    from ckptguard.documents.build import fields
    from ckptguard.records.audit import list_actions
    from ckptguard.records.incidents import list_incidents
    from ckptguard.records.run import open_run

    opened = open_run(run, shared.settings([run]))
    found, actions = list_incidents(opened), list_actions(opened)
    if shared.as_json:
        lines = [fields(i, "line of incidents") for i in found]
        emit("incidents", target=opened.url, incidents=lines, actions=actions)
        return
    if found:
        rows = [(i.id, i.step, i.cause, i.state, i.actions[-1] if i.actions else i.reason) for i in found]
        table(("incident", "step", "cause", "state", "what"), rows)
    else:
        say(f"{escape(opened.url)} has no incidents")
    if actions:
        say("")
        table(("action", "verb", "state", "by", "why"), [(a.id, a.verb, a.so_far, a.name, a.reason) for a in actions])


@command("incident", "Show an incident's report.", (ExitCode.NOT_FOUND,))
@click.argument("run", type=PathOrUrl())
@click.argument("incident_id", metavar="[ID]", required=False)
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write one self-contained HTML page.")
@click.option("--read", is_flag=True, help="Read the last good and the first bad checkpoint again.")
def incident(run: str, incident_id: str | None, html: str | None, read: bool, shared: Shared) -> None:
    """Show the report of one incident of RUN: when it began, which tensors went wrong, its likely causes, and what to
    do about them.

    ID is that of `ckptguard incidents RUN`, or the start of it. Without one, the newest incident is shown.
    """
    from ckptguard.reporting.build_report import choose_incident, report_of
    from ckptguard.reporting.report_text import report_text
    from ckptguard.runs.run_view import open_view

    view = open_view(run, shared.settings([run]))
    incident = choose_incident(view.run, incident_id)
    with working("reading") as work:
        report = report_of(view, incident, read=read, work=work)
    if html is not None:
        from ckptguard.reporting.report_html import report_html

        page = report_html(report)
        try:
            with open(html, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(page)
        except OSError as error:
            raise CkptguardError(f"{html} cannot be written: {error.strerror}") from error
    if shared.as_json:
        emit("incident", report)
    elif html is not None:
        say(escape(os.path.abspath(html)))
    else:
        say_text(report_text(report).rstrip("\n"))

"""What `ckptguard.verify` answers with, for people and for programs."""

from __future__ import annotations

import html
from collections.abc import Iterable

import msgspec

from ckptguard.api.answers import LEFT, Printable
from ckptguard.documents.report_lines import Line, Table, finding_lines, report_lines
from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
from ckptguard.runs import results
from ckptguard.runs.results import Checked
from ckptguard.values.ids import escape
from ckptguard.values.own_log import log as _log
from ckptguard.values.plain_numbers import size
from ckptguard.values.settings import Settings


class Report(Printable, results.VerifyReport, frozen=True, kw_only=True):
    """What one call verified.

    `ok` is True only if something was checked, all of it was read, and all of it is good. A report is true if it is
    `ok`, so ``if ckptguard.verify(path):`` is safe. `outcome` is the worst one, `checkpoints` has one entry each with
    its own `path`, `step`, `outcome` and `findings`, and `findings` has those of all. `notes` are warnings for people.
    `incident_of` is the run that has an incident about it, if there is one.

    ``print(report)`` prints what the command line prints. A notebook shows a table.
    """

    incident_of: str | None = None

    def _blocks(self) -> Iterable[Line | Table]:
        return report_lines(self, incident_of=self.incident_of)

    def _repr_html_(self) -> str:
        """A table for notebooks. Everything in it is escaped: names come from files that may be hostile."""
        rows = "".join(_row(checked) for checked in self.checkpoints)
        heads = "".join(f"<th {LEFT}>{title}</th>" for title in _TITLES)
        notes = "".join(f"<p>{_safe(note)}</p>" for note in self.notes)
        return (
            f"<p><code>{_safe(self.target)}</code>: <b>{_safe(self.outcome.value)}</b></p>"
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{notes}"
        )


_TITLES = ("Checkpoint", "Outcome", "Step", "Size", "Findings")


def as_report(found: results.VerifyReport, incidents: IncidentsOfSaves) -> Report:
    """The same, with what people see of it."""
    return Report(**msgspec.structs.asdict(found), incident_of=incidents.run)


def incidents_of(settings: Settings) -> IncidentsOfSaves:
    """Opens incidents about the bad saves that are found meanwhile."""
    return IncidentsOfSaves(settings, source="api", log=_log_hook)


def _log_hook(event: str, *, level: str = "info", **fields: object) -> None:
    if level != "info":
        _log.warning("%s: %s", event, ", ".join(f"{name}={value}" for name, value in fields.items()))


def _row(checked: Checked) -> str:
    said = (f"{line.word}{line.rest}" for line in finding_lines(checked.findings, checked.path))
    cells = (
        f"<code>{_safe(checked.path)}</code>",
        f"<b>{_safe(checked.outcome.value)}</b>",
        "-" if checked.step is None else _safe(str(checked.step)),
        _safe(size(checked.bytes)),
        "<br>".join(map(_safe, said)),
    )
    return "<tr>" + "".join(f"<td {LEFT}>{cell}</td>" for cell in cells) + "</tr>"


def _safe(text: str) -> str:
    return html.escape(escape(text))

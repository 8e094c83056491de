"""One incident: its report as a document, and as the single page that needs nothing but itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ckptguard.documents.build import Document, document, fields
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import NotFoundError
from ckptguard.records.incidents import read_incident
from ckptguard.reporting.build_report import report_of
from ckptguard.reporting.report_html import report_html
from ckptguard.values.incident import IncidentReport
from ckptguard_daemon.http.replies import escaped
from ckptguard_daemon.http.routes import Role, Route, Served
from ckptguard_daemon.reading import Reads, counted_view

_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""

    async def details(request: Request) -> Response:
        run, name = served.run_of(request), request.path_params["incident"]

        def make(reads: Reads) -> Document:
            return {**document("incident", run=run.run_id), **escaped(fields(_report(run, name, reads)))}

        return await served.clicks.answer(request, make)

    async def page(request: Request) -> Response:
        run, name = served.run_of(request), request.path_params["incident"]

        def make(reads: Reads) -> Response:
            text = report_html(_report(run, name, reads)).encode("utf-8", "backslashreplace")
            headers = {"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-store"}
            return Response(text, headers=headers, media_type="text/html")

        return await served.clicks.do(request, make)

    one = "/v1/runs/{run}/incidents/{incident}"
    return [Route(one, details, Role.READER), Route(f"{one}/report", page, Role.READER)]


def _report(watched: WatchedRun, name: str, reads: Reads) -> IncidentReport:
    view = counted_view(watched, reads)
    incident = read_incident(view.run, name)
    if incident is None:
        raise NotFoundError(f"{watched.url} has no incident {name[:40]}")
    return report_of(view, incident)

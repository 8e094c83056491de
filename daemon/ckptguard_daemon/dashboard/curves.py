"""The curves of a run: loss, gradient norm, loss scale and learning rate over its updates."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ckptguard.catalogue.curves import unpacked
from ckptguard.catalogue.questions import curve as curve_of
from ckptguard.catalogue.rows import CurveRow
from ckptguard.documents.build import Document, document
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.records.who_and_when import seconds_of
from ckptguard_daemon.dashboard.answer import answer
from ckptguard_daemon.http.routes import Role, Route, Served


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""

    async def curves(request: Request) -> Response:
        run = served.run_of(request)
        return await answer(request, lambda: _curves(served, run))

    return [Route("/v1/runs/{run}/curves", curves, Role.READER)]


def _curves(served: Served, run: WatchedRun) -> Document:
    """Return the columns as they are: a number that is not finite is a word."""
    row, incidents = served.feed.ask(curve_of, run.run_id) or (CurveRow(), ())
    curve = unpacked(row)
    back = [i for i in incidents if i.went_back_to is not None and i.step is not None]
    return {
        **document("curves"),
        "as_of": seconds_of(run.last_pass_at or ""),
        "source": row.source,
        "step": curve.step,
        "loss": curve.loss,
        "grad_norm": curve.grad_norm,
        "scale": curve.scale,
        "lr": curve.lr,
        "began": curve.began,
        "skipped": curve.skipped,
        "rollbacks": [{"incident": i.name, "from": i.step, "onset": i.onset, "to": i.went_back_to} for i in back],
    }

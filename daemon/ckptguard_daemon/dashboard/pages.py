"""What the pages of the fleet and of a run show. It comes from the catalogue and from the last pass.

No request to a run's storage is made for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.catalogue.curves import unpacked
from ckptguard.catalogue.rows import Noted, NumberedEvent
from ckptguard.decisions.at_risk import at_risk, at_risk_words
from ckptguard.decisions.growth import filling_words
from ckptguard.documents.build import Document, document, fields, plain
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.records.who_and_when import seconds_of
from ckptguard.values.ids import escape
from ckptguard.values.run_rows import Generation, IncidentRow
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.http.replies import pack
from ckptguard_daemon.http.routes import Role, Route, Served

_MOST_EVENTS = 1000


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""
    feed = served.feed

    async def fleet(request: Request) -> Response:
        # Those that `run` names, or all: an event costs a line, not the fleet.
        wanted = set(request.query_params.getlist("run"))
        runs = [run for run in served.runs_for(request) if not wanted or run.run_id in wanted]
        return await run_in_threadpool(lambda: pack(request, fleet_page(feed, runs)))

    async def page(request: Request) -> Response:
        run = served.run_of(request)
        return await run_in_threadpool(lambda: pack(request, run_page(feed, run)))

    async def curves(request: Request) -> Response:
        run = served.run_of(request)
        return await run_in_threadpool(lambda: pack(request, _curves(feed, run)))

    return [
        Route("/v1/fleet", fleet, Role.READER),
        Route("/v1/runs/{run}/page", page, Role.READER),
        Route("/v1/runs/{run}/curves", curves, Role.READER),
    ]


def fleet_page(feed: CatalogueFeed, runs: Sequence[WatchedRun]) -> Document:
    """Return a line for each run."""
    now = time.time()
    newest = feed.catalogue.newest  # before the rows: what happens meanwhile is told again
    rows = [_row(feed, run, now) for run in runs]
    checkpoints, size = Counter[str](), Counter[str]()
    for row in rows:
        checkpoints.update(row["checkpoints"])
        size.update(row["bytes"])
    totals = [{"outcome": one, "checkpoints": checkpoints[one], "bytes": size[one]} for one in sorted(checkpoints)]
    return {
        **document("fleet"),
        "as_of": now,
        "catalogue": feed.catalogue.is_in_file,
        "newest_event": newest,
        "totals": totals,
        "runs": rows,
    }


def run_page(feed: CatalogueFeed, run: WatchedRun) -> Document:
    """Return all that is noted of one run."""
    newest, row, noted = feed.catalogue.newest, _row(feed, run, time.time()), feed.catalogue.noted(run.run_id)
    known = noted or Noted()
    generations = sorted(known.generations.values(), key=lambda g: (g.saved_at or 0.0, g.name))
    incidents = sorted(known.incidents.values(), key=lambda i: i.name)
    return {
        **document("page"),
        "as_of": seconds_of(run.last_pass_at or ""),
        "noted": noted is not None,
        "newest_event": newest,
        "run": row,
        "sentence": row["explanation"],
        "series": sorted({escape(g.id.series) for g in generations}),
        "generations": [_generation(g) for g in generations],
        "incidents": [_incident(i) for i in incidents],
        "events": [event_fields(e) for e in known.events[-_MOST_EVENTS:]],
        "pending": plain(run.last_pass.pending),
        "could_not_tell": [*map(escape, run.last_pass.could_not_tell), *run.last_pass.unread],
        "not_understood": run.last_pass.not_understood and plain(run.last_pass.not_understood.notes),
        "filling": filling_words(feed.summary(run)),
        "replicas": [{**fields(r, "standing"), "held": len(r.held)} for r in run.replicas],
        "scrub": plain(run.scrub),
    }


def _curves(feed: CatalogueFeed, run: WatchedRun) -> Document:
    """Return loss, gradient norm, loss scale and learning rate over the updates, as columns. A number that is not
    finite is a word."""
    noted = feed.catalogue.noted(run.run_id) or Noted()
    known, incidents = unpacked(noted.curve), sorted(noted.incidents.values(), key=lambda i: i.name)
    back = [i for i in incidents if i.went_back_to is not None and i.step is not None]
    return {
        **document("curves"),
        "as_of": seconds_of(run.last_pass_at or ""),
        "source": noted.curve.source,
        **{name: getattr(known, name) for name in ("step", "loss", "grad_norm", "scale", "lr", "began", "skipped")},
        "rollbacks": [{"incident": i.name, "from": i.step, "onset": i.onset, "to": i.went_back_to} for i in back],
    }


def _row(feed: CatalogueFeed, run: WatchedRun, now: float) -> Document:
    summary = feed.summary(run)
    known = sum(one.behind is not None and not one.trouble for one in run.replicas)
    return {
        "id": run.run_id,
        **msgspec.to_builtins(summary),
        "url": escape(summary.url),
        "name": escape(summary.name),
        "replicas_unknown": max(summary.replicas - known, 0),
        "at_risk": at_risk_words(at_risk(summary, now)),
        "trouble": None if run.trouble is None else escape(run.trouble.message),
    }


def _generation(row: Generation) -> Document:
    id = row.id
    found: Document = {**msgspec.to_builtins(row), "id": str(id), "series": escape(id.series), "step": id.step}
    if row.pinned_until is not None and row.pinned_until < time.time():
        found["pinned"] = ""
    del found["content"], found["pinned_until"], found["thinned"]
    return found


def _incident(row: IncidentRow) -> Document:
    went_back = row.went_back.partition(" ")[0] if row.went_back is not None else None
    return {**msgspec.to_builtins(row), "went_back": went_back}


def event_fields(one: NumberedEvent) -> Document:
    """Return an event as every document shows it."""
    found: Document = msgspec.to_builtins(one.event)
    del found["key"]
    return {"number": one.number, "run": one.run, **found}

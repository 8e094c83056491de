"""Actions: which there are for a caller. An operator has a plan made, agrees to it with a reason, and it is carried
out if it still is the plan.

Each real one is on record before it begins. It runs in a thread of its own, whether its caller waits or not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.documents.build import Document, document, fields
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import CkptguardError, NotFoundError, PlanChangedError, SettingsError
from ckptguard.records.audit import (
    DONE,
    FAILED,
    LONGEST_REASON,
    REFUSED,
    STOPPED,
    begin_action,
    end_action,
    known_actions,
    list_actions,
)
from ckptguard.records.who_and_when import utc_text
from ckptguard.runs.work import Work
from ckptguard.values.record_text import what_is_wrong
from ckptguard.version import __version__
from ckptguard_daemon.dashboard.verbs import (
    VERBS,
    ActionPlan,
    ActionRequest,
    Asked,
    Done,
    Rules,
    dry_prune,
    prune_costs,
    prune_words,
)
from ckptguard_daemon.http.replies import number, read_body, reply
from ckptguard_daemon.http.routes import Caller, Role, Route, Served, caller_of
from ckptguard_daemon.jobs import ActionJob
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import LaneScanner
from ckptguard_daemon.reading import Reads

_TIMEOUT, _LONGEST_WAIT = 10.0, 60.0  # seconds until a caller is told to come back
_MOST_SHOWN = 100  # actions


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""

    async def me(request: Request) -> Response:
        caller = caller_of(request)
        found = {
            "name": caller.name,
            "role": caller.role.word,
            "runs": caller.runs,
            "expires": None if caller.expires is None else utc_text(caller.expires),
            "version": __version__,
            "actions": tuple(VERBS) if caller.role is Role.OPERATOR else (),
            "reason_for": tuple(verb for verb in VERBS if _needs_reason(verb, caller)),
        }
        return reply(document("me", **found))

    async def retention(request: Request) -> Response:
        run, rules = served.run_of(request), _rules(request)

        def preview(_: Reads) -> Response:
            done = dry_prune(run.look_at_all(), rules)
            found = {**document("retention", run=run.run_id, target=run.url), **fields(done)}
            return reply({**found, "plan": prune_words(done), "costs": prune_costs(done)})

        return await served.clicks.do(request, preview)

    async def listed(request: Request) -> Response:
        run = served.run_of(request)

        def read(_: Reads) -> Response:
            actions = list_actions(run.open(), most=_MOST_SHOWN)
            return reply(document("actions", run=run.run_id, target=run.url, actions=actions))

        return await served.clicks.do(request, read)

    async def begun(request: Request) -> Response:
        run, name, caller = served.run_of(request), request.path_params["verb"], caller_of(request)
        verb = VERBS.get(name)
        if verb is None:
            raise NotFoundError(f"there is no action {name[:40]}", hint=f"there are {', '.join(VERBS)}")
        asking: ActionRequest = await read_body(request, verb.arguments)
        if not asking.dry_run:
            _refuse_unfounded(name, asking, caller)
        job = served.jobs.begin(
            uuid.uuid4().hex,
            run.run_id,
            name,
            lambda job: act(served, run, name, asking, caller, job),
            exclusive=not asking.dry_run,
        )
        return await _answer(request, job)

    async def gone_on(request: Request) -> Response:
        run = served.run_of(request)
        return await _answer(request, served.jobs.get(request.path_params["job"], run.run_id))

    run = "/v1/runs/{run}"
    return [
        Route("/v1/me", me, Role.READER),
        Route(f"{run}/retention", retention, Role.READER),
        Route(f"{run}/actions", listed, Role.READER),
        Route(f"{run}/actions/{{verb}}", begun, Role.OPERATOR, ["POST"]),
        Route(f"{run}/jobs/{{job}}", gone_on, Role.OPERATOR),
    ]


async def _answer(request: Request, job: ActionJob) -> Response:
    seconds = number(request, "wait_seconds", float, _LONGEST_WAIT)
    answer = await job.wait(_TIMEOUT if seconds is None else seconds)
    if answer is not None:
        return reply(answer)
    until = utc_text(job.until)
    waiting = document("action", run=job.run_id, verb=job.what, state="running", job=job.id, until=until)
    return reply(waiting, status=202)


def _rules(request: Request) -> Rules:
    query = request.query_params
    given: dict[str, Any] = {name: query[name] for name in query}
    if "keep_best" in query:
        given["keep_best"] = query.getlist("keep_best")
    try:
        return msgspec.convert(given, Rules)
    except msgspec.ValidationError as error:
        raise SettingsError(f"the query does not have the expected form: {what_is_wrong(error)}") from error


def _needs_reason(verb: str, caller: Caller) -> bool:
    """True if the record must say why: not of what changes nothing, nor of what owners do to their own runs. That a
    suspect checkpoint is good needs one from everybody."""
    return caller.role is Role.OPERATOR and verb != "verify" and (verb == "clear" or not caller.is_owner)


def _refuse_unfounded(verb: str, asking: ActionRequest, caller: Caller) -> None:
    if _needs_reason(verb, caller) and not asking.reason.strip():
        raise SettingsError("`reason` is empty: say why, for the record")
    if len(asking.reason) > LONGEST_REASON:
        raise SettingsError(f"`reason` has more than {LONGEST_REASON} characters")
    if not asking.token:
        raise SettingsError("`token` is missing", hint="a dry run answers the plan and its token")


def act(
    served: Served, guarded: WatchedRun, verb: str, asking: ActionRequest, caller: Caller, job: ActionJob
) -> Document:
    """Plan an action, or carry it out, in the thread of a job. Scanning processes end with that thread."""
    scanner = LaneScanner(job.stop)
    try:
        work = Work(scanner=scanner.by(guarded.settings), stop=job.stop)
        asked = Asked(guarded=guarded, view=guarded.look(), arguments=asking, work=work, name=caller.name)
        before = known_actions(asked.view.run)
        if asking.dry_run:
            plan = VERBS[verb].act(asked)
            assert isinstance(plan, ActionPlan)
            token = _token(asked, verb, plan, before)
            parts: dict[str, object] = {"state": "planned", "plan": plan.lines, "costs": plan.costs, "token": token}
        else:
            parts = _carry_out(served, asked, verb, caller, before)
        return document("action", run=guarded.run_id, verb=verb, **parts)
    finally:
        scanner.close()


def _token(asked: Asked, verb: str, plan: ActionPlan, before: Sequence[str]) -> str:
    """Return the digest of a plan, of what it is about, and of the actions before it. So no token works twice."""
    content = [asked.guarded.run_id, verb, asked.arguments.arguments, plan.lines, plan.about, before]
    text = repr(msgspec.to_builtins(content)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _carry_out(served: Served, asked: Asked, verb: str, caller: Caller, before: Sequence[str]) -> dict[str, object]:
    """Do what was agreed to, with a record of its begin and of its end. Returns the parts of the answer."""

    def check(plan: ActionPlan) -> None:
        if _token(asked, verb, plan, before) != asking.token:
            raise PlanChangedError(
                "something changed since you saw the plan, so nothing was done", hint="look at the new plan"
            )

    def end(state: str, lines: Sequence[str]) -> None:
        log("action", run=run.url, verb=verb, by=action.name, state=state, reason=action.reason)
        try:
            end_action(run, action, state, lines)
        except CkptguardError as error:
            log("action_not_completed", level="warning", run=run.url, action=action.id, reason=error.message)
        asked.guarded.look_soon()
        served.loop.wake(asked.guarded.run_id)

    run, asking = asked.view.run, asked.arguments
    action = begin_action(
        run,
        verb=verb,
        name=caller.name,
        role=caller.role.word,
        arguments=asking.arguments,
        reason=asking.reason,
        plan=asking.token,
    )
    try:
        done = VERBS[verb].act(dataclasses.replace(asked, check=check))
        assert isinstance(done, Done)
    except Exception as error:
        reported = error.message if isinstance(error, CkptguardError) else f"unexpected {type(error).__name__}"
        end(REFUSED if isinstance(error, PlanChangedError) else _failed(asked), (reported,))
        raise
    state = DONE if done.well else _failed(asked)
    end(state, done.lines)
    return {"state": state, "action": action.id, "done": done.lines}


def _failed(asked: Asked) -> str:
    return STOPPED if asked.work.is_stopped() else FAILED

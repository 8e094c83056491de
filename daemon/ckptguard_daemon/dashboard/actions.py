"""Actions: an operator has a plan made, agrees to it with a reason, and it is carried out if it still is the plan.

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
    Action,
    begin_action,
    end_action,
    known_actions,
    list_actions,
)
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import utc_text
from ckptguard.runs.work import Work
from ckptguard.values.record_text import what_is_wrong
from ckptguard_daemon.dashboard.asked import ActionPlan, ActionRequest, Asked, Done, Rules
from ckptguard_daemon.dashboard.reading import Clicks, Reads
from ckptguard_daemon.dashboard.verbs import VERBS, dry_prune, prune_plan, prune_words
from ckptguard_daemon.http.replies import number, read_body, reply
from ckptguard_daemon.http.routes import Caller, Role, Route, Served, caller_of
from ckptguard_daemon.jobs import ActionJob
from ckptguard_daemon.log import log
from ckptguard_daemon.loop import LaneScanner

_TIMEOUT, _LONGEST_WAIT = 10.0, 60.0  # seconds until a caller is told to come back
_MOST_SHOWN = 100  # actions


def routes(served: Served, clicks: Clicks) -> list[Route]:
    """Return the routes of this module."""
    return Actions(served, clicks).routes()


class Actions:
    """The routes of actions."""

    def __init__(self, served: Served, clicks: Clicks) -> None:
        self._served, self._clicks = served, clicks

    def routes(self) -> list[Route]:
        """Return the routes."""
        run = "/v1/runs/{run}"
        return [
            Route(f"{run}/retention", self._retention, Role.READER),
            Route(f"{run}/actions", self._list, Role.READER),
            Route(f"{run}/actions/{{verb}}", self._act, Role.OPERATOR, ["POST"]),
            Route(f"{run}/jobs/{{job}}", self._job, Role.OPERATOR),
        ]

    async def _retention(self, request: Request) -> Response:
        guarded, rules = self._served.run_of(request), _rules(request)

        def preview(_: Reads) -> Response:
            done = dry_prune(guarded.look(), rules)
            found = document("retention", run=guarded.run_id, target=guarded.url, **fields(done))
            return reply({**found, "plan": prune_words(done), "costs": prune_plan(done).costs})

        return await self._clicks.do(request, preview)

    async def _list(self, request: Request) -> Response:
        guarded = self._served.run_of(request)

        def listed(_: Reads) -> Response:
            actions = list_actions(guarded.open(), most=_MOST_SHOWN)
            return reply(document("actions", run=guarded.run_id, target=guarded.url, actions=actions))

        return await self._clicks.do(request, listed)

    async def _act(self, request: Request) -> Response:
        guarded, name = self._served.run_of(request), request.path_params["verb"]
        verb = VERBS.get(name)
        if verb is None:
            raise NotFoundError(f"there is no action {name[:40]}", hint=f"there are {', '.join(VERBS)}")
        asking: ActionRequest = await read_body(request, verb.arguments)
        if not asking.dry_run:
            _refuse_unfounded(asking)
        act = Acting(self._served, guarded, name, asking, caller_of(request))
        job = self._served.jobs.begin(uuid.uuid4().hex, guarded.run_id, name, act, exclusive=not asking.dry_run)
        return await self._answer(request, job)

    async def _job(self, request: Request) -> Response:
        guarded = self._served.run_of(request)
        return await self._answer(request, self._served.jobs.get(request.path_params["job"], guarded.run_id))

    async def _answer(self, request: Request, job: ActionJob) -> Response:
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


def _refuse_unfounded(asking: ActionRequest) -> None:
    if not asking.reason.strip():
        raise SettingsError("`reason` is empty: say why, for the record")
    if len(asking.reason) > LONGEST_REASON:
        raise SettingsError(f"`reason` has more than {LONGEST_REASON} characters")
    if not asking.token:
        raise SettingsError("`token` is missing", hint="a dry run answers the plan and its token")


class Acting:
    """One action, dry or real, as the work of a job."""

    def __init__(self, served: Served, guarded: WatchedRun, verb: str, asking: ActionRequest, caller: Caller) -> None:
        self._served, self._guarded, self._verb = served, guarded, verb
        self._asking, self._caller = asking, caller

    def __call__(self, job: ActionJob) -> Document:
        """Do it, in the job's thread. Scanning processes end with the thread that started them."""
        scanner = LaneScanner(job.stop)
        try:
            work = Work(scanner=scanner.by(self._guarded.settings), stop=job.stop)
            view = self._guarded.look()
            name = self._caller.name
            asked = Asked(guarded=self._guarded, view=view, arguments=self._asking, work=work, name=name)
            return self._plan(asked) if self._asking.dry_run else self._carry_out(asked, job)
        finally:
            scanner.close()

    def _plan(self, asked: Asked) -> Document:
        before = known_actions(asked.view.run)
        plan = VERBS[self._verb].act(asked)
        assert isinstance(plan, ActionPlan)
        return self._document(state="planned", plan=plan.lines, costs=plan.costs, token=self._token(plan, before))

    def _token(self, plan: ActionPlan, before: Sequence[str]) -> str:
        """Return the digest of a plan, of what it is about, and of the actions before it. So no token works twice."""
        content = [self._guarded.run_id, self._verb, self._asking.arguments, plan.lines, plan.about, before]
        text = repr(msgspec.to_builtins(content)).encode("utf-8", "backslashreplace")
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def _carry_out(self, asked: Asked, job: ActionJob) -> Document:
        def check(plan: ActionPlan) -> None:
            if self._token(plan, before) != self._asking.token:
                raise PlanChangedError(
                    "something changed since you saw the plan, so nothing was done", hint="look at the new plan"
                )

        run, asking = asked.view.run, self._asking
        before = known_actions(run)
        action = begin_action(
            run,
            verb=self._verb,
            name=self._caller.name,
            role=self._caller.role.word,
            arguments=asking.arguments,
            reason=asking.reason,
            plan=asking.token,
        )
        try:
            done = VERBS[self._verb].act(dataclasses.replace(asked, check=check))
            assert isinstance(done, Done)
        except Exception as error:
            reported = error.message if isinstance(error, CkptguardError) else f"unexpected {type(error).__name__}"
            state = REFUSED if isinstance(error, PlanChangedError) else STOPPED if job.stop.is_set() else FAILED
            self._end(run, action, state, (reported,))
            raise
        state = DONE if done.well else STOPPED if job.stop.is_set() else FAILED
        self._end(run, action, state, done.lines)
        return self._document(state=state, action=action.id, done=done.lines)

    def _end(self, run: Run, action: Action, state: str, lines: Sequence[str]) -> None:
        log("action", run=run.url, verb=action.verb, by=action.name, state=state, reason=action.reason)
        try:
            end_action(run, action, state, lines)
        except CkptguardError as error:
            log("action_not_completed", level="warning", run=run.url, action=action.id, reason=error.message)
        self._guarded.look_soon()
        self._served.loop.wake(self._guarded.run_id)

    def _document(self, **parts: object) -> Document:
        return document("action", run=self._guarded.run_id, verb=self._verb, **parts)

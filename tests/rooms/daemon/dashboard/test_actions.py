"""Actions over HTTP: a plan, its token, a reason, and a job to ask for; and who may not."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from ckptguard_daemon.application import application, routes
from ckptguard_daemon.dashboard import actions, verbs
from ckptguard_daemon.dashboard.verbs import VERBS, ActionPlan, Asked, Done, Verb
from ckptguard_daemon.http.routes import OWNER, Caller, Role
from ckptguard_daemon.jobs import MOST_RUNNING
from support.http_documents import assert_like, example
from support.layouts import WRITERS
from support.operators import ALICE, InlineScanner, all_files, without_records
from support.served_runs import answer_of, served, watched
from support.tiny_run import TINY, cycle, save
from support.views import look

from ckptguard.errors import StorageFullError
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records import audit
from ckptguard.records.audit import list_actions
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome

READER, GUARD = (Caller(name=role.word, role=role) for role in (Role.READER, Role.GUARD))


class Asking:
    """An application over one run, asked within this process."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "run")
        (folder / "run").mkdir()
        for step in (1, 2, 3):
            save(self.url, step, step)
        cycle(open_run(self.url), TINY)
        settings = TINY.changed(replicas=(str(folder / "replica"),), keep_good=1)
        self.run = watched(self.url, settings)
        self.served = served([self.run])
        self.application = application(routes(self.served), lambda *_: None)

    def ask(self, path: str, body: object = None, *, caller: Caller = ALICE) -> tuple[int, Any]:
        """The status and the document of one request."""
        return asyncio.run(self.answer_of(path, body, caller))

    async def answer_of(self, path: str, body: object = None, caller: Caller = ALICE) -> tuple[int, Any]:
        """The same, for a test that asks several at once."""
        place, method = f"/v1/runs/{self.run.run_id}/{path}", "GET" if body is None else "POST"
        data = b"" if body is None else json.dumps(body).encode()
        found = await answer_of(self.application, place, method=method, body=data, caller=caller)
        return found.status, found.document


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asking:
    """A run with three good checkpoints."""
    monkeypatch.setattr(actions, "LaneScanner", InlineScanner)
    return Asking(tmp_path)


class Held:
    """A verb whose real work waits until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        monkeypatch.setitem(VERBS, "verify", Verb(VERBS["verify"].arguments, self.act))

    def act(self, asked: Asked) -> ActionPlan | Done:
        """Plan to wait, or wait."""
        plan = ActionPlan(lines=("would wait",))
        if not asked.agreed(plan):
            return plan
        self.begun.release()
        assert self.go_on.wait(60)
        return Done(lines=("waited",))


def test_every_answer_is_as_documented(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan, its being carried out, a job and the record have the keys and types of their examples."""
    title = "POST /v1/runs/{run}/actions/{verb}"
    examples = [json.loads(part.split("```")[0]) for part in section(title).split("```json\n")[1:]]
    status, plan = asking.ask("actions/rollback", {"step": 2})
    assert_like(plan, examples[0])
    status, done = asking.ask(
        "actions/rollback", {"step": 2, "dry_run": False, "reason": "why", "token": plan["token"]}
    )
    assert status == 200
    assert_like(done, examples[1])
    status, listed = asking.ask("actions", caller=READER)
    assert_like(listed, example("GET /v1/runs/{run}/actions"))
    held = Held(monkeypatch)
    token = asking.ask("actions/verify", {})[1]["token"]
    status, running = asking.ask("actions/verify?wait_seconds=0", real(token))
    assert status == 202
    assert_like(running, examples[2])
    held.go_on.set()


def section(title: str) -> str:
    """The text below a heading of http.md."""
    from support.markdown import DOCS

    return (DOCS / "reference/http.md").read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def real(token: str, **arguments: object) -> dict[str, object]:
    """The body that has a plan carried out."""
    return {**arguments, "dry_run": False, "reason": "why", "token": token}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("caller", [READER, GUARD], ids=["reader", "guard"])
def test_only_an_operator_acts(verb: str, caller: Caller, asking: Asking, tmp_path: Path) -> None:
    """Nobody else may even have a plan made, nor ask for a job; and nothing is written."""
    before = all_files(tmp_path)
    for body in ({}, real("token")):
        assert asking.ask(f"actions/{verb}", body, caller=caller)[0] == 403
    assert asking.ask("jobs/any", caller=caller)[0] == 403
    assert all_files(tmp_path) == before


def test_a_reader_writes_nothing(asking: Asking, tmp_path: Path) -> None:
    """What a reader may ask about actions and retention leaves every byte and every time as it was."""
    before = all_files(tmp_path)
    for path in ("actions", "retention", "retention?keep_last=1&failed=true", "retention?keep_best=loss:min"):
        assert asking.ask(path, caller=READER)[0] == 200
    assert all_files(tmp_path) == before


def test_another_run_does_not_exist(asking: Asking) -> None:
    """For an operator of other runs, neither the actions nor the retention of this one are there."""
    other = Caller(name="bob", role=Role.OPERATOR, runs=("other-*",))
    for path, body in (("actions/pin", {"checkpoint": "3"}), ("actions", None), ("retention", None), ("jobs/x", None)):
        assert asking.ask(path, body, caller=other)[0] == 404


@pytest.mark.parametrize(
    ("verb", "body", "status", "words"),
    [
        ("nonsense", {}, 404, "there is no action nonsense"),
        ("pin", {}, 400, "`checkpoint` is missing"),
        ("pin", {"checkpoint": 3}, 400, "`checkpoint` has the wrong type"),
        ("pin", {"checkpoint": "3", "for": "ever"}, 400, "there is no `for`"),
        ("pin", {"checkpoint": "3", "until": "1999-01-01"}, 400, "that has passed"),
        ("pin", {"checkpoint": "3", "until": "0001-01-01"}, 400, "that has passed"),
        ("pin", {"checkpoint": "9" * 4000}, 404, "there is no checkpoint"),
        ("pin", {"checkpoint": "../../etc"}, 404, "there is no checkpoint"),
        ("pin", {"checkpoint": "model-#/000000000099.1"}, 404, "nothing is known"),
        ("prune", {"keep_last": 0}, 400, "keep_last must be at least 1"),
        ("prune", {"keep_last": "many"}, 400, "keep_last must be a whole number"),
        ("rollback", {"step": 1, "to": "model-2"}, 400, "not both"),
        ("rollback", {"step": 99}, 404, "no known-good checkpoint of step 99"),
        ("clear", {"checkpoint": "3"}, 409, "3 is good, not suspect"),
        ("pin", {"checkpoint": "3", "dry_run": False, "token": "x"}, 400, "`reason` is empty"),
        ("pin", {"checkpoint": "3", "dry_run": False, "token": "x", "reason": " \n"}, 400, "`reason` is empty"),
        ("pin", {"checkpoint": "3", "dry_run": False, "token": "x", "reason": "x" * 1001}, 400, "1000 characters"),
        ("pin", {"checkpoint": "3", "dry_run": False, "reason": "why"}, 400, "`token` is missing"),
        ("pin", {"checkpoint": "3", "dry_run": False, "reason": "why", "token": "x"}, 409, "nothing was done"),
    ],
)
def test_a_bad_request_gets_one_sentence(verb: str, body: object, status: int, words: str, asking: Asking) -> None:
    """A mistyped, impossible or unfounded request says what is wrong, and pins and moves nothing."""
    found, answer = asking.ask(f"actions/{verb}", body)
    assert (found, words in answer["error"]["message"]) == (status, True), answer
    assert "Traceback" not in json.dumps(answer)


def test_a_reason_is_asked_of_those_who_owe_one(asking: Asking) -> None:
    """Of users with a token for all that changes something, and of the owner only for calling a suspect one good."""
    for verb, caller, owed in [("verify", ALICE, False), ("pin", ALICE, True), ("pin", OWNER, False)]:
        body = {"checkpoint": "3"}
        token = asking.ask(f"actions/{verb}", body, caller=caller)[1]["token"]
        status, answer = asking.ask(f"actions/{verb}", {**body, "dry_run": False, "token": token}, caller=caller)
        assert (status == 400, "`reason` is empty" in json.dumps(answer)) == (owed, owed), (verb, answer)
        said = asyncio.run(answer_of(asking.application, "/v1/me", caller=caller)).document["reason_for"]
        assert (verb in said, "clear" in said) == (owed, True)


@pytest.mark.parametrize("query", ["keep_lost=1", "keep_last=x", "keep_within=-2d", "keep_best=loss", "failed=maybe"])
def test_a_bad_rule_gets_one_sentence(query: str, asking: Asking) -> None:
    """A rule that is none is told, and nothing is answered."""
    status, answer = asking.ask(f"retention?{query}")
    assert (status, answer["error"]["kind"]) == (400, "settings")


def test_the_preview_is_the_command_lines(asking: Asking) -> None:
    """What retention would remove is what the command says in a dry run with the same rules."""
    _, found = asking.ask("retention?keep_last=1", caller=READER)
    _, plan = asking.ask("actions/prune", {"keep_last": "1"})
    assert [one["path"] for one in found["removed"]] == ["model-1", "model-2"]
    assert found["plan"] == plan["plan"][-1:] == ["would move 2 to the trash (632 B)"]
    assert found["costs"] == plan["costs"]
    assert found["dry_run"] is True


def test_thinning_is_planned_and_done_with_the_rest(tmp_path: Path, asking: Asking) -> None:
    """What would go is named, nothing goes before the plan is agreed to, and then that goes, and nothing else."""
    shutil.rmtree(asking.url)
    for step in (100, 200, 300, 400):
        WRITERS["trainer"](Path(asking.url), step, step)
    cycle(open_run(asking.url), TINY)
    _, found = asking.ask("retention?thin_after=2", caller=READER)
    paths = [Path(asking.url, f"checkpoint-{step}/optimizer.pt") for step in (100, 200, 300, 400)]
    assert [(one["path"], one["reason"]) for one in found["thinned"]] == [
        ("checkpoint-100", ""),
        ("checkpoint-200", ""),
    ]
    rules = {"thin_after": "2"}
    _, plan = asking.ask("actions/prune", rules)
    assert found["costs"] == plan["costs"]
    assert found["costs"]["bytes_moved"] == sum(one["bytes"] for one in found["thinned"]) > 0
    assert all(path.exists() for path in paths)
    WRITERS["trainer"](Path(asking.url), 500, 500)  # now 300 is older than two, which nobody agreed to
    cycle(open_run(asking.url), TINY)
    status, _ = asking.ask("actions/prune", real(plan["token"], **rules))
    assert status == 409
    assert all(path.exists() for path in paths)
    token = asking.ask("actions/prune", {"thin_after": 3})[1]["token"]
    status, done = asking.ask("actions/prune", real(token, thin_after=3))
    assert (status, done["state"]) == (200, "done")
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert sum("only a resume needs them" in line for line in done["done"]) == 2
    _, found = asking.ask("retention?keep_bytes=1kB", caller=READER)
    assert any("budget" in line for line in found["plan"])
    assert asking.ask("actions/prune", {"keep_bytes": "1kB"})[1]["plan"][-len(found["plan"]) :] == found["plan"]


def test_a_name_of_the_catalogue_is_that_very_save(asking: Asking) -> None:
    """Chosen by its name in the catalogue, a save is refused once another one has taken its place."""
    name = {"checkpoint": "model-%23/000000000003.1"}
    assert asking.ask("actions/pin", name)[1]["plan"] == ["would pin model-3"]
    save(asking.url, 3, 33)
    cycle(open_run(asking.url), TINY)
    status, answer = asking.ask("actions/pin", name)
    assert (status, "is another save now" in answer["error"]["message"]) == (404, True)


def test_what_takes_long_goes_on_without_its_caller(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not wait gets a job; a lost connection ends nothing; the job answers as the request would have."""
    held = Held(monkeypatch)
    token = asking.ask("actions/verify", {})[1]["token"]
    status, running = asking.ask("actions/verify?wait_seconds=0", real(token))
    assert (status, running["state"]) == (202, "running")
    assert held.begun.acquire(timeout=60)
    assert [action.state for action in list_actions(open_run(asking.url))] == ["began"]

    async def hang_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asking.answer_of(f"jobs/{running['job']}?wait_seconds=60")

    asyncio.run(hang_up())
    held.go_on.set()
    status, answer = asking.ask(f"jobs/{running['job']}?wait_seconds=60")
    assert (status, answer["state"], answer["done"]) == (200, "done", ["waited"])
    (action,) = list_actions(open_run(asking.url))
    assert (action.state, action.result, action.id) == ("done", ("waited",), answer["action"])


def test_one_action_at_a_time_changes_a_run(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one action changes a run another one is refused, but a plan can still be made; and all are only so many."""
    held = Held(monkeypatch)
    token = asking.ask("actions/verify", {})[1]["token"]
    asking.ask("actions/verify?wait_seconds=0", real(token))
    assert held.begun.acquire(timeout=60)
    status, answer = asking.ask("actions/pin", real("x", checkpoint="3"))
    assert (status, answer["error"]["message"]) == (423, "another action on this run is under way: verify")
    assert asking.ask("actions/pin", {"checkpoint": "3"})[0] == 200
    waiting = threading.Event()

    def wait(asked: Asked) -> ActionPlan:
        waiting.wait(60)
        return ActionPlan(lines=())

    monkeypatch.setitem(VERBS, "repair", Verb(VERBS["pin"].arguments, wait))
    for _ in range(MOST_RUNNING - 1):
        assert asking.ask("actions/repair?wait_seconds=0", {"checkpoint": "3"})[0] == 202
    assert asking.ask("actions/repair?wait_seconds=0", {"checkpoint": "3"})[0] == 423
    held.go_on.set()
    waiting.set()
    assert asking.served.jobs.wait_for_end(60)


def test_a_mistake_of_ours_is_told_and_on_record(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that fails in a way that nobody thought of answers a sentence, and is on record as failed."""

    def fail(asked: Asked) -> ActionPlan:
        if asked.agreed(plan := ActionPlan(lines=())):
            raise KeyError
        return plan

    monkeypatch.setitem(VERBS, "verify", Verb(VERBS["verify"].arguments, fail))
    token = asking.ask("actions/verify", {})[1]["token"]
    status, answer = asking.ask("actions/verify", real(token))
    assert (status, answer["error"]["message"]) == (500, "unexpected KeyError")
    (action,) = list_actions(open_run(asking.url))
    assert (action.state, action.result) == ("failed", ("unexpected KeyError",))


def test_what_was_not_judged_is_judged_first_and_never_rolled_over(asking: Asking) -> None:
    """A plan says what it would verify first. If that turns out good, nothing is moved: the plan is another one now."""
    save(asking.url, 4, 4)
    plan = asking.ask("actions/rollback", {})[1]
    assert plan["plan"][0] == "would first verify model-4, and go back to it if it is good; else:"
    before = without_records(asking.url)
    status, answer = asking.ask("actions/rollback", real(plan["token"]))
    assert (status, answer["error"]["kind"]) == (409, "plan_changed")
    assert without_records(asking.url) == before
    again = asking.ask("actions/rollback", {})[1]
    assert again["plan"] == [f"would go back to {asking.url}/model-4"]
    assert asking.ask("actions/rollback", real(again["token"]))[1]["state"] == "done"
    assert [action.state for action in list_actions(open_run(asking.url))] == ["refused", "done"]


def test_a_training_that_writes_is_not_rolled_back(asking: Asking) -> None:
    """While files of the run are being written, the plan and the rollback are refused in the words of the command."""
    plan = asking.ask("actions/rollback", {"step": 1})[1]
    asking.run.settings = TINY.changed(settle=1e6)
    for body in ({"step": 1}, real(plan["token"], step=1)):
        status, answer = asking.ask("actions/rollback", body)
        assert (status, "training may still be running" in answer["error"]["message"]) == (423, True)
    assert sorted(path.name for path in Path(asking.url).glob("model-*")) == ["model-1", "model-2", "model-3"]


def test_a_run_that_is_gone_is_told(asking: Asking, tmp_path: Path) -> None:
    """Without its folder there is no plan, and no folder is made for the record."""
    plan = asking.ask("actions/pin", {"checkpoint": "3"})[1]
    shutil.rmtree(asking.url)
    for path, body in (("actions/pin", real(plan["token"], checkpoint="3")), ("actions", None), ("retention", None)):
        assert asking.ask(path, body)[0] == 404
    assert not Path(asking.url).exists()


def test_without_a_record_nothing_is_done(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the record of its beginning cannot be written, an action does not begin."""
    plan = asking.ask("actions/prune", {"keep_last": 1})[1]
    before = without_records(asking.url)
    full = StorageFullError("no space is left", key="audit")
    monkeypatch.setattr(audit, "create_record", mock.Mock(side_effect=full))
    status, answer = asking.ask("actions/prune", real(plan["token"], keep_last=1))
    assert (status, answer["error"]["message"]) == (503, "no space is left")
    assert without_records(asking.url) == before


def test_a_bad_verdict_at_the_same_moment_is_not_cleared_away(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody finds damage between the look and the clearance: bad stays bad, and the operator is told."""
    view = look(asking.url, TINY)
    (id,) = [id for id in view.history.current_verdicts("model-#") if id.number == 3]
    mark_suspect(view, id, "the loss jumped")
    plan = asking.ask("actions/clear", {"checkpoint": "3"})[1]
    real_clear = verbs.clear_current_verdict

    def clear_late(view: Any, current_verdict: Any, word: str, *, reason: str) -> Any:
        bad = look(asking.url, TINY).history
        verdict = bad.verdict(id)
        assert verdict is not None
        bad.add_verdict(msgspec.structs.replace(verdict, outcome=Outcome.BAD))
        return real_clear(view, current_verdict, word, reason=reason)

    monkeypatch.setattr(verbs, "clear_current_verdict", clear_late)
    status, answer = asking.ask("actions/clear", real(plan["token"], checkpoint="3"))
    assert (status, "got another verdict meanwhile" in answer["error"]["message"]) == (423, True)
    assert look(asking.url, TINY).history.current_verdicts("model-#")[id].outcome is Outcome.BAD

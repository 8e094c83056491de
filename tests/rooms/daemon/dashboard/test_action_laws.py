"""Whatever happened to a run: a dry run changes nothing, what is done is what the plan said, and it is on record."""

import contextlib
import re
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.crashes import WRITES, Killed, kill_at
from support.operators import Operator, all_files, without_records
from support.records_on_disk import at, files_of
from support.tiny_run import TINY, WEIGHTS, clone, cycle, delete, name_of, poison, rot, save
from support.views import look

from ckptguard.errors import CkptguardError, PlanChangedError
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.audit import BEGAN, DONE, REFUSED, list_actions
from ckptguard.records.pins import list_pins
from ckptguard.records.run import open_run
from ckptguard.records.silences import silence_run
from ckptguard.retention.pin import pin
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

SOME = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
STEPS = st.integers(1, 4)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save again", "poison", "rot", "delete", "suspect", "pin", "silence", "pass", "pass"]),
        STEPS,
    ),
    max_size=8,
)
ON_ONE = ["verify", "pin", "unpin", "clear", "accept", "repair"]
OF_ONE = STEPS.map(lambda step: {"checkpoint": name_of(step)})
ARGUMENTS = {
    **dict.fromkeys(ON_ONE, OF_ONE),
    "prune": st.integers(1, 3).map(lambda count: {"keep_last": count, "failed": True}),
    "replicate": st.just({}),
    "silence": st.sampled_from(["1h", "30d"]).map(lambda span: {"until": span}),
    "unsilence": st.just({}),
    "rollback": st.just({}) | STEPS.map(lambda step: {"step": step}),
    **{verb: st.just({}) | OF_ONE for verb in ("verify", "repair")},
}
ASKED = st.sampled_from(sorted(ARGUMENTS)).flatmap(lambda verb: st.tuples(st.just(verb), ARGUMENTS[verb]))


def settings_of(folder: Path) -> Settings:
    """Those of a run with a replica beside it."""
    return TINY.changed(replicas=(str(folder / "replica"),), keep_good=1)


def happen(url: str, events: list[tuple[str, int]]) -> None:
    """Have these things happen to a run."""
    for what, step in events:
        weights = at(url, f"{name_of(step)}/{WEIGHTS}")
        if what in ("save", "save again"):
            save(url, step, step + 10 * (what != "save"))
        elif what == "delete":
            delete(url, step)
        elif what == "poison" and weights.exists():
            poison(weights)
        elif what == "rot" and weights.exists():
            rot(url, f"{name_of(step)}/{WEIGHTS}")
        elif what == "pass":
            cycle(open_run(url), TINY)
        elif what == "pin" and weights.exists():
            view = look(url, TINY)
            pin(view, view.checkpoints[0])
        elif what == "silence":
            silence_run(open_run(url), time.time() + 3600.0 + step, reason="", by="bob")
        elif what == "suspect":
            view = look(url, TINY)
            for series in view.history.names:
                for id, current_verdict in view.history.current_verdicts(series).items():
                    if id.number == step and current_verdict.outcome is Outcome.GOOD:
                        mark_suspect(view, id, "the loss jumped")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Gives new folders, one for each example."""
    left = iter(range(10**6))
    return lambda: tmp_path_factory.mktemp(f"run-{next(left)}")


def begun(folder: Path, events: list[tuple[str, int]]) -> Operator:
    """An operator of a run to which these things happened."""
    (folder / "run").mkdir()
    url = str(folder / "run")
    happen(url, [*(("save", step) for step in (1, 2, 3)), ("pass", 0), ("suspect", 2), ("pin", 1), *events])
    return Operator(url, settings_of(folder))


@SOME
@given(events=EVENTS, asked=ASKED)
def test_a_plan_changes_nothing(events, asked, place):
    """A dry run of any verb leaves every byte and every time as they were, on a storage that refuses to write."""
    folder = place()
    operator, (verb, arguments) = begun(folder, events), asked
    before = all_files(folder)
    with mock.patch.multiple(LocalStorage, **{name: mock.Mock(side_effect=AssertionError(name)) for name in WRITES}):
        operator.plan_if_any(verb, **arguments)
    assert all_files(folder) == before
    shutil.rmtree(folder)


@SOME
@given(events=EVENTS, asked=ASKED)
def test_what_is_done_is_what_the_plan_said(events, asked, place):
    """The storage shows what the plan said, and nothing else; one record says who did it, and why."""
    folder = place()
    operator, (verb, arguments) = begun(folder, events), asked
    plan = operator.plan_if_any(verb, **arguments)
    if plan is not None:
        before, pins = without_records(operator.url), {pin.token for pin in list_pins(open_run(operator.url))}
        replica = files_of(folder / "replica")
        try:
            answer = operator.do(verb, plan["token"], **arguments)
        except PlanChangedError:
            answer = None  # the real run read what the plan trusted, such as a save without a verdict
        event(f"{verb} {answer and answer['state']}")
        gone, changed, new = differences(before, without_records(operator.url))
        said = "\n".join(plan["plan"])
        if answer is None:
            assert not gone
            assert not changed
            assert not new
        elif verb == "prune":
            rows = [re.sub(r" \(save \d+\)", "", line).split() for line in plan["plan"]]
            assert not changed
            assert not new
            assert {key.partition("/")[0] for key in gone} == {row[0] for row in rows if row[2:3] == ["remove"]}
        elif verb == "rollback":
            moved = {line.removeprefix("would quarantine ") for line in plan["plan"] if "quarantine" in line}
            target = next(line for line in plan["plan"] if "go back to /" in line)
            target = target.rpartition("/")[2].partition(" (save")[0]
            assert {key.partition("/")[0] for key in gone | changed} <= moved
            assert {key.partition("/")[0] for key in changed | new} <= {target}
            assert moved - {target} == {key.partition("/")[0] for key in gone} - {target}
            assert (Path(operator.url) / target).is_dir()
        elif verb == "repair":
            assert not gone
            assert all(f"would repair {key} " in said for key in changed | new)
        else:
            assert not gone
            assert not changed
            assert not new
        sent = {key.partition("/")[0] for key in set(files_of(folder / "replica")) - set(replica)} - {"_ckptguard"}
        planned = {line.split()[0] for line in plan["plan"] if "would send" in line}
        assert sent == planned or (sent < planned and answer["state"] == "failed")  # it was found damaged on the way
        after = {pin.token for pin in list_pins(open_run(operator.url))}
        assert (len(after - pins), len(pins - after)) == (verb == "pin", len(pins) if verb == "unpin" else 0)
        (action,) = list_actions(open_run(operator.url))
        assert (action.verb, action.name, action.role, action.reason) == (verb, "alice", "operator", "it is right")
        assert (action.plan, action.state == REFUSED) == (plan["token"], answer is None)
    shutil.rmtree(folder)


@SOME
@given(events=EVENTS, asked=ASKED)
def test_nothing_is_done_twice(events, asked, place):
    """Who lost the answer and asks again is refused, and looks at a new plan: one agreement is for one action."""
    folder = place()
    operator, (verb, arguments) = begun(folder, events), asked
    plan = operator.plan_if_any(verb, **arguments)
    if plan is not None:
        with contextlib.suppress(CkptguardError):
            operator.do(verb, plan["token"], **arguments)
        before, pins = without_records(operator.url), list_pins(open_run(operator.url))
        with pytest.raises(CkptguardError):
            operator.do(verb, plan["token"], **arguments)
        assert (without_records(operator.url), list_pins(open_run(operator.url))) == (before, pins)
        assert [action.state for action in list_actions(open_run(operator.url))][1:] != [DONE]
    shutil.rmtree(folder)


@SOME
@given(events=EVENTS, asked=ASKED, meanwhile=EVENTS)
def test_a_changed_plan_is_never_carried_out(events, asked, meanwhile, place):
    """Whatever happens after the plan: it is carried out if a new dry run says the same, or else nothing is moved."""
    folder = place()
    operator, (verb, arguments) = begun(folder, events), asked
    plan = operator.plan_if_any(verb, **arguments)
    if plan is not None:
        happen(operator.url, meanwhile)
        again = operator.plan_if_any(verb, **arguments)
        before, replica = without_records(operator.url), files_of(folder / "replica")
        try:
            operator.do(verb, plan["token"], **arguments)
        except CkptguardError:
            assert differences(before, without_records(operator.url)) == (set(), set(), set())
            assert files_of(folder / "replica") == replica
        else:
            assert again is not None
            assert again["token"] == plan["token"]
    shutil.rmtree(folder)


def differences(before, after):
    """The keys that are gone, that have other bytes, and that are new."""
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    return set(before) - set(after), changed, set(after) - set(before)


ONE_OF_EACH = {
    "verify": {},
    "pin": {"checkpoint": "model-4"},
    "unpin": {"checkpoint": "model-3"},
    "clear": {"checkpoint": "model-2"},
    "accept": {"checkpoint": "model-4"},
    "prune": {"keep_last": 1},
    "silence": {"until": "8h"},
    "unsilence": {},
    "replicate": {},
    "repair": {},
    "rollback": {},
}


@pytest.mark.parametrize("verb", ONE_OF_EACH)
def test_killed_anywhere_one_record_is_left(verb, tmp_path):
    """Killed before its first change, its second, ...: an action that changed anything is on record, once; and one that
    went through says how it ended."""
    template = begun(tmp_path, [("save", 2), ("save", 3), ("save", 4), ("pass", 0), ("suspect", 2)])
    first = template.plan("pin", checkpoint="model-3")
    template.do("pin", first["token"], checkpoint="model-3")
    shutil.rmtree(at(template.url, "_ckptguard/audit"))
    if verb == "repair":
        rot(template.url, f"model-4/{WEIGHTS}")
        cycle(open_run(template.url), TINY)
    elif verb == "rollback":
        save(template.url, 5, 5)
        poison(at(template.url, f"model-5/{WEIGHTS}"))
        cycle(open_run(template.url), TINY)
    arguments, killed = ONE_OF_EACH[verb], 0
    for number in range(1, 300):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        clone(template.url, str(folder / "run"))
        happen(str(folder / "run"), [("silence", 1)])  # that of the template does not hold for a copy
        operator = Operator(str(folder / "run"), settings_of(folder))
        plan = operator.plan(verb, **arguments)
        before = files_of(operator.url)
        try:
            with kill_at(number):
                operator.do(verb, plan["token"], **arguments)
        except Killed:
            killed += 1
            actions = list_actions(open_run(operator.url))
            assert [action.verb for action in actions] == ([verb] if files_of(operator.url) != before else [])
            assert all(action.state == BEGAN or action.result for action in actions)
            shutil.rmtree(folder)
            continue
        (action,) = list_actions(open_run(operator.url))
        assert action.state == "done"
        assert action.result
        break
    assert killed >= 2

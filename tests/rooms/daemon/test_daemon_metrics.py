"""The metrics as text: what a scraper reads of some runs."""

from __future__ import annotations

import logging
import math
import re
import time
from importlib.resources import files
from typing import Any
from unittest import mock

import msgspec
import pytest
from ckptguard_daemon import metrics as module
from ckptguard_daemon.log import FIELDS, log
from ckptguard_daemon.metrics import (
    HISTOGRAMS,
    MOST_RUNS,
    Counted,
    Counts,
    DaemonFacts,
    Metrics,
    exposition,
    needed_lately,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ckptguard.decisions.run_summary import in_state
from ckptguard.values.run_summary import RunSummary
from ckptguard.values.settings import LABELS
from ckptguard.values.silence import LONGEST, Silence

NOW = 1_000_000.0
RULES = (files("ckptguard_daemon") / "deploy" / "ckptguard-rules.yml").read_text(encoding="utf-8")
DAEMON = DaemonFacts(loop_at=NOW - 5)
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def facts(url: str = "/runs/exp1", **known: Any) -> RunSummary:
    """A run."""
    return RunSummary(url=url, name=url.rpartition("/")[2], **known)


def read(text: bytes) -> Series:
    """What Prometheus' own parser finds; it refuses two series of the same name and labels."""
    found: Series = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def of(series: Series, name: str, **labels: str) -> float | None:
    """The value of one series, None if there is none."""
    return series.get((f"ckptguard_{name}", frozenset(labels.items())))


def test_each_run_has_its_values() -> None:
    """The numbers of the facts, under the label of the run."""
    one = facts(
        protected=True,
        training=True,
        known_good_step=500,
        known_good_at=NOW - 100,
        safe_at=NOW - 300,
        world_size=8,
        newest_outcome="bad",
        checkpoints={"good": 3, "bad": 1},
        replicas=2,
        replicas_behind=4,
        rollbacks={"numeric": 2},
    )
    found = read(exposition([one, facts("/runs/exp2")], DAEMON, NOW))
    run = {"run": "/runs/exp1"}
    assert of(found, "protected", **run) == 1
    assert of(found, "known_good_step", **run) == 500
    assert of(found, "known_good_timestamp_seconds", **run) == NOW - 100
    assert of(found, "at_risk_gpu_seconds", **run) == 8 * 300
    assert of(found, "newest_bad", **run) == 1
    assert of(found, "checkpoints", outcome="good", **run) == 3
    assert of(found, "replica_behind", **run) == 4
    assert of(found, "rollbacks_total", cause="numeric", **run) == 2
    assert of(found, "protected", run="/runs/exp2") == 0
    assert of(found, "runs", state="guarded") == 2


UNKNOWN = {"known_good_step", "known_good_timestamp_seconds", "save_interval_seconds", "replica_behind"}
UNKNOWN |= {"scrub_oldest_timestamp_seconds", "scrub_interval_seconds", "world_size"}
SAID: list[tuple[str, RunSummary, dict[str, int | None]]] = [
    # A timestamp of 0 would be an age of fifty years.
    ("what is not known is absent", facts(), dict.fromkeys(UNKNOWN)),
    # The records of yesterday do not say what is there now.
    (
        "not looked at",
        in_state(facts(protected=True), NOW, "failing", "no route"),
        {"protected": 0, "failing": 1},
    ),
    # The daemon may be told of it long before its first save.
    ("it never was there", facts(state="waiting"), {"protected": None}),
    (
        "its folder went away",
        in_state(facts(checkpoints={"good": 1}, protected=True), NOW, "waiting", "no such folder"),
        {"protected": 0},
    ),
    ("nothing trains", facts(), {"at_risk_gpu_seconds": 0}),
    # Without a record of its begin nobody knows how much is at risk.
    ("no begin is known", facts(training=True), {"at_risk_gpu_seconds": None}),
    *(
        (
            f"unfinished since {since}, interval {interval}",
            facts(unfinished_since=since, save_interval=interval),
            {"unfinished_newest": late},
        )
        for since, interval, late in (
            *((NOW - 81.0, 40.0, 1), (NOW - 79.0, 40.0, 0), (None, 40.0, 0), (NOW - 1e5, None, 0)),
            *((NOW + 50.0, 40.0, 0), (NOW - 61.0, 1.0, 1), (NOW - 59.0, 1.0, 0)),  # not within a minute
        )
    ),
]


@pytest.mark.parametrize(("run", "said"), [case[1:] for case in SAID], ids=[case[0] for case in SAID])
def test_what_a_metric_says_of_a_run(run: RunSummary, said: dict[str, int | None]) -> None:
    """Of what is known, and of what nobody knows."""
    found = read(exposition([run], DAEMON, NOW))
    assert {name: of(found, name, run=run.url) for name in said} == said


@given(st.lists(st.text(st.characters(codec=None), max_size=6), max_size=8), st.text(max_size=6))
def test_any_names_give_one_series_each(names: list[str], cause: str) -> None:
    """Quotes, backslashes, line feeds, NUL, lone surrogates, names that are escaped alike."""
    runs = [facts(f"/r/{name}", training=True, incidents={cause: 1}, rollbacks={name: 1}) for name in names]
    found = read(exposition(runs, DAEMON, NOW))
    assert sum(name == "ckptguard_training" for name, _ in found) == len(set(names))


@given(st.dictionaries(st.sampled_from(LABELS), st.text(min_size=1, max_size=6), max_size=3))
def test_all_series_of_a_run_have_its_labels(labels: dict[str, str]) -> None:
    """Any text, and equal ones wherever alerts compare two series."""
    found = read(exposition([facts(labels=labels, training=True, checkpoints={"good": 1})], DAEMON, NOW))
    own = [dict(shown) for _, shown in found if dict(shown).get("run") == "/runs/exp1"]
    assert len(own) > 9
    assert len({tuple(shown.get(name) for name in LABELS) for shown in own}) == 1
    assert {name for name in own[0] if name in LABELS} == labels.keys()


def test_causes_do_not_become_labels_without_limit() -> None:
    """Whoever reports an incident names its cause. What was reported remains in the sum."""
    causes = {f"made_up_{chr(97 + n)}_{chr(97 + m)}": 1 for n in range(20) for m in range(20)} | {
        "numeric": 5,
        "A b": 3,
    }
    found = read(exposition([facts(incidents=causes)], DAEMON, NOW))
    shown = {dict(labels)["cause"]: value for (name, labels), value in found.items() if "incidents" in name}
    assert len(shown) == 21
    assert shown["numeric"] == 5
    assert sum(shown.values()) == 400 + 5 + 3


def test_of_very_many_runs_those_that_need_nobody_have_sums_only() -> None:
    """The same names without the label of a run; the oldest of all times; nothing that has no sum."""
    runs = [
        facts(
            f"/r/{n}",
            protected=True,
            backlog_bytes=n,
            waiting_since=NOW - n,
            known_good_at=NOW - n,
            known_good_step=n,
            checkpoints={"good": 2},
        )
        for n in range(MOST_RUNS + 1)
    ]
    assert any("run" in dict(labels) for _, labels in read(exposition(runs[1:], DAEMON, NOW)))
    found = read(exposition(runs, DAEMON, NOW))
    assert not any("run" in dict(labels) for _, labels in found)
    assert of(found, "backlog_bytes") == MOST_RUNS * (MOST_RUNS + 1) / 2
    assert of(found, "known_good_timestamp_seconds") == NOW - MOST_RUNS
    assert of(found, "backlog_oldest_timestamp_seconds") == NOW - MOST_RUNS
    assert of(found, "checkpoints", outcome="good") == 2 * (MOST_RUNS + 1)
    assert of(found, "protected") == MOST_RUNS + 1
    assert of(found, "known_good_step") is None


TROUBLES: list[dict[str, Any]] = [
    *({"newest_outcome": "bad"}, {"state": "failing"}, {"unreadable": 2}, {"saving_stopped": True}),
    {"unfinished_since": NOW - 60.0, "save_interval": 2.0},
    *({"protected": False}, {"replicas": 1, "replicas_behind": 1}, {"waiting_since": NOW - 3600.0, "backlog_bytes": 9}),
    *(
        {"training": True, "known_good_at": NOW - 9.0, "save_interval": 2.0},
        {"scrubbed_at": 1.0, "scrub_interval": 9.0},
    ),
]
RUNS = st.lists(st.tuples(st.sampled_from([{}, *TROUBLES]), st.booleans(), st.integers(0, 9)), min_size=5, max_size=12)


@given(RUNS)
def test_each_run_counts_once(drawn: list[tuple[dict[str, Any], bool, int]]) -> None:
    """In series of its own if it needs somebody, and is not silenced, else in those of all others. The sums that alerts
    are about leave out silenced runs; counters are of all runs, for one that shrinks counts as one that began again."""
    silence = Silence(until=NOW + 60.0, by="alice")
    runs = [
        facts(f"/r/{n}", **{"protected": True, "backlog": size, "rollbacks": {"numeric": size}, **trouble})
        for n, (trouble, _, size) in enumerate(drawn)
    ]
    runs = [msgspec.structs.replace(r, silence=silence if d[1] else None) for r, d in zip(runs, drawn, strict=True)]
    with mock.patch.object(module, "MOST_RUNS", 4):
        found = read(exposition(runs, DAEMON, NOW))
    needy = {run.url for run, (trouble, silenced, _) in zip(runs, drawn, strict=True) if trouble and not silenced}
    named = {dict(labels)["run"] for _, labels in found if "run" in dict(labels)}
    assert named <= needy
    assert len(named) == min(len(needy), 4)
    for name in ("backlog_checkpoints", "protected", "training", "silenced"):
        every = read(exposition(runs, DAEMON, NOW))
        counted = [value for (key, _), value in found.items() if key == f"ckptguard_{name}"]
        assert sum(counted) == sum(value for (key, _), value in every.items() if key == f"ckptguard_{name}")
    assert of(found, "rollbacks_total", cause="numeric") == sum(size for *_, size in drawn)
    bad = sum(run.newest_outcome == "bad" and run.silence is None and run.url not in named for run in runs)
    assert (of(found, "newest_bad") or 0) == bad


def test_what_only_the_log_says_calls_somebody_too() -> None:
    """A save that went without a verdict."""
    daemon = DaemonFacts(loop_at=NOW, counted=Counted(unverified={"/r/3": [NOW - 9.0]}))
    runs = [facts(f"/r/{n}", protected=True) for n in range(MOST_RUNS + 1)]
    found = read(exposition(runs, daemon, NOW))
    assert {dict(labels).get("run", "/r/3") for _, labels in found} == {"/r/3"}
    assert (of(found, "unverified_saves", run="/r/3"), of(found, "unverified_saves")) == (1, 0)


@given(st.lists(st.tuples(st.sets(st.integers(0, 6)), st.sampled_from([60.0, 4000.0, 9000.0])), max_size=12))
def test_a_run_that_needed_somebody_keeps_its_series_for_a_while(looks: list[tuple[set[int], float]]) -> None:
    """For two hours, so that what an alert looks back at is whole. Of too many those stay that are there already."""
    now, before, last = NOW, dict[str, float](), dict[str, float]()
    for needy, seconds in looks:
        now += seconds
        runs = [facts(f"/r/{n}", protected=n not in needy, checkpoints={"good": 1}) for n in range(7)]
        last |= {f"/r/{n}": now for n in needy}
        lately = {url: at for url, at in last.items() if now - at < 7200.0}
        with mock.patch.object(module, "MOST_RUNS", 4):
            after = needed_lately(runs, before, now)
        if len(before) < 4 and len(lately) <= 4:
            assert after.items() <= lately.items()
        assert len(after) <= 4
        assert after.keys() >= {url for url in before if lately.get(url) == now}
        assert len(after) >= min(4, len(needy))
        before = after


def test_without_a_daemon_there_are_only_runs() -> None:
    """So the files of several jobs on one node do not contradict each other."""
    found = read(exposition([facts(known_good_step=1)], None, NOW))
    assert found
    assert all("run" in dict(labels) for _, labels in found)


def test_what_is_logged_is_counted(counts: Counts) -> None:
    """Verdicts by run and outcome, bytes by why they were read, times by size."""
    log("verified", run="/a", outcome="good", bytes=50, seconds=2.0, waited=6.0)
    log("verified", run="/a", outcome="good", bytes=2_000_000_000, seconds=5000.0, waited=1e6)
    log("verified", run="/a", outcome="bad", bytes=7, seconds=None, waited=None)
    log("scrubbed", bytes=11)
    log("replicated", sent=13)
    daemon = DaemonFacts(loop_at=NOW, counted=counts.take())
    found = read(exposition([facts("/a")], daemon, NOW))
    assert of(found, "verdicts_total", run="/a", outcome="good") == 2
    assert of(found, "verdicts_total", run="/a", outcome="bad") == 1
    assert of(found, "read_bytes_total", why="verify") == 2_000_000_050
    assert of(found, "read_bytes_total", why="scrub") == 11
    assert of(found, "read_bytes_total", why="replicate") == 13
    assert of(found, "verify_seconds_bucket", size="up to 100 MB", le="1") == 0
    assert of(found, "verify_seconds_bucket", size="up to 100 MB", le="10") == 1
    assert of(found, "verify_seconds_bucket", size="up to 10 GB", le="+Inf") == 1
    assert of(found, "verify_seconds_sum", size="up to 10 GB") == 5000


TIMES = {
    "verify_seconds": lambda run, seconds: log(
        "verified", run=run, outcome="good", bytes=50, seconds=seconds, waited=None
    ),
    "save_to_verdict_seconds": lambda run, seconds: log(
        "verified", run=run, outcome="good", bytes=50, seconds=None, waited=seconds
    ),
    "sick_to_decision_seconds": lambda run, seconds: log("decided", run=run, decision="rollback", seconds=seconds),
}
FIRST = {"verify_seconds": {"size": "up to 100 MB"}, "sick_to_decision_seconds": {"decision": "rollback"}}
LASTING = st.floats(0.0, 1e9) | st.sampled_from([limit for own in HISTOGRAMS.values() for limit in own.limits[:-1]])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(HISTOGRAMS)), st.lists(st.tuples(st.text("abc", max_size=2), LASTING), max_size=9))
def test_a_histogram_counts_each_time_once_whatever_the_runs(
    counts: Counts, name: str, times: list[tuple[str, float]]
) -> None:
    """Each bucket has those that took at most its limit. There are as many series as before the first one."""
    empty = read(exposition([], DAEMON, NOW))
    before = read(exposition([], DaemonFacts(loop_at=NOW - 5, counted=counts.take()), NOW))
    for run, seconds in times:
        TIMES[name](run, seconds)
    found = read(exposition([], DaemonFacts(loop_at=NOW - 5, counted=counts.take()), NOW))
    assert found.keys() == empty.keys()
    own = FIRST.get(name, {})
    for limit in HISTOGRAMS[name].limits:
        labels = {**own, "le": "+Inf" if math.isinf(limit) else f"{limit:g}"}
        more = (of(found, f"{name}_bucket", **labels) or 0.0) - (of(before, f"{name}_bucket", **labels) or 0.0)
        assert more == sum(seconds <= limit for _, seconds in times)
    after, earlier = (of(series, f"{name}_sum", **own) or 0.0 for series in (found, before))
    assert after - earlier == pytest.approx(sum(seconds for _, seconds in times), abs=1e-9 * (1.0 + after))


def test_a_message_that_did_not_arrive_is_counted_once(counts: Counts) -> None:
    """A try that is repeated is none yet. All counters are there from the start: `increase` misses a first value."""
    log("hook_failed", level="warning", hook="webhook", again_in_seconds=1.0)
    log("hook_ran", hook="webhook")
    assert counts.take() == Counted()
    log("hook_failed", level="error", hook="webhook")
    log("hook_ran", level="warning", hook="on_incident", exit_code=1)
    found = read(exposition([], DaemonFacts(loop_at=NOW, counted=counts.take()), NOW))
    assert [of(found, "hook_failures_total", hook=hook) for hook in ("webhook", "on_incident", "notify")] == [1, 1, 0]


def test_many_who_ask_at_once_cost_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text serves all who ask while it is fresh."""
    looks: list[int] = []

    def look() -> list[RunSummary]:
        looks.append(1)
        return []

    monkeypatch.setattr(module, "_FRESH", 1e9)
    monkeypatch.setattr(logging.getLogger("ckptguard_daemon"), "handlers", [])  # it adds one that stays
    metrics = Metrics(look, lambda: NOW)
    assert len({metrics.text() for _ in range(3)}) == len(looks) == 1
    monkeypatch.setattr(module, "_FRESH", 0.0)
    metrics.text()
    assert len(looks) == 2


@given(left=st.sampled_from([-60.0, 0.0, 1e-3, 60.0, LONGEST, 40 * 86400.0]), readable=st.booleans())
def test_a_silenced_run_is_measured_as_before(left: float, readable: bool) -> None:
    """Until its time is over, one metric more says so. It changes no other one, whatever the record holds."""
    silence = Silence(until=NOW + left if readable else None, by="alice")
    loud, silenced = facts(newest_outcome="bad"), facts(newest_outcome="bad", silence=silence)
    before, found = (read(exposition([one], DAEMON, NOW)) for one in (loud, silenced))
    key = ("ckptguard_silenced", frozenset({("run", "/runs/exp1")}))
    assert (before.pop(key), found.pop(key)) == (0, readable and 0 < left <= LONGEST)
    assert found == before


SUMS_OF_ALERTS = {
    *("newest_bad", "backlog_bytes", "replica_behind"),
    *("failing", "unreadable_places", "saving_stopped"),
    *("unfinished_newest", "unverified_saves", "full_in_seconds"),
    *("scrub_oldest_timestamp_seconds", "scrub_interval_seconds"),
}
# Of these there is no sum, or no alert is about it.
OTHERS_OF_ALERTS = {
    *("protected", "known_good_timestamp_seconds", "save_interval_seconds", "training", "silenced"),
    *("hook_failures_total", "loop_timestamp_seconds", "search_failing", "daemon"),
}


def test_sums_that_raise_alerts_leave_out_silenced_runs() -> None:
    """Each of them is as if these runs were none. All others count every run."""
    assert set(re.findall(r"ckptguard_(\w+)", RULES)) - OTHERS_OF_ALERTS == SUMS_OF_ALERTS
    sick: dict[str, Any] = {"newest_outcome": "bad", "backlog_bytes": 7, "replicas": 1, "replicas_behind": 2}
    sick |= {"state": "failing", "unreadable": 1, "saving_stopped": True}
    sick |= {"training": True, "known_good_at": 1.0, "save_interval": 1.0, "scrubbed_at": 1.0, "scrub_interval": 1.0}
    well = [
        facts(
            f"/r/{n}",
            protected=True,
            saving_stopped=False,
            replicas=1,
            scrubbed_at=NOW - 1.0,
            scrub_interval=10.0,
            full_in=1e7,
        )
        for n in range(MOST_RUNS + 1)
    ]
    sick |= {"unfinished_since": NOW - 60.0, "full_in": 60.0}
    daemon = DaemonFacts(loop_at=NOW, counted=Counted(unverified={"/x": [NOW - 4000.0, NOW - 9.0]}))
    silence = Silence(until=NOW + 60.0, by="alice")
    without, loud, silenced = (
        read(exposition([*well, *more], daemon, NOW, needed=()))
        for more in ([], [facts("/x", **sick)], [facts("/x", silence=silence, **sick)])
    )
    for name in SUMS_OF_ALERTS:
        assert of(silenced, name) == of(without, name) is not None
        assert of(loud, name) != of(silenced, name)
    counted = {key for key in loud if key[0].removeprefix("ckptguard_") not in {*SUMS_OF_ALERTS, "silenced"}}
    assert {key: silenced[key] for key in counted} == {key: loud[key] for key in counted}
    assert (of(loud, "silenced"), of(silenced, "silenced")) == (0, 1)


def test_saves_that_went_without_a_verdict_count_for_an_hour() -> None:
    """The daemon's log counts them; a run of which none went has 0."""
    counts = Counts()
    for _ in range(3):
        fields = {FIELDS: {"run": "/runs/exp1", "path": "step-1"}}
        counts.handle(logging.makeLogRecord({"msg": "unverified", "levelno": logging.INFO, **fields}))
    daemon = DaemonFacts(loop_at=NOW, counted=counts.take())
    runs = [facts(), facts("/runs/exp2")]
    for later, number in ((0.0, 3), (3700.0, 0)):
        found = read(exposition(runs, daemon, time.time() + later))
        assert of(found, "unverified_saves", run="/runs/exp1") == number
        assert of(found, "unverified_saves", run="/runs/exp2") == 0

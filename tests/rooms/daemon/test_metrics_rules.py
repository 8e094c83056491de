"""The alert rules and the dashboard that the daemon prints: promtool runs the rules on made-up series."""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ckptguard_daemon import metrics as module
from ckptguard_daemon.metrics import HISTOGRAMS, Counted, DaemonFacts, Times, exposition
from support.daemon_process import printed

from ckptguard.values.run_summary import RunSummary
from ckptguard.values.silence import Silence

RUN = 'run="/r",instance="n1"'
LOOP = 'loop_timestamp_seconds{instance="n1"}'


def stale_when(known_good: str, interval: str, training: str) -> dict[str, str]:
    """The series that one alert compares."""
    values = {"known_good_timestamp_seconds": known_good, "save_interval_seconds": interval, "training": training}
    return {f"{name}{{{RUN}}}": value for name, value in values.items()}


def scrubbed_every(seconds: int) -> dict[str, str]:
    """The series of a run that was last read at 0."""
    values = {"scrub_oldest_timestamp_seconds": 0, "scrub_interval_seconds": seconds}
    return {f"{name}{{{RUN}}}": f"{value}x200" for name, value in values.items()}


# Of each alert: the series by which it fires and those by which it does not, and when. Time begins at 0.
# "a+bxn": a first value, and n more, each b larger; "_xn": n times nothing.
CASES: dict[str, tuple[tuple[str, dict[str, str], bool], ...]] = {
    "Unprotected": (
        ("20m", {f"protected{{{RUN}}}": "0x60"}, True),
        ("10m", {f"protected{{{RUN}}}": "0x60"}, False),  # a new run gets time for its first verdict
        ("60m", {f"protected{{{RUN}}}": "0x20 1x40"}, False),
        ("20m", {"protected": "0x60"}, False),  # of all others together
    ),
    "KnownGoodStale": (
        ("90m", stale_when(known_good="0x99", interval="1200x99", training="1x99"), True),
        ("90m", stale_when(known_good="0x99", interval="1200x99", training="0x99"), False),
        ("90m", stale_when(known_good="0x99", interval="1900x99", training="1x99"), False),
        ("90m", stale_when(known_good="_x99", interval="1200x99", training="1x99"), False),
        ("90m", stale_when(known_good="0+60x99", interval="60x99", training="1x99"), False),
    ),
    "SavingStopped": (
        ("15m", {f"saving_stopped{{{RUN}}}": "1x60"}, True),
        ("4m", {f"saving_stopped{{{RUN}}}": "1x60"}, False),
        ("20m", {f"saving_stopped{{{RUN}}}": "1x4 0x60"}, False),
        ("20m", {f"saving_stopped{{{RUN}}}": "_x60"}, False),  # nothing shows whether it trains
        ("20m", {"saving_stopped": "3x60"}, True),
    ),
    "Unseen": (
        ("20m", {f"failing{{{RUN}}}": "1x60"}, True),
        ("20m", {f"failing{{{RUN}}}": "0x60"}, False),
        ("10m", {f"failing{{{RUN}}}": "1x60"}, False),  # a mount may come back
        ("20m", {"failing": "3x60"}, True),
        ("20m", {f"unreadable_places{{{RUN}}}": "2x60"}, True),
        ("20m", {f"unreadable_places{{{RUN}}}": "0x60"}, False),
        ("20m", {'search_failing{place="/data",cause="permission"}': "1x60"}, True),
        ("20m", {'search_failing{place="/data",cause="permission"}': "0x60"}, False),
    ),
    "Bad": (
        ("1m", {f"newest_bad{{{RUN}}}": "1x9"}, True),
        ("1m", {"newest_bad": "3x9"}, True),
        ("5m", {f"newest_bad{{{RUN}}}": "1x2 0x9", f'checkpoints{{{RUN},outcome="bad"}}': "7x20"}, False),
    ),
    "Unfinished": (
        ("9m", {f"unfinished_newest{{{RUN}}}": "1x20"}, True),
        ("9m", {"unfinished_newest": "2x20"}, True),
        ("5m", {f"unfinished_newest{{{RUN}}}": "1x2 0x20"}, False),  # it was finished, or has its verdict
    ),
    "Unverified": (
        ("5m", {f"unverified_saves{{{RUN}}}": "1x20"}, True),
        ("5m", {"unverified_saves": "2x20"}, True),
        ("5m", {f"unverified_saves{{{RUN}}}": "1x2 0x20"}, False),  # an hour later
    ),
    "BacklogGrows": (
        ("120m", {f"backlog_bytes{{{RUN}}}": "0+1000x150"}, True),
        ("120m", {f"backlog_bytes{{{RUN}}}": " ".join(["0+1000x9"] * 15)}, False),  # each save gets its verdict
        ("120m", {f"backlog_bytes{{{RUN}}}": "1000000-1000x150"}, False),  # an old run is read for the first time
    ),
    "DiskFills": (
        ("40m", {f"full_in_seconds{{{RUN}}}": "250000x60"}, True),
        ("20m", {f"full_in_seconds{{{RUN}}}": "250000x60"}, False),
        ("40m", {f"full_in_seconds{{{RUN}}}": "260000x60"}, False),
        ("40m", {f"full_in_seconds{{{RUN}}}": "_x60"}, False),  # it does not grow
        ("40m", {"full_in_seconds": "0x60"}, True),
    ),
    "ReplicaBehind": (
        ("80m", {f"replica_behind{{{RUN}}}": "2x90", f"training{{{RUN}}}": "1x90"}, True),
        ("80m", {f"replica_behind{{{RUN}}}": "1x90", f"training{{{RUN}}}": "1x90"}, False),  # one is under way
        ("80m", {f"replica_behind{{{RUN}}}": "1x90", f"training{{{RUN}}}": "0x90"}, True),
        ("80m", {f"replica_behind{{{RUN}}}": "5x30 0 5x60", f"training{{{RUN}}}": "1x90"}, False),
    ),
    "ScrubOverdue": (
        ("180m", scrubbed_every(3000), True),
        ("150m", scrubbed_every(3000), False),
        ("180m", {f"scrub_oldest_timestamp_seconds{{{RUN}}}": "0x200"}, False),  # nothing is scrubbed here
        ("180m", {"scrub_oldest_timestamp_seconds": "0x200", "scrub_interval_seconds": "9x200"}, False),  # of two runs
    ),
    "HooksFail": (
        ("20m", {'hook_failures_total{hook="webhook"}': "0x10 1x20"}, True),
        ("50m", {'hook_failures_total{hook="webhook"}': "0x10 1x60"}, False),
        ("20m", {'hook_failures_total{hook="webhook"}': "7x60"}, False),
    ),
    "Gone": (
        ("15m", {LOOP: "0+60x2 _x60"}, True),
        ("15m", {LOOP: "0x60"}, True),
        ("15m", {LOOP: "0+60x60"}, False),
        ("15m", {LOOP: "0+60x60", 'up{job="ckptguard",instance="n2"}': "0x60"}, True),
        ("15m", {LOOP: "0+60x60", 'up{job="ckptguard",instance="n2"}': "1x60"}, False),
        ("15m", {LOOP: "0+60x60", 'up{job="other"}': "0x60"}, False),
    ),
}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The rules in a file."""
    path = tmp_path / "rules.yml"
    path.write_text(printed("rules"), encoding="utf-8")
    return path


def succeeds(*argv: str, **given: Any) -> None:
    """The command ends well; what it printed otherwise."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=250, **given)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules(promtool: str, rules: Path) -> None:
    """Their syntax, and the templates of their sentences."""
    succeeds(promtool, "check", "rules", str(rules))


def test_every_alert_has_cases_of_both_kinds(rules: Path) -> None:
    """An alert that never fires, or always does, is none."""
    names = re.findall(r"alert: Ckptguard(\w+)", rules.read_text())
    assert sorted(names) == sorted(CASES)
    assert all({fires for _, _, fires in cases} == {True, False} for cases in CASES.values())


def test_every_alert_fires_where_it_should_and_nowhere_else(promtool: str, rules: Path, tmp_path: Path) -> None:
    """On each case of each alert."""
    fire(promtool, rules, tmp_path, [(alert, *case) for alert, cases in CASES.items() for case in cases])


# A series beside those of an alert that fires, and whether it then fires at the same time.
SILENCES = (
    (f"silenced{{{RUN}}}", "1x300", False),
    (f"silenced{{{RUN}}}", "0x300", True),
    (f"silenced{{{RUN}}}", "1x3 0x300", True),  # long over when the alert is looked at
    ('silenced{run="/r",instance="n2"}', "1x300", True),  # another machine's run of the same path
    ('silenced{run="/other",instance="n1"}', "1x300", True),
    ("silenced", "1x300", True),  # the number of silenced runs: the sums of the others leave them out
)


def test_no_alert_is_about_a_silenced_run(promtool: str, rules: Path, tmp_path: Path) -> None:
    """Each case in which an alert about a run fires, while that run or another one is silenced, and after that."""
    cases = []
    for alert, (at, series, fires) in ((alert, case) for alert, own in CASES.items() for case in own):
        if fires and alert not in ("HooksFail", "Gone"):
            is_sum = not any(RUN in name for name in series)
            later = at if at != "1m" else "9m"
            cases += [(alert, later, {**series, name: values}, rings or is_sum) for name, values, rings in SILENCES]
    assert len(cases) > 40
    fire(promtool, rules, tmp_path, cases)


def fire(promtool: str, rules: Path, tmp_path: Path, cases: Iterable[tuple[str, str, dict[str, str], bool]]) -> None:
    """Of each case (alert, when, series, whether) the alert fires then, or does not."""
    tests = []
    for alert, at, series, fires in cases:
        named = {n if n.startswith("up{") else f"ckptguard_{n}": v for n, v in series.items()}
        alerts = f'count(ALERTS{{alertname="Ckptguard{alert}",alertstate="firing"}}) or vector(0)'
        tests.append(
            {
                "name": f"{alert} {series}",
                "interval": "1m",
                "input_series": [{"series": n, "values": v} for n, v in named.items()],
                "promql_expr_test": [
                    {"expr": alerts, "eval_time": at, "exp_samples": [{"labels": "{}", "value": int(fires)}]}
                ],
            }
        )
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    succeeds(promtool, "test", "rules", str(path))


def test_every_panel_shows_something(promtool: str, tmp_path: Path) -> None:
    """In two hours of a run of which everything is known, and of which something is wrong."""
    run = RunSummary(
        url="/r",
        name="r",
        protected=True,
        training=True,
        saving_stopped=True,
        known_good_at=0.0,
        save_interval=600.0,
        began_at=0.0,
        checkpoints={"good": 1},
        bytes={"good": 1},
        backlog_bytes=1,
        waiting_since=0.0,
        replicas=1,
        replicas_behind=1,
        scrubbed_at=0.0,
        incidents={"numeric": 1},
        rollbacks={"numeric": 1},
        steps_saved=1,
    )
    times = {name: {own.values[0]: Times({60.0: 1}, 0.5)} for name, own in HISTOGRAMS.items()}
    counted = Counted(verdicts={"/r": {"good": 1}}, times=times)
    text = exposition([run], DaemonFacts(loop_at=0.0, counted=counted), 60.0).decode()
    series = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    grows = re.compile(r"_total|_bucket|_count|_sum")
    tests = {
        "interval": "1m",
        "input_series": [{"series": n, "values": f"{v}+{int(bool(grows.search(n)))}x120"} for n, _, v in series],
        "promql_expr_test": [
            {"expr": f"count({asked}) > bool 0", "eval_time": "2h", "exp_samples": [{"labels": "{}", "value": 1}]}
            for panel in json.loads(printed("grafana"))["panels"]
            for target in panel["targets"]
            for asked in [target["expr"].replace("$run", ".*").replace("$__rate_interval", "5m")]
        ],
    }
    assert len(tests["promql_expr_test"]) > 15
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": [tests]}))
    succeeds(promtool, "test", "rules", str(path))


def test_of_very_many_runs_each_alert_names_the_same_runs(
    promtool: str, rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a daemon says of many runs raises the same alerts as what it says of few, and names each run."""
    at = 4 * 3600.0
    draw = random.Random(25)
    runs = [
        RunSummary(
            url=f"/r/{n}",
            name=f"{n}",
            labels={"team": f"team-{n % 3}", "owner": f"{n}"} if n % 2 else {},
            state="failing" if draw.random() < 0.1 else "guarded",
            protected=draw.random() < 0.9,
            training=(trains := draw.random() < 0.5),
            saving_stopped=draw.choice([None, False, False, False, not trains]),
            known_good_at=at - draw.choice([0.0, 500.0, 5000.0]),
            save_interval=600.0,
            newest_outcome=draw.choice(["good", "good", "good", "bad"]),
            checkpoints={"good": 1},
            unreadable=draw.choice([0, 0, 0, 0, 2]),
            replicas=draw.choice([0, 1]),
            replicas_behind=draw.choice([0, 0, 1, 2]),
            scrubbed_at=at - draw.choice([10.0, 3600.0]),
            scrub_interval=draw.choice([None, 5.0, 8000.0]),
            unfinished_since=draw.choice([None, None, None, at - 9000.0]),
            silence=Silence(until=2 * at, by="alice") if draw.random() < 0.1 else None,
        )
        for n in range(60)
    ]
    few = exposition(runs, None, at).decode()
    monkeypatch.setattr(module, "MOST_RUNS", 55)
    many = exposition(runs, None, at).decode()
    assert len(few.splitlines()) > len(many.splitlines())
    series = {}
    for name, text in (("few", few), ("many", many)):
        for line in text.splitlines():
            shown, _, value = line.rpartition(" ")
            if not line.startswith("#"):
                head, brace, labels = shown.partition("{")
                series[f'{head}{{instance="{name}"{"," if brace else "}"}{labels}'] = f"{value}x300"
    first, second = (f'ALERTS{{alertstate="firing",instance="{name}"}}' for name in ("few", "many"))
    same = "on(alertname, run, team, owner)"
    differ = f"({first} unless {same} {second}) or ({second} unless {same} {first})"
    asked = {f"count({differ}) or vector(0)": 0, f"count(count by (alertname) ({second})) > bool 5": 1}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "4h", "exp_samples": [{"labels": "{}", "value": value}]}
            for expr, value in asked.items()
        ],
    }
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    succeeds(promtool, "test", "rules", str(path))


def test_promtool_has_no_remark_about_the_metrics(promtool: str) -> None:
    """Names, units and help texts, of one run and of very many."""
    now = time.time()
    known: dict[str, Any] = {"known_good_at": now, "known_good_step": 1, "save_interval": 1.0, "scrubbed_at": now}
    known |= {
        "replicas": 1,
        "world_size": 2,
        "scrub_interval": 1.0,
        "incidents": {"numeric": 1},
        "checkpoints": {"good": 1},
    }
    runs = [RunSummary(url=f"/r/{n} \"'\n\\", name="r", rollbacks={"numeric": 1}, **known) for n in range(1001)]
    for shown in (runs[:1], runs):
        text = exposition(shown, DaemonFacts(loop_at=now), now)
        succeeds(promtool, "check", "metrics", input=text.decode())


def test_the_rules_and_the_dashboard_ask_for_metrics_that_there_are(rules: Path) -> None:
    """A misspelled name would be an alert that never fires."""
    now = time.time()
    known: dict[str, Any] = {"known_good_at": now, "known_good_step": 1, "save_interval": 1.0, "scrubbed_at": now}
    run = RunSummary(url="/r", name="r", saving_stopped=False, replicas=1, world_size=1, scrub_interval=1.0, **known)
    many = [RunSummary(url=f"/r/{n}", name="r") for n in range(1001)]
    text = exposition([run], DaemonFacts(loop_at=now), now) + exposition(many, DaemonFacts(loop_at=now), now)
    there = set(re.findall(r"# TYPE (\w+)", text.decode())) | {f"ckptguard_{name}_bucket" for name in HISTOGRAMS}
    dashboard = json.loads(printed("grafana"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += re.findall(r"ckptguard_\w+", rules.read_text())
    names = {name for expression in asked for name in re.findall(r"ckptguard_\w+", expression)}
    assert names <= there
    assert len(names) > 15

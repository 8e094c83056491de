"""`status`, `fleet`, the page, the metrics and the alerts say the same of a run, whatever happened to it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.dashboard.pages import fleet_page, run_page
from ckptguard_daemon.metrics import exposition
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.served_runs import of_this_process, watched
from support.tiny_files import WEIGHTS
from support.tiny_run import TINY, inline, name_of, poison, rot, save, truncate

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.cli.entry import commands
from ckptguard.errors import CkptguardError
from ckptguard.keep.quarantine import quarantine
from ckptguard.records import incidents
from ckptguard.records.incidents import list_incidents, open_incident, update_incident
from ckptguard.records.run import Run, write_once
from ckptguard.records.silences import end_silence, silence_run
from ckptguard.records.who_and_when import utc_text
from ckptguard.recover.restore import restore
from ckptguard.repair.scrub import scrub
from ckptguard.replicas.replicate import replica_states, replicate
from ckptguard.retention.pin import pin
from ckptguard.retention.prune import prune
from ckptguard.runs.run_view import RunView, open_view
from ckptguard.runs.work import Work
from ckptguard.values.retention_policy import Policy

WORK = Work(scanner=inline)
OFTEN, SELDOM, LATELY = 25_000.0, 100_000.0, 205_000.0  # seconds: between two saves, and since the first ones
SAVES = ("good", "bad", "suspect", "incomplete", "unfinished", "saved again")
KEPT = ("damage a copy", "lose a copy", "pin", "restore", "prune")
OTHERS = ("rotate", "lose", "damage", "roll back", "quarantine", "incident", "close", "replicate", "end", "restart")
SILENCES = ("silence", "a short silence", "unsilence", "damage a silence")
ACTIONS = (*SAVES, *KEPT, *OTHERS, *SILENCES)
RULES = (files("ckptguard_daemon") / "deploy" / "ckptguard-rules.yml").read_text(encoding="utf-8")


class Life:
    """A run that a daemon guards, and what everybody says of it."""

    def __init__(self, folder: Path, keep: str) -> None:
        self.unfinished: Path | None = None  # a save that may still be written
        self.folder, self.root = folder, folder / "runs" / "run"
        self.root.mkdir(parents=True)
        self.url = str(self.root)
        self.settings = TINY.changed(keep=keep, unfinished_limit=1000.0, replicas=(str(folder / "replica"),))
        self.config = folder / "ckptguard.toml"
        self.config.write_text(
            f'settle = 0.0\nunfinished_limit = 1000.0\nkeep = "{keep}"\nworkers = 1\nreplicas = ["{folder}/replica"]\n'
        )
        self.saved: list[int] = []  # steps, in the order in which they were saved
        self.times = 0
        self.began = time.time()
        self.restart()
        for _ in range(3):
            self.save("good")
        self.settle()

    def restart(self) -> None:
        """A new daemon, which reads what the last one noted."""
        self.feed = CatalogueFeed(Catalogue(str(self.folder)))
        known = {"presence": of_this_process(), "feed": self.feed}
        self.watched = watched(self.url, self.settings, log=lambda *_, **__: None, **known)  # type: ignore[arg-type]

    def look(self) -> RunView:
        """The run as it is now."""
        return open_view(self.url, self.settings)

    @property
    def steps(self) -> list[int]:
        """The steps in place, the one that was saved last at the end."""
        return [step for step in self.saved if (self.root / name_of(step)).exists()]

    def save(self, what: str) -> None:
        """Save the next step, or the last one again, at a time of its own: the first ones seldom, then often."""
        step = self.steps[-1] if what == "saved again" and self.steps else len(self.saved) + 1
        save(self.url, step, len(self.saved) + 100)
        place = self.root / name_of(step)
        if what == "bad":
            poison(place / WEIGHTS)
        elif what == "suspect":
            (place / WEIGHTS).write_bytes((place / WEIGHTS).read_bytes().replace(b'"c"', b'"d"'))
        elif what == "incomplete":
            index = {"weight_map": {"a": WEIGHTS, "z": "z.safetensors"}}
            (place / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        elif what == "unfinished":
            truncate(self.url, f"{name_of(step)}/{WEIGHTS}")
        early = SELDOM * max(2 - self.times, 0)
        self.moment = self.began - LATELY - early + OFTEN * max(self.times - 2, 0)
        if what != "unfinished":
            self.date(place)
        self.unfinished = place if what == "unfinished" else None
        self.saved.append(step)
        self.times += 1

    def date(self, place: Path) -> None:
        """Let a save be as old as it is meant to be."""
        for file in (*place.iterdir(), place):
            os.utime(file, (self.moment, self.moment))

    def act(self, action: str) -> None:
        """Do one thing that happens to runs."""
        if self.unfinished is not None and self.unfinished.exists():  # its writer died long ago
            self.date(self.unfinished)
        steps, view = self.steps, self.look()
        newest, oldest = (steps[-1], steps[0]) if steps else (0, 0)
        copies = sorted((self.root / "_ckptguard" / "kept").glob(f"*/*/*/{WEIGHTS}"))
        if action in SAVES:
            self.save(action)
        elif action in ("rotate", "lose") and steps:
            shutil.rmtree(self.root / name_of(oldest if action == "rotate" else newest))
        elif action == "damage" and steps:
            rot(self.url, f"{name_of(newest)}/{WEIGHTS}")
            scrub(view, work=WORK)
        elif action == "damage a copy" and copies:
            rot(self.url, str(copies[-1].relative_to(self.root)))
            scrub(view, work=WORK)
        elif action == "lose a copy" and copies:
            shutil.rmtree(copies[-1].parent)
        elif action == "roll back":
            self.roll_back()
        elif action == "quarantine" and steps:
            quarantine(view, name_of(newest), reason="odd")
        elif action == "incident":
            open_incident(view.run, step=newest, cause="numeric", reason="NaN", evidence={}, source="guard")
        elif action == "close":
            for one in list_incidents(view.run)[-1:]:
                update_incident(view.run, one, state="closed", action="went back", known_good="1.1")
        elif action == "replicate":
            replicate(view, self.settings.replicas[0], work=WORK)
        elif action == "pin" and view.checkpoints:
            pin(view, view.checkpoints[0], note="mine")
        elif action == "prune":
            prune(view, Policy(keep_last=2, keep_good=1), grace=3600.0)
        elif action == "restore":
            restore(view, str(self.folder / f"restored-{time.monotonic_ns()}"), work=WORK)
        elif action == "end":
            for step in {*steps}:
                shutil.rmtree(self.root / name_of(step))
        elif action == "restart":
            self.restart()
        elif action in SILENCES:
            self.silence(view.run, action)

    def silence(self, run: Run, action: str) -> None:
        """Silence the run for an hour or a moment, let it be told of again, or damage the record that says so."""
        if action == "unsilence":
            end_silence(run)
        elif action == "damage a silence":
            for path in (self.root / "_ckptguard" / "silences").glob("*.json"):
                run.records.remove(f"silences/{path.name}")
                write_once(run, f"silences/{path.stem[:-1]}{'1' if path.stem[-1] == '0' else '0'}.json", b"{")
        else:
            until = time.time() + (3600.0 if action == "silence" else 1e-6)
            silence_run(run, until, reason="the disk is replaced", by="alice")

    def roll_back(self) -> None:
        """As a user does. Then nothing says that the newest save is bad, or that anybody trains."""
        newest = self.steps[-1:]
        self.ask("rollback", self.url, "--force")
        if self.steps and newest and newest[0] not in self.steps:
            self.settle()
            page = self.page()["run"]
            assert (page["newest_outcome"], page["training"]) == ("good", False)
            assert self.firing() & {"Bad", "KnownGoodStale"} == set()

    def settle(self) -> None:
        """Let the daemon look until it has nothing left to do, and ask the replicas."""
        for _ in range(3):
            self.watched.step(WORK)
        if self.watched.state == "guarded":
            self.watched.replicas = replica_states(self.look())
            self.watched.step(WORK)

    def ask(self, *words: str) -> Any:
        """The document of a command."""
        found = CliRunner().invoke(commands, [*words, "--json", "--config", str(self.config)])
        assert found.stdout, (found.stderr, found.exception)
        return json.loads(found.stdout)

    def page(self) -> dict[str, Any]:
        """The document of the run's page."""
        return run_page(self.feed, self.watched)

    def metrics(self) -> dict[str, Any]:
        """The values of the run's metrics; those of several labels by the label."""
        found: dict[str, Any] = {}
        text = exposition([self.feed.summary(self.watched)], None, time.time()).decode()
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                name, label = one.name.removeprefix("ckptguard_"), one.labels.get("outcome") or one.labels.get("cause")
                if label is None:
                    found[name] = one.value
                else:
                    found.setdefault(name, {})[label] = one.value
        return found

    def firing(self) -> set[str]:
        """The alerts whose conditions hold now, of those that look at one moment."""
        known, now = self.metrics(), time.time()
        names = ("Unprotected", "KnownGoodStale", "Bad")
        return {name for name in names if eval(_as_python(name), {"of": known.get, "nan": math.nan, "now": now})}


def _as_python(alert: str) -> str:
    """The expression of a rule over the series of one run. What is not there compares as false, as in Prometheus."""
    found = re.search(rf"alert: Ckptguard{alert}\n +expr: (?:\|\n)?(.*?)\n +(?:for|labels):", RULES, re.DOTALL)
    assert found is not None
    text = re.sub(r"ckptguard_(\w+)(\{[^}]*\})?", r'of("\1", nan)', found[1]).replace("time()", "now")
    text = text.replace("unless", "and not")
    return " ".join(text.split())


def agree(life: Life) -> None:
    """All five say the same."""
    page, [row] = life.page(), fleet_page(life.feed, [life.watched])["runs"]
    told, [listed] = life.ask("status", life.url), life.ask("fleet", "report", str(life.root.parent))["rows"]
    known, firing = life.metrics(), life.firing()
    assert {**page["run"], "at_risk": None} == {**row, "at_risk": None}
    assert told["explanation"] == page["sentence"] == row["explanation"] == listed["explanation"]
    assert told["protected"] == row["protected"] == told["explanation"].startswith("yes: ")
    assert listed["protected"] == told["explanation"].partition(":")[0]
    assert (told["at_risk"] is None) == (row["at_risk"] is None)
    if row["state"] == "ended":
        assert (told["protected"], told["at_risk"], known, firing) == (False, None, {}, set())
        return
    silenced = _silence_agrees(told, row, listed, known)
    assert not (silenced and firing)
    assert known["protected"] == told["protected"]
    assert ("Unprotected" in firing) == (not told["protected"] and not silenced)
    good = told["known_good"]
    assert (good and good["step"]) == row["known_good_step"] == known.get("known_good_step")
    assert (good and good["id"]) == listed["known_good"]
    assert row["known_good_at"] == known.get("known_good_timestamp_seconds")
    assert listed["known_good_at"] == (None if row["known_good_at"] is None else utc_text(row["known_good_at"]))
    counts = {**told["outcomes"], "pending": told["outcomes"]["pending"] + len(told["changed"])}
    assert {outcome: count for outcome, count in counts.items() if count} == row["checkpoints"]
    assert (counts, known.get("checkpoints", {})) == (listed["outcomes"], row["checkpoints"])
    size = {outcome: size for outcome, size in listed["bytes"].items() if size}
    assert size == row["bytes"] == known.get("checkpoint_bytes", {})
    waiting = len(told["pending"]) + len(told["changed"])
    assert waiting == row["backlog"] == known["backlog_checkpoints"] == len(page["pending"])
    _newest_agrees(life, row, known)
    assert ("Bad" in firing) == (bool(known["newest_bad"]) and not silenced)
    _trains(told, row, known)
    assert listed["oldest_read_at"] == (None if row["scrubbed_at"] is None else utc_text(row["scrubbed_at"]))
    assert row["scrubbed_at"] == known.get("scrub_oldest_timestamp_seconds")
    [replica] = told["replicas"]
    assert replica["behind"] == row["replicas_behind"] == listed["replicas_behind"] == known["replica_behind"]
    last = told["last_incident"] and (told["last_incident"]["id"], told["last_incident"]["state"] != "closed")
    assert last == (row["last_incident"] and (row["last_incident"]["name"], row["last_incident"]["open"]))
    assert (row["incidents"], row["rollbacks"]) == (known.get("incidents_total", {}), known.get("rollbacks_total", {}))
    assert all(event["at"] >= int(life.began) for event in page["events"] if event["kind"] == "rollback")


def _silence_agrees(told: dict[str, Any], row: dict[str, Any], listed: dict[str, Any], known: dict[str, Any]) -> bool:
    """All say that the run is silenced, or that a record of it is damaged. True if it is silenced."""
    silence = row["silence"]
    until = silence and silence["until"]
    as_text = silence and {**silence, "until": None if until is None else utc_text(until)}
    assert as_text == told["silence"] == listed["silence"]
    assert bool(known["silenced"]) == (until is not None)
    return until is not None


def _newest_agrees(life: Life, row: dict[str, Any], known: dict[str, Any]) -> None:
    """The newest save is the one in place that was saved last, and its verdict the one that `list` shows."""
    shown = {one["path"]: one for one in life.ask("list", life.url)["checkpoints"] if one["in_place"]}
    if life.steps:
        newest = shown[name_of(life.steps[-1])]
        assert row["newest_outcome"] == ("pending" if newest["changed"] else newest["outcome"])
    assert (row["newest_outcome"] == "bad") == bool(known["newest_bad"])


def _trains(told: dict[str, Any], row: dict[str, Any], known: dict[str, Any]) -> None:
    """Whether it trains, and what would be lost."""
    assert bool(known["training"]) == row["training"] == (told["at_risk"] is not None)
    lost = told["at_risk"] or {"gpu_seconds": 0.0, "since": None, "world_size": row["world_size"]}
    assert known["at_risk_gpu_seconds"] == pytest.approx(lost["gpu_seconds"], abs=60.0)
    if told["at_risk"] is not None:
        assert lost["since"] == (row["safe_at"] if row["safe_at"] is not None else row["began_at"])
    assert lost["world_size"] == row["world_size"] == known.get("world_size")


@settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(keep=st.sampled_from(["copy", "link", "none"]), actions=st.lists(st.sampled_from(ACTIONS), max_size=8))
@example(keep="copy", actions=["bad", "roll back", "good"])
@example(keep="link", actions=["replicate", "good", "end", "bad"])
@example(keep="copy", actions=["incident", "bad", "roll back", "close", "good", "restart"])
@example(keep="copy", actions=["incomplete", "suspect", "quarantine", "unfinished", "roll back", "end"])
@example(keep="copy", actions=["replicate", "good", "lose a copy", "damage", "lose", "replicate"])
@example(keep="none", actions=["silence", "bad", "damage a silence", "restart", "unsilence", "a short silence", "bad"])
@example(keep="copy", actions=["saved again", "bad", "rotate", "prune", "pin", "restore", "end", "good"])
def test_all_say_the_same_of_a_run(keep: str, actions: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """After each thing that happens to it. Incidents are an hour old, so that a rollback has another time."""
    folder = tmp_path_factory.mktemp("life")
    with mock.patch.object(incidents, "dated_name", _an_hour_ago):
        life = Life(folder, keep)
        agree(life)
        for action in actions:
            try:
                life.act(action)
            except CkptguardError:
                continue  # there is nothing good to go back to
            life.settle()
            agree(life)
    shutil.rmtree(folder)


def _an_hour_ago() -> tuple[str, str]:
    text = utc_text(time.time() - 3600.0)
    name = text.replace("-", "").replace(":", "").removesuffix("Z")
    return f"{name}-{time.monotonic_ns() % 16**8:08x}", text

"""The pages' documents: they ask the run's storage nothing, and say what the command line says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptguard_daemon.http.routes import Caller, Role
from support.dashboards import Opener
from support.tiny_run import TINY, WEIGHTS, delete, inline, name_of, poison, rot, save

from ckptguard.decisions.run_summary import NOT_SEEN
from ckptguard.records.incidents import open_incident, update_incident
from ckptguard.records.pins import pin_checkpoint
from ckptguard.records.run import open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.values.ids import CheckpointId, run_id_of

VIEWS = ("page", "curves")
SERIES = "model-#"


def command_line(*arguments: str) -> Any:
    """The document of a command, in a process of its own."""
    command = [sys.executable, "-m", "ckptguard", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "CKPTGUARD_SETTLE": "0"})
    return json.loads(done.stdout)


def test_a_page_view_asks_the_storage_nothing(open_dashboard: Opener, url: str) -> None:
    """Each view answers without one request, also when the run is gone meanwhile."""
    dashboard = open_dashboard(url)
    dashboard.make_passes()
    assert len(dashboard.ask("page", run=url)["generations"]) == 3
    listener = dashboard.listen()
    assert listener.next()[0] == "hello"
    before = [dashboard.ask("fleet"), *(dashboard.ask(view, run=url) for view in VIEWS)]
    assert dashboard.requests.total() == 0
    if os.path.isabs(url):
        shutil.rmtree(url)
    after = [dashboard.ask("fleet"), *(dashboard.ask(view, run=url) for view in VIEWS)]
    assert [{**one, "as_of": 0} for one in after] == [{**one, "as_of": 0} for one in before]
    assert dashboard.requests.total() == 0
    listener.close()


def test_it_says_what_the_command_line_says(open_dashboard: Opener, folder: str) -> None:
    """Outcomes, places, copies, pins, incidents and the sentence are those of `list`, `status` and `incidents`."""
    settings = TINY.changed(keep_last=4, trash_grace=86400.0)
    dashboard = open_dashboard(folder, settings=settings)

    def same() -> None:
        dashboard.make_passes(2)
        page = dashboard.ask("page", run=folder)
        assert page["noted"]
        listed = {(one["series"], one["id"]): one for one in command_line("list", folder)["checkpoints"] if one["id"]}
        shown = {(one["series"], one["id"]): one for one in page["generations"]}
        assert shown.keys() == listed.keys()
        for key, one in shown.items():
            line = listed[key]
            assert one["step"] == line["step"]
            assert one["path"] == line["path"]
            assert one["in_place"] == line["in_place"]
            assert bool(one["kept"]) == line["kept"]
            assert (one["aside"] == "quarantine", one["aside"] == "trash") == (line["quarantined"], line["trashed"])
            assert one["pinned"] == "; ".join(line["pins"])
            assert one["outcome"] == line["outcome"] or (line["outcome"] == "good" and one["good"])
            assert one["reason"] == line["reason"] or line["outcome"] == "good"
        told = command_line("status", folder)
        waiting = "waits for a verdict" in told["explanation"] or "wait for a verdict" in told["explanation"]
        assert page["sentence"] == told["explanation"] or waiting
        incidents = command_line("incidents", folder)["incidents"]
        assert [(i["name"], i["cause"], i["step"], i["onset"], i["open"]) for i in page["incidents"]] == [
            (i["id"], i["cause"], i["step"], i["onset"], i["state"] != "closed") for i in incidents
        ]
        last = incidents[-1]["id"] if incidents else None
        assert (page["run"]["last_incident"] or {"name": None})["name"] == last
        [row] = dashboard.ask("fleet")["runs"]
        now = {"training": None, "at_risk": None}  # as of the moment of the question
        assert {**row, **now} == {**page["run"], **now}

    same()
    save(folder, 4, 4)
    poison(Path(folder, name_of(4), WEIGHTS))
    pin_checkpoint(open_run(folder), CheckpointId(SERIES, 2, 1), note="for the paper")
    same()
    rot(folder, f"{name_of(3)}/{WEIGHTS}")
    for run in dashboard.runs:
        run.ask(name_of(3))
    same()
    delete(folder, 3)
    save(folder, 2, 20)
    same()
    view = open_view(folder, settings)
    roll_back(view, GoBack(reason="loss", before_step=4, check_writing=False), work=Work(scanner=inline))
    incident = open_incident(view.run, step=7, cause="numeric", reason="NaN", evidence={}, source="guard")
    same()
    update_incident(view.run, incident, state="closed", action="rolled back", known_good="2.1")
    for step in range(8, 14):
        save(folder, step, step)
    same()


def test_without_a_catalogue_the_page_is_the_same(open_dashboard: Opener, folder: str) -> None:
    """A catalogue without files has the same rows in memory."""
    without, with_one = open_dashboard(folder, catalogue=False), open_dashboard(folder)
    pages = []
    for dashboard in (with_one, without):
        dashboard.make_passes(2)
        page = dashboard.ask("page", run=folder)
        assert len(page["events"]) == 3
        fixed = {key: page[key] for key in ("run", "sentence", "series", "generations", "incidents", "noted")}
        fixed["run"] = {**page["run"], "free": None}  # of the disk, which others fill meanwhile
        pages.append({**fixed, "events": [{**e, "number": 0} for e in page["events"]]})
        assert dashboard.ask("fleet")["catalogue"] == (dashboard is with_one)
    assert pages[0] == pages[1]


def test_a_run_that_was_not_seen_is_neither_good_nor_bad(open_dashboard: Opener, tmp_path: Path) -> None:
    """Before its first pass, and without its folder, the page says that nothing is known."""
    dashboard = open_dashboard(str(tmp_path / "none"))
    page = dashboard.ask("page", run=str(tmp_path / "none"))
    assert (page["sentence"], page["noted"], page["generations"]) == (NOT_SEEN, False, [])
    dashboard.make_passes()
    page = dashboard.ask("page", run=str(tmp_path / "none"))
    assert (page["run"]["state"], page["sentence"]) == ("waiting", NOT_SEEN)
    assert "none" in page["run"]["trouble"]


def test_what_nobody_looked_at_is_told(open_dashboard: Opener, folder: str, tmp_path: Path) -> None:
    """A save whose name cannot be read has no verdict, and nobody knows yet what a replica holds."""
    Path(os.fsdecode(os.fsencode(folder) + b"/model-\xff.safetensors")).write_bytes(b"\0" * 64)
    dashboard = open_dashboard(folder, settings=TINY.changed(replicas=(str(tmp_path / "replica"),)))
    for _ in range(2):  # the second pass finds nothing to do
        dashboard.make_passes()
        page = dashboard.ask("page", run=folder)
        told = [one for one in page["could_not_tell"] if "was not looked at" in one]
        status = [sys.executable, "-m", "ckptguard", "status", folder]
        said = subprocess.run(status, capture_output=True, text=True, check=False).stderr
        assert [f"warning: {one}" for one in told] == said.splitlines()[:1]
        assert (page["run"]["replicas"], page["run"]["replicas_unknown"]) == (1, 1)


@pytest.mark.torch
def test_saves_under_one_name_tell_their_updates(open_dashboard: Opener, tmp_path: Path) -> None:
    """Each content has the counter that it holds, also when it was saved over."""
    run = tmp_path / "nanogpt"
    run.mkdir()
    dashboard = open_dashboard(str(run))
    for update in (250, 500):
        torch.save({"model": {"w": torch.randn(8)}, "iter_num": update}, run / "ckpt.pt")
        os.utime(run / "ckpt.pt", (time.time() - 3600 + update,) * 2)
        dashboard.make_passes(2)
    found = dashboard.ask("page", run=str(run))["generations"]
    assert [(one["id"], one["step"], one["updates"]) for one in found] == [("-.1", None, 250), ("-.2", None, 500)]


def test_a_token_for_some_runs_sees_no_others(open_dashboard: Opener, folder: str, tmp_path: Path) -> None:
    """Other runs are in no list, no total and no answer."""
    other = str(tmp_path / "secret")
    Path(other).mkdir()
    save(other, 1, 1)
    dashboard = open_dashboard(folder, other)
    dashboard.make_passes()
    everything = dashboard.ask("fleet")
    assert {row["name"] for row in everything["runs"]} == {"run", "secret"}
    dashboard.caller = Caller(name="x", role=Role.READER, runs=("run",))
    fleet = dashboard.ask("fleet")
    assert [row["name"] for row in fleet["runs"]] == ["run"]
    assert sum(total["checkpoints"] for total in fleet["totals"]) == 3
    assert "secret" not in json.dumps(fleet)
    for place in ("page", "curves", "heat", "checkpoint", "shards", "diff", "incidents/x", "incidents/x/report"):
        assert dashboard.ask(place, run=other, name=f"{SERIES}/000000000001.1") == (404, "not_found")
    dashboard.caller = None
    assert dashboard.get("/v1/fleet")[0] == 401


HOSTILE = ("<img src=x onerror=alert(1)>", "\u202eevil", "half\udcff", "a" * 200, "new\nline", "quote\"'&", "%2e%2e")


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_valid_json(open_dashboard: Opener, tmp_path: Path, name: str) -> None:
    """Names of runs and checkpoints are text in valid JSON, without control or right-to-left characters."""
    root = tmp_path / name
    root.mkdir()
    save(str(root), 1, 1)
    if "\udcff" not in name:  # such a folder is no checkpoint
        (root / name_of(1)).rename(root / f"{name}-7")
    dashboard = open_dashboard(str(root))
    dashboard.make_passes()
    fleet, page = dashboard.ask("fleet"), dashboard.ask("page", run=str(root))
    [one] = page["generations"]
    assert one["outcome"] == "good"
    for text in (json.dumps(fleet, ensure_ascii=False), json.dumps(page, ensure_ascii=False)):
        assert not any(c in text for c in "\u202e\n\udcff")
    assert page["run"]["name"] == name.replace("\u202e", "\\u202e").replace("\udcff", "\\udcff").replace(
        "\n", "\\u000a"
    )
    shown = dashboard.ask("checkpoint", run=str(root), name=one["name"])
    assert shown["path"] == one["path"]
    assert dashboard.ask("heat", run=str(root), series=page["series"][0])["checkpoints"]
    assert dashboard.ask("shards", run=str(root), name=one["name"])["files"]


def test_unknown_runs_are_refused(open_dashboard: Opener, folder: str) -> None:
    """A run that went between two questions is one that does not exist."""
    dashboard = open_dashboard(folder)
    dashboard.make_passes()
    assert dashboard.ask("page", run=folder)["noted"]
    dashboard.runs.remove(run_id_of(folder))
    assert dashboard.ask("page", run=folder) == (404, "not_found")
    assert dashboard.ask("fleet")["runs"] == []

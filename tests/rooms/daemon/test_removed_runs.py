"""Runs that somebody removed: they have ended, are no alarm, and are forgotten after a day."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.dashboard.pages import fleet_page
from ckptguard_daemon.metrics import exposition
from ckptguard_daemon.plan import DaemonPlan
from ckptguard_daemon.run_set import RunDiscovery, RunSet
from support import served_runs
from support.daemon_process import until
from support.faults import flip
from support.served_runs import of_this_process
from support.tiny_files import WEIGHTS
from support.tiny_run import inline, save
from support.views import look

from ckptguard.engine import watched_run as guarded_module
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import NoKnownGoodError
from ckptguard.fleet import read_fleet
from ckptguard.inspect.status import status
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.storage.local import removal
from ckptguard.storage.local.removal import removed
from ckptguard.upkeep import finish_copies, reconcile
from ckptguard.values.run_summary import RunSummary
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

SETTINGS = Settings(settle=0.0, scan_interval=0.01, keep="copy", workers=1)


LOGGED: list[tuple[str, str]] = []  # by the runs of a test


@pytest.fixture
def said() -> list[tuple[str, str]]:
    """The level and the event of each line of the log."""
    LOGGED.clear()
    return LOGGED


def watched(run: Path | str, settings: Settings = SETTINGS, **known: Any) -> WatchedRun:
    """A run as a daemon watches it."""
    return served_runs.watched(
        run, settings, log=lambda event, level="info", **_: LOGGED.append((level, event)), **known
    )


def step(run: WatchedRun) -> str:
    """Make a pass; the state after it."""
    run.step(Work(scanner=inline))
    return run.state


def seen(run: Path, settings: Settings = SETTINGS) -> WatchedRun:
    """A run with a verdict."""
    save(str(run), 100, 1)
    guarded = watched(run, settings)
    while not guarded.verdicts:
        step(guarded)
    return guarded


def seen_by_another(run: Path) -> WatchedRun:
    """Another process, or a guard in the training, gives a verdict first."""
    other = watched(run)
    while not other.verdicts:
        step(other)
    return other


def leftovers(run: Path, *, age: float = 0.0) -> Path:
    """A run of which only records are left."""
    seen(run)
    shutil.rmtree(run / "model-100")
    for path in (run / "_ckptguard").rglob("*"):
        os.utime(path, (time.time() - age, time.time() - age))
    return run


def test_a_removed_run_has_ended(tmp_path, said):
    """Without a warning, and whatever is removed first."""
    for first in ("model-100", "_ckptguard", "_ckptguard/format.json", "."):
        run = tmp_path / first.replace("/", "-").replace(".", "all")
        guarded = seen(run)
        place = run / first
        place.unlink() if place.is_file() else shutil.rmtree(place)
        before = sorted(run.rglob("*"))
        while step(guarded) != "ended" and first == "model-100":
            pass
        if first == "model-100":
            continue  # what is left are records, which may be kept up
        assert guarded.state == "ended"
        assert sorted(run.rglob("*")) == before
    assert {level for level, _ in said} == {"info"}


def test_what_fails_because_a_run_is_being_removed_is_no_alarm(tmp_path, said, monkeypatch):
    """Whatever a pass wanted to record just then. If the run stays, the next pass does it."""
    run = tmp_path / "run"
    guarded = seen(run)
    save(str(run), 200, 2)
    while guarded.verdicts < 2:
        step(guarded)
    asked = []

    def refused(run_of_mark, current_verdict):
        asked.append(current_verdict.id.step)
        raise removed(run_of_mark.records.root)

    said.clear()
    with monkeypatch.context() as going:
        going.setattr("ckptguard.upkeep.reconcile.mark_emptied", refused)
        shutil.rmtree(run / "model-200")
        while not asked:
            step(guarded)
    assert [event for level, event in said if level == "warning"] == []
    while not list((run / "_ckptguard" / "emptied").rglob("*.json")):
        step(guarded)
    assert guarded.state == "guarded"


@pytest.mark.parametrize("stays", [(), ("model-100",)], ids=["all", "all but one"])
def test_checkpoints_that_go_during_a_pass_are_no_alarm(tmp_path, said, stays):
    """A removal that comes to the records last. What is wrong with a run that stays is said by the next pass."""
    run = tmp_path / "run"
    guarded = seen(run)
    save(str(run), 200, 2)

    scanned = []

    def scan_and_remove(*words, **how):
        found = inline(*words, **how)
        for name in ("model-100", "model-200"):
            if name not in stays and (run / name).is_dir():
                shutil.rmtree(run / name)
        scanned.append(found)
        return found

    said.clear()
    while not scanned:
        guarded.step(Work(scanner=scan_and_remove))
    assert [event for level, event in said if level == "warning"] == []
    shutil.rmtree(run)
    assert step(guarded) == "ended"
    assert [event for level, event in said if level == "warning"] == []


def test_copies_that_go_while_they_are_read_are_no_alarm(tmp_path, said, monkeypatch):
    """A removal that comes to them while a link is replaced by a copy."""
    run, asked = tmp_path / "run", []
    guarded = seen(run, SETTINGS.changed(keep="auto"))
    real = finish_copies.publish_file

    def remove_and_publish(source, target, file, *words, **how):
        asked.append(file.path)
        shutil.rmtree(run / "_ckptguard" / "kept", ignore_errors=True)
        return real(source, target, file, *words, **how)

    monkeypatch.setattr(finish_copies, "publish_file", remove_and_publish)
    said.clear()
    save(str(run), 200, 2)
    until(lambda: step(guarded) and asked, "a copy of its own")
    step(guarded)
    assert [event for level, event in said if level == "warning"] == []
    shutil.rmtree(run)
    assert step(guarded) == "ended"


def test_records_that_go_again_and_again_hold_up_no_verdict_for_ever(tmp_path, said, monkeypatch):
    """Another process may prune all the time. What only comes and goes holds up nothing."""
    monkeypatch.setattr(removal, "QUIET", 0.0)
    run = tmp_path / "run"
    guarded = seen(run, SETTINGS.changed(settle=0.2))
    monkeypatch.setattr(reconcile, "_LONGEST_GOING", 5.0)
    incidents, pin = run / "_ckptguard" / "incidents", run / "_ckptguard" / "pins" / "model-#" / "000000000100.1"
    incidents.mkdir()
    pin.mkdir(parents=True)
    held = []
    for mark in (pin / "0123abcd.json", incidents / "20261124T000000-0123abcd.0001.json"):
        before = guarded.verdicts
        save(str(run), 200 + before, before)

        def verdict_beside_loss(mark=mark, before=before):
            mark.write_text("{}")
            step(guarded)
            mark.unlink()
            step(guarded)
            held.append((mark.parent.name, guarded._notes.waited))
            return guarded.verdicts > before

        until(verdict_beside_loss, "a verdict")
    assert ("incidents", True) in held
    assert ("000000000100.1", True) not in held


def in_order_of_removal(folder: Path, rng: random.Random) -> Iterator[Path]:
    """What is below a folder as a removal reaches it: a folder after what is in it, otherwise in any order."""
    for path in sorted(folder.iterdir(), key=lambda _: rng.random()):
        if path.is_dir() and not path.is_symlink():
            yield from in_order_of_removal(path, rng)
        yield path


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_made_while_a_run_is_removed_however_slowly(tmp_path, said, monkeypatch, seed):
    """A removal in any order, with passes after each step. A folder that lost something gets nothing new."""
    for module, name in ((guarded_module, "_GOING"), (removal, "_ALONE"), (reconcile, "_GOING")):
        monkeypatch.setattr(module, name, 3600.0)
    rng, run = random.Random(seed), tmp_path / "run"
    for step_number in (100, 200, 300):
        save(str(run), step_number, step_number)
    guarded = watched(run, presence=of_this_process())
    while guarded.verdicts < 3:
        step(guarded)
    for _ in range(2):
        step(guarded)
    guarded.take("run", SETTINGS.changed(settle=3600.0), guarded.hooks)
    said.clear()
    losers: set[Path] = set()
    for path in list(in_order_of_removal(run, rng)):
        path.rmdir() if path.is_dir() else path.unlink()
        losers.add(path.parent)
        before = {folder: set(folder.iterdir()) for folder in losers if folder.exists()}
        step(guarded)
        assert {folder: set(folder.iterdir()) for folder in before} == before, path.relative_to(run)
    run.rmdir()
    assert step(guarded) == "ended"
    assert [event for level, event in said if level == "warning"] == []


def test_the_record_of_a_daemon_that_was_removed_alone_is_written_again(tmp_path, said, monkeypatch):
    """After a while, for the run may be going."""
    run = tmp_path / "run"
    save(str(run), 100, 1)
    guarded = watched(run, presence=of_this_process())
    while not guarded.verdicts:
        step(guarded)
    place = run / "_ckptguard" / "daemon.json"
    record = place.read_bytes()
    place.unlink()
    for _ in range(3):
        step(guarded)
        assert not place.exists()
    monkeypatch.setattr(removal, "_ALONE", 0.0)
    step(guarded)
    assert place.read_bytes() == record


def test_a_pass_that_cannot_write_because_a_run_goes_is_said_only_if_that_lasts(tmp_path, said, monkeypatch):
    """Whatever it wanted to write. Another cause of trouble is said at once."""
    run = tmp_path / "run"
    guarded = seen(run)
    records, troubles = str(run / "_ckptguard"), []

    def refused(*_, **__):
        troubles.append(removed(records))
        raise troubles[-1]

    said.clear()
    monkeypatch.setattr(guarded_module, "reconcile", refused)
    states = [step(guarded) for _ in range(6)]
    assert states[:3] == ["guarded"] * 3
    assert states[-1] == "failing"
    assert said == [("warning", "failing")]
    assert len(troubles) == 6
    shutil.rmtree(run)
    assert step(guarded) == "ended"


def test_incidents_that_cannot_be_recorded_because_a_run_goes_are_no_alarm(tmp_path, said, monkeypatch):
    """They are recorded later, if it stays."""
    run = tmp_path / "run"
    guarded = seen(run)
    asked = []

    def refused(*_):
        asked.append(removed(str(run / "_ckptguard")))
        raise asked[-1]

    said.clear()
    with monkeypatch.context() as going:
        going.setattr(guarded_module.MissedIncidents, "record_missed", refused)
        for _ in range(3):
            step(guarded)
    assert len(asked) == 3
    assert [event for level, event in said if level == "warning"] == []
    assert guarded.state == "guarded"


def test_a_run_without_known_good_that_stays_is_said_by_the_next_pass(tmp_path, said, monkeypatch):
    """Something went while the pass looked for the known-good, as rotation does; it stays without one."""
    run = tmp_path / "run"
    guarded = seen(run)
    save(str(run), 200, 2)

    def none_left(_):
        shutil.rmtree(run / "model-100", ignore_errors=True)
        raise NoKnownGoodError("none", hint="")

    monkeypatch.setattr(guarded_module, "find_known_good", none_left)
    said.clear()
    while guarded.verdicts < 2:
        step(guarded)
    assert ("warning", "known_good") not in said
    step(guarded)
    assert said.count(("warning", "known_good")) == 1
    step(guarded)
    assert said.count(("warning", "known_good")) == 1


def test_nothing_is_written_where_only_records_are_left(tmp_path, said):
    """A daemon that starts later sees that the run has ended, and leaves it alone."""
    run = leftovers(tmp_path / "run")
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    guarded = watched(run)
    assert [step(guarded) for _ in range(3)] == ["ended"] * 3
    assert {path: path.lstat().st_mtime_ns for path in run.rglob("*")} == before
    assert {level for level, _ in said} == {"info"}


def test_the_page_and_status_say_the_same_of_it(tmp_path):
    """The page of a run that has ended, and `ckptguard status`."""
    guarded = watched(leftovers(tmp_path / "run"))
    assert step(guarded) == "ended"
    [row] = fleet_page(CatalogueFeed(), [guarded])["runs"]
    assert row["explanation"] == status(open_view(guarded.url, SETTINGS)).explanation
    shutil.rmtree(guarded.url)
    assert step(guarded) == "ended"
    [row] = fleet_page(CatalogueFeed(), [guarded])["runs"]
    assert (row["explanation"], row["protected"]) == ("ended: it was removed", False)


def test_saves_in_a_run_that_has_ended_are_guarded(tmp_path, said):
    """It goes on with the records that are left."""
    run = leftovers(tmp_path / "run")
    guarded = watched(run)
    assert step(guarded) == "ended"
    save(str(run), 200, 2)
    assert step(guarded) == "guarded"
    assert [one.path for one in guarded.last_pass.checked] == ["model-200"]


@pytest.mark.parametrize("ended", ["while it was guarded", "before", "with its folder"])
def test_what_appears_where_a_run_had_ended_is_a_new_save(tmp_path, said, ended):
    """A healthy replay of the step, of which one number differs, with the times of the save that went."""
    run, settings = tmp_path / "run", SETTINGS
    if ended == "with its folder":
        settings = SETTINGS.changed(records=str(tmp_path / "records"))
    guarded = seen(run, settings)
    times = {path.name: path.stat().st_mtime_ns for path in (run / "model-100").iterdir()}
    shutil.rmtree(run if ended == "with its folder" else run / "model-100")
    if ended == "before":
        guarded = watched(run)
    while step(guarded) != "ended":
        pass
    save(str(run), 100, 1)
    weights = run / "model-100" / WEIGHTS
    flip(weights, -1, new_times=True)
    for name, time_ns in times.items():
        os.utime(run / "model-100" / name, ns=(time_ns, time_ns))
    while not guarded.last_pass.checked:
        step(guarded)
    assert [(str(one.id), one.outcome) for one in guarded.last_pass.checked] == [("100.2", Outcome.GOOD)]


@pytest.mark.parametrize("guards", [False, True], ids=["unguarded", "with a guard's records"])
def test_a_run_that_was_removed_and_begun_anew_between_two_passes_is_another(tmp_path, said, guards):
    """Its save of the same name and verdict is the new one for the page, with the time of it."""
    run, feed = tmp_path / "run", CatalogueFeed()
    guarded = watched(run, feed=feed)
    save(str(run), 100, 1)
    while not guarded.verdicts:
        step(guarded)
    [before] = feed.catalogue.noted(guarded.run_id).generations.values()
    run.rename(tmp_path / "aside")  # its numbers are taken
    save(str(run), 100, 2)
    saved = time.time() - 500.0
    for path in (run / "model-100").iterdir():
        os.utime(path, (saved, saved))
    if guards:
        begun = seen_by_another(run)
        assert begun.verdicts == 1
    while guarded.verdicts < 1 + (not guards):
        step(guarded)
    step(guarded)
    [row] = feed.catalogue.noted(guarded.run_id).generations.values()
    assert row.name == before.name
    assert row.outcome == before.outcome == "good"
    assert row.content != before.content
    assert row.saved_at == pytest.approx(saved)


def test_records_alone_that_were_removed_are_begun_again(tmp_path, monkeypatch, said):
    """The checkpoints stay for a while, so somebody trains there."""
    monkeypatch.setattr(guarded_module, "_GOING", 0.0)
    guarded = seen(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "_ckptguard")
    assert [step(guarded) for _ in range(3)][-1] == "guarded"
    assert (tmp_path / "run" / "_ckptguard" / "format.json").exists()


def test_a_mount_that_is_away_is_no_removal(tmp_path, monkeypatch, said):
    """Its runs are waited for, and a fleet keeps them."""
    run, fleet = tmp_path / "fleet" / "run", tmp_path / "fleet"
    save(str(run), 100, 1)
    following, run_set = followed(fleet)
    following.look()
    [guarded] = run_set
    step(guarded)
    aside = run.rename(tmp_path / "aside")
    monkeypatch.setattr(guarded, "_device_now", lambda: -1)  # another file system is there
    for _ in range(5):
        assert step(guarded) == "failing"
        following.look()
    assert [one.url for one in run_set] == [str(run)]
    assert said[-1] == ("warning", "failing")
    aside.rename(run)
    monkeypatch.undo()
    assert step(guarded) == "guarded"


def test_another_file_system_in_its_place_is_not_taken_for_the_run(tmp_path, said):
    """An empty mount point has no records, and gets none."""
    run = tmp_path / "run"
    guarded = seen(run)
    shutil.rmtree(run)
    run.mkdir()
    guarded._device = -1
    assert step(guarded) == "failing"
    assert list(run.iterdir()) == []


def followed(fleet: Path) -> tuple[RunDiscovery, RunSet]:
    """What finds the runs of a fleet."""
    rules, run_set = read_fleet(str(fleet), SETTINGS), RunSet()
    plan = DaemonPlan(urls=(), settings=SETTINGS, fleet=rules)
    following = RunDiscovery(plan, run_set, lambda found: watched(found.url), lambda run, found: None)
    return following, run_set


def test_a_fleet_shows_a_run_that_ended_for_a_day(tmp_path, said):
    """Then it forgets it, until somebody saves there again."""
    fleet = tmp_path / "fleet"
    fresh, old = leftovers(fleet / "fresh"), leftovers(fleet / "old", age=90000.0)
    following, run_set = followed(fleet)
    following.look()
    for run in run_set:
        assert step(run) == "ended"
    for _ in range(4):
        following.look()
        time.sleep(0.03)  # two intervals
    assert [run.url for run in run_set] == [str(fresh)]
    save(str(old), 200, 2)
    following.look()
    assert sorted(run.url for run in run_set) == sorted([str(fresh), str(old)])


def test_no_alert_is_about_a_run_that_has_ended():
    """Prometheus counts it, and has no other value of it."""
    facts = RunSummary(url="/runs/a", name="a", state="ended", protected=False, training=True, began_at=1.0)
    text = exposition([facts], None, 1e6).decode()
    assert "/runs/a" not in text


def test_a_run_that_went_between_the_search_and_its_first_pass_is_no_alarm(tmp_path, said):
    """A run that a search found is gone before anything was read: silence. A run that a user named is waited for."""
    for was_found in (True, False):
        run = watched(tmp_path / "gone")
        run.was_found = was_found
        assert step(run) == "waiting"
        assert said == ([] if was_found else [("warning", "waiting")])


def test_training_goes_on_without_records(tmp_path, said):
    """Somebody removes the records alone while the trainer writes its log all the time: they begin again."""
    guarded = seen(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "_ckptguard")

    def guarded_again():
        with open(tmp_path / "run" / "train.log", "a") as lines:
            lines.write("loss 1.0\n")
        return guarded.step(Work(scanner=inline)) is not None and guarded.state == "guarded"

    until(guarded_again, "a pass with new records")
    assert (tmp_path / "run" / "_ckptguard").is_dir()


def test_a_mount_that_is_away_is_no_end_of_a_run(tmp_path, said, monkeypatch):
    """With the records elsewhere, an empty mount point is no run whose saves were removed."""
    folder, settings = tmp_path / "run", SETTINGS.changed(records=str(tmp_path / "records"))
    run = seen(folder, settings)
    shutil.move(folder / "model-100", tmp_path / "away")
    honest = os.stat

    def elsewhere(place, *args, **options):
        info = honest(place, *args, **options)
        if place == str(folder):
            fields = list(info)
            fields[2] += 1
            return os.stat_result(fields)
        return info

    with monkeypatch.context() as away:
        away.setattr(os, "stat", elsewhere)
        for _ in range(2000):  # the pause between its tries doubles, up to a limit
            step(run)
        assert run.state == "failing"
        assert 0 < run.due - time.monotonic() <= 600
        assert not run._notes.gone
    shutil.move(tmp_path / "away", folder / "model-100")
    until(lambda: step(run) == "guarded", "a pass over the run")
    assert look(str(folder), settings).checkpoints
    assert open_run(str(folder), settings).records.root == str(tmp_path / "records")

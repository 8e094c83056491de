"""A folder in a run that nobody can look into: the rest is guarded, and what is in it is pending, and never gone."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.dashboard.pages import run_page
from ckptguard_daemon.metrics import exposition
from support.served_runs import watched
from support.tiny_files import content
from support.tiny_run import inline
from support.unreadable import closed, give_up_powers
from support.views import look

from ckptguard.bulk.engine import open_engine
from ckptguard.bulk.job import plan_bulk
from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.errors import CouldNotTellError, NoKnownGoodError, StoppedError, StorageError
from ckptguard.fleet import FleetRun
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.status import status
from ckptguard.records.emptied import FOLDER as EMPTIED
from ckptguard.records.run import open_run, record_names
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.retention.prune import prune
from ckptguard.runs import good_checkpoint
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import Work
from ckptguard.storage import Entry, Storage
from ckptguard.storage.failures import storage_error
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

SETTINGS = Settings(settle=0.0, scan_interval=0.01, keep="copy", keep_good=2, workers=1)
FOLDERS = ("checkpoint-{}", "out/checkpoint-{}", "{}")


class Life:
    """A run and a daemon's engine over it, which may be started again."""

    def __init__(self, root: Path, settings: Settings = SETTINGS) -> None:
        self.root, self.settings, self.memory = root, settings, root.parent / "memory"
        self.memory.mkdir(mode=0o700, exist_ok=True)
        self.logged: list[tuple[str, dict[str, object]]] = []
        self.restart()

    def restart(self) -> None:
        """A new process over the same run."""
        self.feed = CatalogueFeed(Catalogue(str(self.memory)))
        self.watched = watched(
            self.root, self.settings, log=lambda event, **fields: self.logged.append((event, fields)), feed=self.feed
        )

    def save(self, path: str, seed: int) -> None:
        """A save of two files."""
        for name, data in content(seed).items():
            place = self.root / path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)

    def passes(self, times: int = 4) -> None:
        """As many passes as surely bring all verdicts."""
        for _ in range(times):
            self.watched.step(Work(scanner=inline))
            assert self.watched.state == "guarded", self.watched.trouble

    def said(self, event: str) -> list[str]:
        """The paths or reasons of what was logged."""
        return [str(fields.get("path", fields.get("reason"))) for name, fields in self.logged if name == event]

    def outcomes(self) -> dict[str, str]:
        """What `list` says of each path in place."""
        found = survey(look(str(self.root), self.settings))
        return {one.path: "changed" if one.changed else one.outcome.value for one in found if one.in_place}

    def ledger(self, path: str) -> set[str]:
        """The names of the verdicts, of the steps that a path names."""
        return {name for name in record_names(open_run(str(self.root)), "ledger") if f"{path_step(path):012}" in name}

    def metric(self, name: str) -> float:
        """A metric of the run."""
        text = exposition([self.feed.summary(self.watched)], None, 0.0).decode()
        [line] = [one for one in text.splitlines() if one.startswith(f"ckptguard_{name}{{")]
        return float(line.rpartition(" ")[2])


def path_step(path: str) -> int:
    """The number in a path."""
    return int("".join(filter(str.isdigit, path)))


@pytest.mark.parametrize("seed", range(24))
def test_generated_runs_with_folders_that_cannot_be_read(tmp_path: Path, seed: int) -> None:
    """Whatever is closed, and when: at the start, while it is watched, over a restart. The model: what is closed is
    pending, everything else good; nothing is said to be gone or bad; once it is open again, all is as it was."""
    chance = random.Random(seed)
    life = Life(tmp_path / "run")
    shape = chance.choice(FOLDERS)
    names = [shape.format(100 * number) for number in range(1, chance.randint(3, 6))]
    for number, name in enumerate(names):
        life.save(name, number)
    judged = set(chance.sample(names, chance.randint(0, len(names))))
    aside = tmp_path / "aside"
    for name in names:  # the others come while nobody can look into some
        if name not in judged:
            shutil.move(life.root / name, aside / name)
    life.passes()
    assert set(life.outcomes()) == judged
    for name in set(names) - judged:
        shutil.move(aside / name, life.root / name)
    shut = chance.sample(names, chance.randint(1, len(names) - 1))
    before = {name: life.ledger(name) for name in shut}
    mode = chance.choice((0, 0o400, 0o100, 0o200))
    with closed(*(life.root / name for name in shut), mode=mode):
        for _ in range(chance.randint(1, 3)):
            if chance.random() < 0.4:
                life.restart()
            life.passes()
            assert life.outcomes() == {name: "pending" if name in shut else "good" for name in names}
            assert {name: life.ledger(name) for name in shut} == before
            assert life.metric("unreadable_places") == len(shut)
            pending = {one.path: one.reason for one in life.watched.last_pass.pending}
            assert set(pending) == set(shut)
            assert all("could not be read" in reason for reason in pending.values())
            shown = status(look(str(life.root), SETTINGS))
            assert set(shown.pending) == set(shut)
            assert shown.summary.unreadable == len(shut)
            best = find_known_good(open_run(str(life.root)))
            assert best.step >= max(path_step(name) for name in names if name not in shut)
            # Files whose names are on record can be looked at in a folder that may only be entered.
            assert best.kept == (best.step in map(path_step, shut) and mode != 0o100)
    life.passes()
    assert life.outcomes() == dict.fromkeys(names, "good")
    known = judged.intersection(shut)
    assert {name: life.ledger(name) for name in known} == {name: before[name] for name in known}
    assert life.metric("unreadable_places") == 0
    assert life.said("gone") == life.said("lost") == []
    noted = life.feed.catalogue.noted(life.watched.run_id)
    assert noted is not None
    assert "gone" not in {one.event.kind for one in noted.events}
    assert record_names(open_run(str(life.root)), EMPTIED) == []


@pytest.mark.parametrize("inside", ["more", "global_step100", "checkpoint-7"])
def test_a_closed_folder_inside_a_checkpoint(tmp_path: Path, inside: str) -> None:
    """Nobody knows what is in it: no verdict on the checkpoint, also after the time for unfinished ones."""
    life = Life(tmp_path / "run", SETTINGS.changed(unfinished_limit=0.0))
    for number in (1, 2):
        life.save(f"checkpoint-{number}00", number)
    (life.root / "checkpoint-200" / inside).mkdir()
    with closed(life.root / "checkpoint-200" / inside):
        life.passes()
        assert life.outcomes() == {"checkpoint-100": "good", "checkpoint-200": "pending"}
        assert life.ledger("checkpoint-200") == set()
    life.passes()
    assert life.outcomes() == {"checkpoint-100": "good", "checkpoint-200": "good"}


@pytest.mark.parametrize("restart", [False, True])
def test_a_closed_folder_around_checkpoints(tmp_path: Path, restart: bool) -> None:
    """What is on record below it is pending, and none of it is gone. What was seen to be gone stays so."""
    life = Life(tmp_path / "run")
    for number in (1, 2, 3):
        life.save(f"deep/saves/checkpoint-{number}00", number)
    life.save("checkpoint-900", 9)
    life.passes()
    shutil.rmtree(life.root / "deep/saves/checkpoint-100")
    life.passes()
    life.watched._notes.gone.clear()  # some seconds later
    life.passes()
    told = len(life.logged)
    shut = {f"deep/saves/checkpoint-{number}00" for number in (2, 3)}
    with closed(life.root / "deep"):
        if restart:
            life.restart()
        life.passes()
        assert life.outcomes() == {**dict.fromkeys(shut, "pending"), "checkpoint-900": "good"}
        assert "deep was not looked at" in " ".join(life.said("could_not_tell"))
    life.passes()
    assert life.outcomes() == {**dict.fromkeys(shut, "good"), "checkpoint-900": "good"}
    assert not [fields for event, fields in life.logged[told:] if event in ("gone", "verified", "lost")]


def test_a_fixed_name_is_known_by_its_record(tmp_path: Path) -> None:
    """A closed folder without a number is a checkpoint if it was one; else a place that is named."""
    life = Life(tmp_path / "run")
    life.save("best", 1)
    life.save("checkpoint-100", 2)
    life.passes()
    (life.root / "logs").mkdir()
    with closed(life.root / "best", life.root / "logs"):
        life.passes()
        assert life.outcomes() == {"best": "pending", "checkpoint-100": "good"}
        assert life.metric("unreadable_places") == 2
    life.passes()
    assert life.outcomes() == {"best": "good", "checkpoint-100": "good"}


def test_nothing_of_it_is_removed_or_called_bad(tmp_path: Path) -> None:
    """A bad save that is closed now is pending: prune leaves it, whatever the rules say."""
    life = Life(tmp_path / "run")
    life.save("checkpoint-100", 1)
    life.save("checkpoint-200", 2)
    life.save("checkpoint-300", 3)
    data = life.root / "checkpoint-200" / "model.safetensors"
    data.write_bytes(data.read_bytes()[:-4] + b"\xff\xff\xff\xff")
    life.passes()
    assert life.outcomes()["checkpoint-200"] == "bad"
    with closed(life.root / "checkpoint-200"):
        life.passes()
        assert life.outcomes()["checkpoint-200"] == "pending"
        done = prune(look(str(life.root), SETTINGS), Policy(keep_last=1, keep_good=1, drop_failed=True), grace=0.0)
        assert "checkpoint-200" not in {one.checkpoint.path for one in done.removed}
    assert (life.root / "checkpoint-200").is_dir()
    life.passes()
    assert life.outcomes()["checkpoint-200"] == "bad"


@pytest.mark.parametrize("keep", ["copy", "none"])
def test_known_good_and_rollback_say_what_they_passed_over(tmp_path: Path, keep: str) -> None:
    """The newest good save is closed. Its kept copy is known-good; without one an older save is, and the closed one is
    named. If nothing else is left, nobody can tell."""
    life = Life(tmp_path / "run", SETTINGS.changed(keep=keep))
    life.save("checkpoint-100", 1)
    life.save("checkpoint-200", 2)
    life.passes()
    run, view = open_run(str(life.root), life.settings), look(str(life.root), life.settings)
    with closed(life.root / "checkpoint-200"):
        answer = find_known_good(run)
        assert (answer.step, answer.kept) == ((200, True) if keep == "copy" else (100, False))
        said = known_good(life.root)
        assert ("checkpoint-200" in said.stderr) == (said.returncode == 0 and keep == "none"), said
        plan = roll_back(view, GoBack(reason="a test", dry_run=True, check_writing=False), work=Work(scanner=inline))
        assert (plan.known_good.step, plan.unverified) == ((200 if keep == "copy" else 100), ("checkpoint-200",))
        before = record_names(run, "")
        if keep == "none":  # nobody knows whether it is good, and what is in it
            with pytest.raises(CouldNotTellError, match="Nothing was moved"):
                roll_back(view, GoBack(reason="a test", check_writing=False), work=Work(scanner=inline))
            assert record_names(run, "") == before
        shutil.rmtree(life.root / "checkpoint-100")
        if keep == "none":
            with pytest.raises(CouldNotTellError):
                find_known_good(run)
            assert known_good(life.root).returncode == 1
    shutil.rmtree(life.root / "checkpoint-200")
    if keep == "none":
        with pytest.raises(NoKnownGoodError):
            find_known_good(run)


def known_good(root: Path) -> subprocess.CompletedProcess[str]:
    """What the command says, without root's powers."""
    command = [sys.executable, "-m", "ckptguard", "known-good", str(root)]
    environ = {**os.environ, "CKPTGUARD_KEEP": "none"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env=environ, preexec_fn=give_up_powers
    )


def test_all_views_name_it(tmp_path: Path) -> None:
    """The log once, the page, `verify` of the run, and its exit code."""
    life = Life(tmp_path / "run")
    life.save("checkpoint-100", 1)
    life.save("checkpoint-200", 2)
    with closed(life.root / "checkpoint-200"):
        life.passes()
        told = [reason for reason in life.said("could_not_tell") if "checkpoint-200" in reason]
        assert len(told) == 1
        assert life.said("pending") == ["checkpoint-200"]
        page = json.loads(json.dumps(run_page(life.feed, life.watched)))
        assert "checkpoint-200" in " ".join(page["could_not_tell"])
        listed = look(str(life.root), SETTINGS).listing
        assert [note for note in listed.unread_notes if "checkpoint-200" in note and "denied" in note]
        assert life.outcomes()["checkpoint-100"] == Outcome.GOOD.value


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.ESTALE, None])
def test_what_is_wrong_with_the_machine_is_not_an_unreadable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    """Then nobody knows what is known-good, and no older save is the answer."""
    life = Life(tmp_path / "run", SETTINGS.changed(keep="none"))
    for number in (1, 2):
        life.save(f"checkpoint-{number}00", number)
    life.passes()
    real = good_checkpoint.find_entry

    def find(storage: Storage, key: str) -> Entry | None:
        if "checkpoint-200" not in key:
            return real(storage, key)
        if error is None:
            raise StoppedError("it was stopped", key=key)
        cause = OSError(error, os.strerror(error))
        raise storage_error(cause, key, str(life.root)) from cause

    monkeypatch.setattr(good_checkpoint, "find_entry", find)
    with pytest.raises(StorageError):
        find_known_good(open_run(str(life.root)))


def test_a_job_over_a_fleet_says_what_it_could_not_look_at(tmp_path: Path) -> None:
    """Neither is a checkpoint with a closed part settled, nor is a closed place left out."""
    life = Life(tmp_path / "run")
    for number in (1, 2):
        life.save(f"checkpoint-{number}00", number)
    life.passes()
    inside, beside = life.root / "checkpoint-200" / "more", life.root / "deep"
    inside.mkdir()
    beside.mkdir()
    with closed(inside, beside):
        run = FleetRun(url=str(life.root), name="run", settings=life.settings)
        with open_engine("threads", 1) as engine:
            plan = plan_bulk(engine, "verify", [run])
        assert [task.path for task in plan.tasks] == ["checkpoint-200"]
        assert dict(plan.done.outcomes) == {"good": 1}
        assert "deep was not looked at" in " ".join(plan.done.could_not_tell)


def test_saves_without_a_verdict_below_a_closed_folder_are_not_gone(tmp_path: Path) -> None:
    """Nobody saw them go, so nothing is lost."""
    life = Life(tmp_path / "run", SETTINGS.changed(settle=60.0))
    life.save("checkpoint-100", 1)
    life.save("deep/checkpoint-100", 2)
    life.passes()
    with closed(life.root / "deep"):
        life.passes()
    assert life.said("gone") == life.said("lost") == []


def test_a_training_at_another_mount_than_an_earlier_process_saw_is_guarded(tmp_path: Path) -> None:
    """An empty folder may be a mount that is away. Saves in it are a training."""
    life = Life(tmp_path / "run")
    life.root.mkdir()
    life.watched.was_on = "/another/mount"
    life.watched.step(Work(scanner=inline))
    assert (life.watched.state, life.watched.is_away) == ("failing", True)
    life.save("checkpoint-100", 1)
    life.passes()
    assert life.outcomes() == {"checkpoint-100": "good"}

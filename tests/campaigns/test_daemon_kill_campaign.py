"""kill -9 of a daemon over 20 runs at random moments: no save is left without a verdict, and nothing is done twice."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess, save, until
from support.hook_commands import toml

from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.manifests import sealed_generations
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history

RUNS = 20
KILLS = 200 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 6
SAVES = 8  # between two kills


def verdicts_of(run: Path) -> list[str]:
    """The names of all verdicts on a run. What a killed process left is none."""
    named = load_history(open_run(str(run))).names.values()
    return [name for names in named for name in names if not name.startswith(".tmp-")]


def incidents_of(run: Path) -> list[Incident]:
    """All incidents on record of a run."""
    return list_incidents(open_run(str(run)))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_nothing_is_lost_and_nothing_is_done_twice(tmp_path: Path, short_folder: Path) -> None:
    """Saves arrive in all runs all the time, some of them bad. In the end each has one manifest and one verdict, and
    each bad one has one incident. The replicas have what is good, and each run's newest good save is known."""
    chance = random.Random(14)
    runs = [tmp_path / f"run-{number:02}" for number in range(RUNS)]
    saved: dict[Path, dict[int, bool]] = {run: {} for run in runs}  # step -> is it bad
    for run in runs:
        run.mkdir()
    settings = toml(tmp_path, replicas=[str(tmp_path / "elsewhere" / "{run}")], keep_good=1)
    for kill in range(KILLS + 1):
        daemon = DaemonProcess(short_folder, *runs, arguments=settings)
        try:
            for _ in range(SAVES):
                run, nan = chance.choice(runs), chance.random() < 0.2
                step = len(saved[run]) + 1
                saved[run][step] = nan
                save(run, step, nan=nan)
            if kill == KILLS:
                await_the_end(saved, tmp_path / "elsewhere")
                assert daemon.stop() == 0
            else:
                left = sum(map(len, saved.values())) - sum(len(verdicts_of(run)) for run in runs)
                await_verdicts(daemon, chance.randint(0, min(left, 2 * SAVES)))
                threading.Event().wait(chance.uniform(0.0, 0.2))
        except AssertionError:
            print(daemon.log_path.read_text())
            raise
        finally:
            daemon.kill()
    for run, steps in saved.items():
        check(run, steps, tmp_path / "elsewhere" / run.name)


def await_verdicts(daemon: DaemonProcess, count: int) -> None:
    """Return when a daemon has given this number of verdicts."""

    def given() -> bool:
        assert daemon.process.poll() is None, "the daemon ended"
        return sum(line["event"] == "verified" for line in daemon.log_lines()) >= count

    until(given, f"{count} verdicts")


def await_the_end(saved: dict[Path, dict[int, bool]], replicas: Path) -> None:
    """Return when there is nothing left to do. It may take long, but something must happen all the time."""

    def done() -> int:
        counts = (
            len(verdicts_of(run)) + len(list((replicas / run.name).glob("net-*"))) + len(incidents_of(run))
            for run in saved
        )
        return sum(counts)

    wanted = 2 * sum(map(len, saved.values()))  # each has a verdict, and a copy or an incident
    while (before := done()) < wanted:
        until(lambda before=before: done() > before, f"more than {before} of {wanted} verdicts, copies and incidents")


def check(run: Path, steps: dict[int, bool], replica: Path) -> None:
    """One run and its replica, in the end."""
    opened = open_run(str(run))
    names = sorted(verdicts_of(run))
    assert len(names) == len(steps), names
    assert sum("bad" in name for name in names) == sum(steps.values())
    assert sum("good" in name for name in names) == len(steps) - sum(steps.values())
    manifests = sealed_generations(opened, "net-#.safetensors")
    assert sorted((id.step, id.generation) for id in manifests) == [(step, 1) for step in sorted(steps)]
    bad = [step for step, nan in steps.items() if nan]
    assert sorted(incident.step or 0 for incident in incidents_of(run)) == sorted(bad)
    good = [step for step, nan in steps.items() if not nan]
    if good:
        assert find_known_good(opened).step == max(good)
        assert find_known_good(open_run(str(replica))).step == max(good)
        assert sorted(p.name for p in replica.glob("net-*")) == sorted(f"net-{step}.safetensors" for step in good)

"""Removing a run works beside whatever of ours writes into it, and is the end of it.

The long form: 24 runs, one second apart, three times, by ``rm -rf`` and by ``shutil.rmtree``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from support.crashes import CALLS
from support.daemon_process import Starter, until
from support.tiny_run import TINY, inline, opened, save
from support.views import look

from ckptguard.errors import CkptguardError
from ckptguard.runs.work import Work
from ckptguard.storage.local import removal
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile

Remove = Callable[[Path], str | None]


def by_rm(run: Path) -> str | None:
    """Remove a run by `rm -rf`; what it said if it failed."""
    done = subprocess.run(["rm", "-rf", str(run)], capture_output=True, text=True, check=False)
    return done.stderr or str(done.returncode) if done.returncode else None


def by_rmtree(run: Path) -> str | None:
    """Remove a run as a trainer does that begins again; what it said if it failed."""
    try:
        shutil.rmtree(run)
    except OSError as error:
        return str(error)
    return None


class Removals(msgspec.Struct):
    """What came of removing runs."""

    runs: int = 0
    failed: list[str] = []
    left: list[str] = []
    messages: list[str] = []


def removal_steps(run: Path, first: str, begun: bool = False) -> Generator[None, None, bool]:
    """Remove a run as ``rm -rf`` does, one call of the system at a time; OSError where that would fail.

    The names in a folder are read before any of them is removed, and the folder itself is removed last. What has the
    name `first` comes first. Nobody can see that names are read: until something was removed (`begun`), it is no step.
    """
    try:
        names = sorted(os.listdir(run), key=lambda name: (name != first, name))
    except FileNotFoundError:
        return begun
    if begun:
        yield
    for name in names:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            begun = yield from removal_steps(path, first, begun)
        else:
            path.unlink(missing_ok=True)
            begun = True
            yield
    with contextlib.suppress(FileNotFoundError):
        run.rmdir()
    yield
    return True


FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
RUNS, ROUNDS, APART = (24, 3, 1.0) if FULL else (6, 1, 0.3)

LAST = f"model-{range(200, 200 + int(APART * 1000), 50)[-1]}"


@pytest.mark.campaign
@pytest.mark.skipif(not FULL, reason="five minutes; CKPTGUARD_CAMPAIGN=full runs it")
@pytest.mark.parametrize("remove", [by_rm, by_rmtree])
@pytest.mark.parametrize("replicated", [False, True], ids=["alone", "replicated"])
def test_runs_are_removed_beside_a_fleet_daemon(tmp_path: Path, start: Starter, remove, replicated) -> None:
    """After saves that were verified, copied and replicated: every removal works, nothing is left, and nothing is
    said. In the long form saves are made until just before, and a removal may rarely have to be tried again."""
    found, fleet = Removals(), tmp_path / "fleet"
    fleet.mkdir()
    file = tmp_path / "fleet.toml"
    lines = [f'folders = ["{fleet}"]', "[settings]", f'replicas = ["{tmp_path}/copies/{{run}}"]']
    file.write_text("\n".join(lines if replicated else lines[:1]))
    daemon = start(arguments=("--fleet", str(file)))
    for number in range(ROUNDS):
        runs = [fleet / f"run{number}-{n}" for n in range(RUNS)]
        for seed, run in enumerate(runs):
            save(str(run), 100, seed)
        for run in runs:
            until(lambda run=run: _verified(daemon, run), f"a verdict in {run}")
        for run in runs:
            _train(run, APART)
            found.runs += 1
            if not FULL:  # one that is written to at that very moment may have to be removed twice
                until(lambda run=run: _verified(daemon, run, LAST), f"the last verdict in {run}")
                _rest(run)
            if said := remove(run):
                found.failed.append(said)
                assert remove(run) is None
        for run in runs:
            daemon.logged("run_left", run=str(run))
        found.left += [path.name for path in fleet.iterdir()]
    found.messages += [str(line) for line in daemon.log_lines() if line["level"] != "info"]
    assert daemon.stop() == 0
    print(f"{found.runs} removals, tried again: {found.failed}")
    # Nothing can exclude that a name comes or goes between a removal's reading of a folder and its first unlink.
    assert len(found.failed) <= (found.runs // 36 if FULL else 0), found.failed
    assert (found.left, found.messages) == ([], [])


def _verified(daemon, run: Path, path: str | None = None) -> bool:
    lines = [line for line in daemon.log_lines() if line["event"] == "verified" and line["run"] == str(run)]
    return any(path in (None, line["path"]) for line in lines)


def _rest(run: Path) -> None:
    """Return when the daemon has written and removed nothing in a run for a while."""
    before: list[Path] = []
    while before != (before := sorted(run.rglob("*"))):
        threading.Event().wait(0.7)


def _train(run: Path, seconds: float) -> None:
    """Save again and again, until just before the removal."""
    for step in range(200, 200 + int(seconds * 1000), 50):
        save(str(run), step, step)
        threading.Event().wait(0.04)


def _passes(run: Path) -> None:
    """What a daemon does after two saves, whatever it meets."""
    try:
        opened_run = opened(str(run))
        reconcile(look(opened_run, TINY), PassNotes(), work=Work(scanner=inline), assume_quiet=True)
    except CkptguardError:
        pass


@pytest.mark.campaign
@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("first", ["kept", "ledger", "_ckptguard", "model-100"] if FULL else ["kept"])
def test_every_interleaving_of_a_removal_and_a_pass_ends_without_the_run(tmp_path: Path, first):
    """A removal that begins before any event of a pass, and goes so many steps at each."""
    number, interleavings, met, left = 0, 0, True, []
    while met:
        number, met = number + 1, False
        for steps in (1, 2, 3, 5, 8, 13, 21, 34, 1000) if FULL else (1 + number % 7, 1000):
            run = tmp_path / f"run{number}-{steps}"
            for step in (100, 200):
                save(str(run), step, step)
            _passes(run)
            save(str(run), 300, 300)
            try:
                met = _interleaved(run, number, steps, first) or met
            except OSError as error:
                left.append((number, steps, str(error)))
                met = True
            interleavings += 1
            if run.exists():
                left.append((number, steps, "came back"))
                shutil.rmtree(run)
    assert not left, f"(before event, steps at each, why): {left}"
    print(f"{interleavings} interleavings")
    assert interleavings > 100


def _interleaved(run: Path, number: int, steps: int, first: str) -> bool:
    """Make a pass; the removal begins right before the n-th event, and goes on at each. An event is an operation of the
    storage, or a look of ours at what others do, or a wait for them. Returns whether the pass came to that event."""
    removing, count = removal_steps(run, first), [0]
    waited = [0.0]
    failed: list[OSError] = []

    def go() -> None:
        count[0] += 1
        if count[0] >= number:
            try:
                for _ in range(steps):
                    next(removing, None)
            except OSError as error:
                failed.append(error)

    def wait(_: float) -> None:
        waited[0] += 0.005 if count[0] >= number else 1.0  # it is over before we give up waiting
        if count[0] >= number:
            go()

    def before(real):
        def call(*arguments, **named):
            go()
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (*((LocalStorage, name) for name in CALLS), (removal, "_is_whole"), (removal, "_seen")):
            patch.setattr(owner, name, before(getattr(owner, name)))
        patch.setattr(removal, "QUIET", 3600.0)  # however slow this machine is
        patch.setattr(removal, "time", SimpleNamespace(time=time.time, monotonic=lambda: waited[0], sleep=wait))
        _passes(run)
    for _ in removing:
        pass
    if failed:
        raise failed[0]
    return count[0] >= number


def test_a_run_made_again_is_a_new_one(tmp_path: Path, start: Starter) -> None:
    """The daemon guards it as any new run, and no old verdict counts."""
    run = tmp_path / "run"
    save(str(run), 100, 1)
    daemon = start(run)
    assert daemon.outcome(100) == "good"
    shutil.rmtree(run)
    daemon.logged("ended", run=str(run))
    save(str(run), 100, 2)
    until(lambda: [n["event"] for n in daemon.log_lines()].count("verified") == 2, "a second verdict")
    assert [line["id"] for line in daemon.log_lines() if line["event"] == "verified"] == ["100.1", "100.1"]
    assert [line for line in daemon.log_lines() if line["level"] != "info"] == []

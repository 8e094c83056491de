"""Trainers as processes: each a script that saves and resumes by its own rule, and what must hold of any of them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import click.testing
import pytest

from ckptguard.cli.entry import commands
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import Run, open_run
from ckptguard.runs.history import load_history
from ckptguard.values.verdict import Outcome
from support.daemon_process import DaemonProcess, flip_bit
from support.forked import LIGHTNING, TORCH, Forked

SCRIPTS = Path(__file__).resolve().parent.parent / "trainers" / "scripts"
PACKAGES = os.environ.get("CKPTGUARD_TRAINERS")  # where tests/trainers/requirements.txt is installed
PATIENCE = 280.0  # the tests themselves end sooner


class Trainer(NamedTuple):
    """A trainer. `resumes_from`: what its own resume reads, by patterns, of which each is flipped and named."""

    script: str
    resumes_from: tuple[str, ...]
    needs: tuple[str, ...] = ()  # packages
    named: bool = False  # a user may name the checkpoint to resume from
    saves: int = 4
    run: str = "run"  # below the folder that it is started in

    def elsewhere(self) -> str | None:
        """The folder of packages that this one needs, and that would be in the way of others; None if it needs none."""
        return PACKAGES if any(importlib.util.find_spec(name) is None for name in self.needs) else None

    def skip_unless_there(self) -> None:
        """Skip the test where a package is missing."""
        places = [*sys.path, *([PACKAGES] if PACKAGES else [])]
        if any(importlib.machinery.PathFinder.find_spec(name, places) is None for name in self.needs):
            pytest.skip(f"needs {', '.join(self.needs)}: see tests/trainers/requirements.txt")


class Line(NamedTuple):
    """A line of a trainer's log: it `started` after so many saves, or `saved` the n-th."""

    what: str
    counter: int
    sum: str  # of the weights
    finite: bool
    paths: list[str]


class Training:
    """One run of a trainer, below a folder of its own."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.run = folder / trainer.run
        self.argv = [sys.executable, str(SCRIPTS / trainer.script), str(self.run)]

    def environment(self, *, last: int, **more: object) -> dict[str, str]:
        """What a process of it is given."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTGUARD_", "TRAINER_"))}
        own = {f"TRAINER_{name.upper()}": str(value) for name, value in {"last": last, **more}.items()}
        path = os.pathsep.join(filter(None, (str(SCRIPTS), kept.get("PYTHONPATH"), self.trainer.elsewhere())))
        return {**kept, **own, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}

    def train(self, *, last: int, **more: object) -> None:
        """Start it and wait for its end."""
        environment = self.environment(last=last, **more)
        if self.trainer.elsewhere() is not None:
            self.to_its_end(self.argv, environment)
            return
        script, given = Path(self.argv[1]), {"environment": environment, "cwd": self.folder}
        modules = LIGHTNING if "lightning" in self.trainer.needs else TORCH
        code = script.read_text(encoding="utf-8")
        with Forked(code, self.run, name=str(script), path=(str(SCRIPTS),), imported=modules, **given) as process:
            said = process.communicate(PATIENCE)
            assert process.returncode == 0, f"{script.name} ended with {process.returncode}:\n{said}\n{self.lines}"

    def under_supervision(self, *, last: int, poison: int) -> str:
        """Start it under ``ckptguard supervise`` and wait for its end: what that said."""
        command = [sys.executable, "-m", "ckptguard", "supervise", str(self.run), "--", *self.argv]
        quick = {"CKPTGUARD_SETTLE": "0", "CKPTGUARD_SCAN_INTERVAL": "0.05"}
        return self.to_its_end(command, self.environment(last=last, poison=poison) | quick)

    def to_its_end(self, command: list[str], environment: dict[str, str]) -> str:
        """Run a command, which must end well; none of it outlives the test."""
        said = self.folder / "said"
        with said.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )
        try:
            code: int | str = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = "no end"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = said.read_text(encoding="utf-8")
        assert code == 0, f"{command} ended with {code}:\n{text[-6000:]}\n{self.lines}"
        return text

    @property
    def lines(self) -> list[Line]:
        """What it has told so far."""
        log = Path(f"{self.run}.log")
        return (
            [Line(**json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
        )

    def told(self, what: str) -> list[Line]:
        """Its starts, or its saves."""
        return [line for line in self.lines if line.what == what]

    @property
    def opened(self) -> Run:
        """The run, as our code opens it."""
        return open_run(str(self.run))

    def copied(self, folder: Path) -> Training:
        """A copy with all that it needs to go on; its times are kept."""
        shutil.copytree(self.folder, folder, symlinks=True, ignore=lambda _, names: [n for n in names if n == "d.sock"])
        return Training(self.trainer, folder)

    def files(self) -> list[Path]:
        """What lies there that its own resume reads."""
        return sorted(path for pattern in self.trainer.resumes_from for path in self.run.glob(pattern))


class TrainerContract:
    """The tests of a trainer; the module that inherits them says which it is in TRAINER."""

    def test_all_saves_are_found_in_order_and_good(self, trained):
        """Beside a daemon: each save of each path has one verdict, GOOD, in the order of saving, and no alarm."""
        history = load_history(trained.opened)
        saved: defaultdict[str, list[str]] = defaultdict(list)
        found: defaultdict[str, list[str]] = defaultdict(list)
        times = {}
        for series in history.names:
            standings = sorted(history.standings(series).values(), key=lambda standing: standing.id.order)
            for standing in standings:
                manifest = history.manifest(standing.id)
                assert manifest is not None
                assert standing.outcome is Outcome.GOOD, (manifest.path, history.verdict(standing.id))
                found[series].append(manifest.path)
                times[manifest.path] = series
        for line in trained.told("saved"):
            for path in line.paths:
                saved[times.get(path, path)].append(path)
        assert found == saved
        assert list_incidents(trained.opened) == []

    def test_the_known_good_one_is_what_was_saved_last(self, trained, tmp_path):
        """Nothing is wrong: known-good is a save of the last time that it saved, and a rollback changes nothing."""
        training = trained.copied(tmp_path / "copy")
        ask("verify", training.run)
        path = ask("known-good", training.run)["path"]
        last = [line for line in training.told("saved") if line.counter == training.trainer.saves]
        newest = {name for line in last for name in line.paths}
        assert Path(path).relative_to(training.run).as_posix() in newest
        before = contents(training.run)
        ask("rollback", training.run, "--force")
        assert contents(training.run) == before

    def test_poisoned_under_supervision_it_ends_finite_and_never_begins_again(self, training):
        """The saves turn NaN: that is noticed, it goes back, resumes from what was good, and ends well."""
        last, poison = training.trainer.saves, training.trainer.saves - 1
        said = training.under_supervision(last=last, poison=poison)
        starts, saves = training.told("started"), training.told("saved")
        assert [start.counter for start in starts] == [0, poison - 1], said
        assert starts[-1].finite
        good = [line for line in saves if line.counter == poison - 1]
        assert starts[-1].sum in {line.sum for line in good}
        assert saves[-1].counter == last
        assert saves[-1].finite
        incidents = [i for i in list_incidents(training.opened) if i.cause == "numeric"]
        assert [(i.source, i.state) for i in incidents] == [("supervise", "closed")], said
        training.train(last=last + 1, waits=0)  # its own resume finds what was saved last
        start = training.told("started")[-1]
        assert (start.counter, start.sum) == (last, saves[-1].sum)

    def test_a_flipped_bit_is_named(self, trained, tmp_path):
        """In each file that its own resume reads: BAD, and the file is named."""
        training = trained.copied(tmp_path / "copy")
        ask("verify", training.run)
        assert training.files()
        for path in training.files():
            flip_bit(path, -path.stat().st_size // 2)
            bad = [c for c in ask("verify", training.run, code=3)["checkpoints"] if c["outcome"] == "bad"]
            own = path.relative_to(training.run).as_posix()
            named = {f["file"] for c in bad for f in c["findings"]}
            assert own in named or any(own == c["path"] or own.startswith(f"{c['path']}/") for c in bad), (own, bad)
            assert own in named or any(f["tensor"] for c in bad for f in c["findings"]), (own, bad)
            flip_bit(path, -path.stat().st_size // 2)
            ask("verify", training.run)

    def test_after_a_rollback_its_own_resume_loads_what_was_good(self, trained, tmp_path):
        """All that it would resume from is damaged: a rollback gives it what was good, under its names."""
        training = trained.copied(tmp_path / "copy")
        for path in training.files():
            flip_bit(path, -path.stat().st_size // 2)
        ask("verify", training.run, code=3)
        ask("rollback", training.run, "--force")
        self.see_it_resume(training)

    def test_its_own_resume_loads_what_is_restored(self, trained, tmp_path):
        """Elsewhere: it trains on from there, from the weights that were saved."""
        other = Training(trained.trainer, tmp_path / "other")
        other.folder.mkdir()
        given = ask("restore", trained.run, "--to", other.run)
        shutil.copy(f"{trained.run}.log", f"{other.run}.log")
        self.see_it_resume(other, **({"from": given["path"]} if trained.trainer.named else {}))

    def see_it_resume(self, training: Training, **more: object) -> None:
        """Its own resume starts with weights of a save of its own, under that save's number, and saves once more."""
        sums = Counter((line.counter, line.sum) for line in training.told("saved"))
        training.train(last=training.trainer.saves + 1, waits=0, **more)
        start = training.told("started")[-1]
        assert start.counter > 0
        assert sums[start.counter, start.sum] > 0, training.lines
        assert training.lines[-1].counter == training.trainer.saves + 1


def ask(command: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """The document of a command of ours, which ends with this code; files written a moment ago count as quiet."""
    argv = [command, *map(str, arguments), "--json"]
    done = click.testing.CliRunner(env={"CKPTGUARD_SETTLE": "0"}).invoke(commands, argv, prog_name="ckptguard")
    assert done.exit_code == code, f"{argv} ended with {done.exit_code}:\n{done.output}"
    return cast("dict[str, Any]", json.loads(done.stdout))


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run but our records."""
    files = (path for path in sorted(run.rglob("*")) if path.is_file())
    names = {path.relative_to(run): path for path in files}
    return {str(name): path.read_bytes() for name, path in names.items() if name.parts[0] != "_ckptguard"}


def train_beside_daemon(trainer: Trainer, folder: Path) -> Training:
    """A run from beginning to end, with a daemon that judges each save before the next one is made."""
    training = Training(trainer, folder)
    training.run.mkdir(parents=True)
    daemon = DaemonProcess(folder, training.run)
    try:
        training.train(last=trainer.saves)
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    return training

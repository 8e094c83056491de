"""Trainers as processes: each a script that saves and resumes by its own rule, and what must hold of any of them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import click.testing
import pytest

from ckptguard.cli.entry import commands
from ckptguard.records.run import Run, open_run
from support.daemon_process import DaemonProcess
from support.forked import LIGHTNING, TORCH, Forked

SCRIPTS = Path(__file__).resolve().parent.parent / "trainers" / "scripts"
PACKAGES = os.environ.get("CKPTGUARD_TRAINERS")  # where tests/trainers/requirements.txt is installed
PATIENCE = 280.0  # the tests themselves end sooner


class Trainer(NamedTuple):
    """A trainer: its `script`, and by patterns what its own resume reads, of which each is flipped and named."""

    script: str
    resumes_from: tuple[str, ...]
    weights: tuple[str, ...] = ()  # what `known-good` may print, where some of what is read holds no weights
    parts: tuple[str, ...] = ()  # that can be poisoned each by itself
    needs: tuple[str, ...] = ()  # packages
    named: bool = False  # a user may name the checkpoint to resume from
    forgets: bool = False  # it begins from scratch where the user names no checkpoint
    keep: int = 0  # saves that stay, where the user removes the oldest; 0 where the trainer sees to it
    saves: int = 4
    run: str = "run"  # below the folder that it is started in
    always: bool = False  # with all other tests

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
    sum: str  # of its state: all that was saved, or that its own resume read
    finite: bool
    paths: list[str]
    parts: dict[str, str]  # the sum of each part of the state
    files: dict[str, str]  # the MD5 of each file of a save
    writes: int  # files that were written one after the other


class Training:
    """One run of a trainer, below a folder of its own."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.run = folder / trainer.run
        self.argv = [sys.executable, str(SCRIPTS / f"{trainer.script}.py"), str(self.run)]

    def environment(self, *, last: object, **more: object) -> dict[str, str]:
        """What a process of it is given."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
        given = {"last": last, "keep": self.trainer.keep, "start": len(self.told("started")), **more}
        own = {f"TRAINER_{name.upper()}": str(value) for name, value in given.items()}
        path = os.pathsep.join(filter(None, (str(SCRIPTS), kept.get("PYTHONPATH"), self.trainer.elsewhere())))
        return {**kept, **own, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}

    def train(self, *, last: int, **more: object) -> None:
        """Start it and wait for its end."""
        self.start_and_wait(last=last, **more)

    def train_until_killed(self, *, last: int, write: int) -> None:
        """Start it, and let it die in the middle of this write."""
        self.start_and_wait(last=last, waits=0, kill=write, code=-signal.SIGXFSZ)

    def start_and_wait(self, *, code: int = 0, **more: Any) -> None:
        """Start it and wait for its end with this code."""
        environment = self.environment(**more)
        if self.trainer.elsewhere() is not None:
            self.to_its_end(self.argv, environment, code)
            return
        script, given = Path(self.argv[1]), {"environment": environment, "cwd": self.folder}
        modules = LIGHTNING if "lightning" in self.trainer.needs else TORCH
        text = script.read_text(encoding="utf-8")
        with Forked(text, self.run, name=str(script), path=(str(SCRIPTS),), imported=modules, **given) as process:
            said = process.communicate(PATIENCE)
            assert process.returncode == code, f"{script.name} ended with {process.returncode}:\n{said}\n{self.lines}"

    def daemon(self, **settings: str) -> DaemonProcess:
        """A daemon beside it, which can read what it writes."""
        return DaemonProcess(self.folder, self.run, **self.reading(), **settings)

    def reading(self) -> dict[str, str]:
        """What a process of ours needs in its environment to read what this trainer writes."""
        elsewhere = self.trainer.elsewhere()
        return {} if elsewhere is None else {"PYTHONPATH": elsewhere}

    def under_supervision(self, *, code: int = 0, **more: object) -> str:
        """Start it under ``ckptguard supervise`` and wait for its end with this code: what that said."""
        command = [sys.executable, "-m", "ckptguard", "supervise", str(self.run), "--", *self.argv]
        quick = {"CKPTGUARD_SETTLE": "0", "CKPTGUARD_SCAN_INTERVAL": "0.05"}
        return self.to_its_end(command, self.environment(is_stopped=1, **more) | quick, code)

    def to_its_end(self, command: list[str], environment: dict[str, str], wanted: int = 0) -> str:
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
        assert code == wanted, f"{command} ended with {code}:\n{text[-6000:]}\n{self.lines}"
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

    def ask(self, command: str, *arguments: object, code: int = 0, settle: float = 0) -> dict[str, Any]:
        """The document of a command of ours on the run, which ends with this code; files that did not change for so
        long count as quiet."""
        argv = [command, str(self.run), *map(str, arguments), "--json"]
        environment = {"CKPTGUARD_SETTLE": f"{settle}", **self.reading()}
        done = click.testing.CliRunner(env=environment).invoke(commands, argv, prog_name="ckptguard")
        assert done.exit_code == code, f"{argv} ended with {done.exit_code}:\n{done.output}"
        return cast("dict[str, Any]", json.loads(done.stdout))

    def unchanged_for(self) -> float:
        """The seconds since anything below the run changed."""
        return time.time() - max(path.lstat().st_ctime for path in (self.run, *self.run.rglob("*")))

    def newest_whole(self) -> int:
        """The last save whose numbers were finite and of which every file still lies anywhere below the run."""
        found = {md5_of(path) for path in self.run.rglob("*") if path.is_file()}
        whole = [n for n in self.told("saved") if n.finite and found.issuperset(n.files.values())]
        return max((line.counter for line in whole), default=0)

    def resume(self, *, at_least: int, **more: object) -> None:
        """Its own resume starts with all parts of one save of its own that is finite and no older than this one, under
        that save's number; and it saves once more."""
        saves = {line.sum: line for line in self.told("saved")}
        last = max(line.counter for line in saves.values()) + 2
        self.train(last=last, waits=0, **more)
        start = self.told("started")[-1]
        made_of = {
            part: [n.counter for n in saves.values() if n.parts.get(part) == s] for part, s in start.parts.items()
        }
        assert start.sum in saves, f"it resumes from a mix, each part of these saves: {made_of}"
        assert saves[start.sum].finite, f"it resumes from NaN, of save {saves[start.sum].counter}"
        assert start.counter in {n.counter for n in self.told("saved") if n.sum == start.sum}, (start, made_of)
        assert start.counter >= at_least, f"save {at_least} is whole and finite, and it resumes from {start.counter}"
        assert self.lines[-1].counter == last


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run but our records."""
    files = (path for path in sorted(run.rglob("*")) if path.is_file())
    names = {path.relative_to(run): path for path in files}
    return {str(name): path.read_bytes() for name, path in names.items() if name.parts[0] != "_ckptguard"}


def train_beside_daemon(trainer: Trainer, folder: Path) -> Training:
    """A run from beginning to end, with a daemon that judges each save before the next one is made."""
    training = Training(trainer, folder)
    training.run.mkdir(parents=True)
    daemon = training.daemon()
    try:
        training.train(last=trainer.saves)
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    return training


def md5_of(path: Path) -> str:
    """The MD5 of a file."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()

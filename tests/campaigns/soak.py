"""A soak: one fleet daemon over many runs for hours, while runs are removed and moved, disks fill up, and it is killed.

    .venv/bin/python tests/campaigns/soak.py --minutes 120 --runs 100 [--seed 20] [--folder DIR]

One process simulates all trainers. It knows each byte that they wrote, and which saves are good. What it finds wrong is
printed with its class, then a summary in JSON. It ends with 1 if anything was wrong. The same seed makes the same
choices; when they happen depends on the machine. Runs on full disks need root, for a small tmpfs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from soak_trainers import KINDS, Files, Steps, Trainer, add_user_files, digest, digest_of
from support.daemon_process import DaemonProcess, request, until

SETTLE, INTERVAL = 1.0, 5.0
UNFINISHED = 60.0
DISK = 24 << 20  # bytes of a small disk
SMALL, LARGE = 2048, 1 << 17  # floats of a save: on the common disk, on a small one
PATIENCE = 120.0  # a verdict takes longer only if it never comes
_TICKS = os.sysconf("SC_CLK_TCK")
GOOD, SICK, CUT, ROTTEN, HALF = "good", "sick", "cut", "rotten", "half"
FIRST = "half, and the first"  # weights without an optimizer may be all that a run saves, until it saved more
EXPECTED = {GOOD: {"good"}, SICK: {"bad"}}  # a save of another kind is never good, but a rotten one was


def below(folder: Path) -> list[Path]:
    """Everything below a folder. What is removed meanwhile is left out, and is no error."""
    return [Path(top, name) for top, folders, files in os.walk(folder) for name in (*folders, *files)]


@dataclass(frozen=True)
class Plan:
    """What a soak does. `pace` is how many saves are begun a second, in all runs together."""

    folder: Path
    minutes: float
    runs: int
    seed: int = 20
    disks: int = 3
    pace: float = 1.0


@dataclass
class Report:
    """What was done, what was wrong, and what the daemon cost."""

    plan: Plan
    began: float = field(default_factory=time.monotonic)
    actions: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    logged: Counter[str] = field(default_factory=Counter)
    figures: dict[str, Any] = field(default_factory=dict)

    def violation(self, kind: str, text: str) -> None:
        """Something is not as it must be."""
        self.wrong[kind].append(f"at {time.monotonic() - self.began:.1f} s of seed {self.plan.seed}: {text}")
        print(f"WRONG {kind} {self.wrong[kind][-1]}", flush=True)

    def summary(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "repeat": f"soak.py --minutes {self.plan.minutes:g} --runs {self.plan.runs} --seed {self.plan.seed}",
            "actions": dict(sorted(self.actions.items())),
            "wrong": {kind: len(texts) for kind, texts in sorted(self.wrong.items())},
            "logged": dict(sorted(self.logged.items())),
            **self.figures,
        }


class Disk:
    """A place for runs. A small one can be full."""

    def __init__(self, root: Path, *, small: bool) -> None:
        self.root, self.small = root, small
        self.runs, self.parked = root / "runs", root / "parked"
        self.full_since: float | None = None
        self.trouble_until = 0.0  # sentences about missing room are right until then
        root.mkdir(parents=True, exist_ok=True)
        if small:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "ckptguard-soak", str(root)], check=True)
        for folder in (self.runs, self.parked):
            folder.mkdir()

    def free(self) -> int:
        """Bytes that can be written."""
        state = os.statvfs(self.root)
        return state.f_bavail * state.f_frsize

    def fill(self, leave: int) -> None:
        """Have so many bytes left."""
        with (self.root / "ballast").open("ab") as file, contextlib.suppress(OSError):
            left = max(0, self.free() - leave)
            while left > 0:
                left -= file.write(bytes(min(left, 1 << 20)))
                file.flush()
        self.full_since = time.monotonic()
        self.trouble_until = float("inf")

    def empty(self) -> None:
        """Have room again."""
        (self.root / "ballast").unlink(missing_ok=True)
        self.full_since = None
        self.trouble_until = time.monotonic() + 60

    def held_by_copies(self) -> int:
        """Bytes that our copies alone hold."""
        found: dict[int, int] = {}
        for run in os.listdir(self.runs):  # `os.walk` passes over what is removed meanwhile
            for folder, _, names in os.walk(self.runs / run / "_ckptguard" / "kept"):
                for name in names:
                    with contextlib.suppress(OSError):
                        info = os.lstat(os.path.join(folder, name))
                        if info.st_nlink == 1:
                            found[info.st_ino] = info.st_blocks * 512
        return sum(found.values())

    def close(self) -> None:
        """Take a small one away."""
        if self.small:
            subprocess.run(["umount", "--lazy", str(self.root)], check=False)


@dataclass
class Save:
    """A save in its place. `state` is what the trainer, or the driver's damage, made of it."""

    step: int
    state: str


class Run:
    """One simulated training."""

    def __init__(self, disk: Disk, name: str, chance: random.Random) -> None:
        self.disk, self.name, self.chance = disk, name, chance
        self.trainer: Trainer = chance.choice(KINDS)(LARGE if disk.small else SMALL, chance.choice((2, 3)))
        self.where, self.state = disk.runs, "training"
        self.begin()

    @property
    def folder(self) -> Path:
        """Where it is now."""
        return self.where / self.name

    def begin(self) -> None:
        """Start from nothing."""
        self.files = Files(self.folder)
        self.folder.mkdir()
        add_user_files(self.files, self.chance, self.trainer.name(10))
        self.step = 0
        self.saves: dict[str, Save] = {}  # by the checkpoint's path
        self.steps: dict[str, int] = {}  # of all saves that there ever were
        self.paused: set[str] = set()  # whose writer paused for longer than `settle`
        self.wrote_at = time.monotonic()  # when its trainer wrote last
        self.spoilt: set[str] = set()  # paths that ever held something else than a good save
        self.healthy: set[str] = set()  # digests of all files of good saves
        self.ever: dict[str, set[str]] = defaultdict(set)  # the same, by the file's path
        self.saving: Steps | None = None
        self.saved_as = ""
        self.sick_left = 0
        self.saved_since: float = 0.0
        self.state = "training"

    def note_a_pause(self) -> None:
        """Remember a save whose writer paused for longer than the daemon waits. On a busy machine each one may."""
        if self.saving is not None and time.monotonic() - self.wrote_at > 2 * SETTLE:
            self.paused.add(self.saved_as)

    def __repr__(self) -> str:
        return f"{self.folder} ({type(self.trainer).__name__})"


class Soak:
    """The driver."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chance = plan, random.Random(plan.seed)
        self.report = Report(plan)
        self.disks = [Disk(plan.folder / "disk", small=False)]
        if os.geteuid() == 0:
            self.disks += [Disk(plan.folder / f"small-{n}", small=True) for n in range(plan.disks)]
        elif plan.disks:
            self.report.figures["skipped"] = "no full disks: only root can mount a small tmpfs"
        self.fleet = plan.folder / "fleet.toml"
        folders = json.dumps([str(disk.runs) for disk in self.disks])
        self.fleet.write_text(f"folders = {folders}\n[settings]\nunfinished_limit = {UNFINISHED:g}\n")
        self.names = 0
        self.runs = [self._new_run(n) for n in range(plan.runs)]
        self.gone: dict[str, tuple[float, bool]] = {}  # a path that was left -> since when, and whether that was noted
        self.environment = {"XDG_CACHE_HOME": str(plan.folder / "cache")}
        self.daemon: DaemonProcess | None = None
        self.down_until = 0.0
        self.began_daemon = 0.0
        self.log_at = 0
        self.orphans: list[tuple[int, str]] = []
        self.judged_good: set[tuple[str, str]] = set()
        self.samples: list[dict[str, float]] = []
        self.end = time.monotonic() + plan.minutes * 60
        self.kills_until = time.monotonic() + plan.minutes * 60 * 0.4
        self.spent = 0.0  # CPU seconds of daemons that are gone

    def _new_run(self, number: int) -> Run:
        small = self.disks[1:]
        disk = small[number // 2] if number < 2 * len(small) else self.disks[0]
        self.names += 1
        return Run(disk, f"run-{self.names}", random.Random(self.plan.seed * 100_003 + number))

    # The loop

    def go(self) -> Report:
        """Run it to its end."""
        jobs: list[tuple[float, Callable[[], None]]] = [  # every so many seconds
            (0.0, self.advance),
            (max(0.1, 20.0 / self.plan.runs), self.look_at_the_next),
            (1.0, self.read_log),
            (1.0, self.look_at_the_resting),
            (2.0, self.look_at_the_gone),
            (5.0, self.sample),
        ]
        scale = max(0.15, min(1.0, self.plan.minutes / 10))  # a short soak does everything, too
        random_jobs: list[tuple[float, Callable[[], None]]] = [  # on average every so many seconds
            (20 * scale, self.remove_a_run),
            (20 * scale, self.move_a_run),
            (15 * scale, self.damage_a_save),
            (25 * scale, self.kill_a_trainer),
            (10 * max(scale, 0.4), self.rest_a_run),
            (60 * scale, self.fill_a_disk),
            (min(240, (self.kills_until - time.monotonic()) / 3), self.kill_the_daemon),
        ]
        now = time.monotonic()
        due = dict.fromkeys(range(len(jobs)), now)
        due_at_random = {n: now + self.chance.expovariate(1 / mean) for n, (mean, _) in enumerate(random_jobs)}
        self.start_daemon()
        try:
            while (now := time.monotonic()) < self.end:
                for number, (every, job) in enumerate(jobs):
                    if now >= due[number]:
                        due[number] = now + every
                        job()
                for number, (mean, act) in enumerate(random_jobs):
                    if now >= due_at_random[number]:
                        due_at_random[number] = now + self.chance.expovariate(1 / mean)
                        act()
                if self.daemon is None and now >= self.down_until:
                    self.start_daemon()
                time.sleep(0.05)
            self.come_to_rest()
        finally:
            self.close()
        return self.report

    def come_to_rest(self) -> None:
        """In the end all disks have room, all saves end, and everything must get its right verdict."""
        if self.daemon is None:
            self.start_daemon()
        for disk in self.disks:
            disk.empty()
        self.bring_back(lambda run: run.state == "parked")
        for run in self.runs:
            if run.state == "gone":
                continue
            self.finish_save(run)
            run.state, run.saved_since = "last rest", time.monotonic()
        deadline = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline and any(run.state == "last rest" for run in self.runs):
            self.look_at_the_resting()
            self.read_log()
            time.sleep(0.2)
        for run in self.runs:
            self.check_files(run)
        self.look_at_the_gone()
        self.measure()

    def close(self) -> None:
        """Leave no process and no mount behind."""
        if self.daemon is not None:
            code = self.daemon.stop()
            if code != 0:
                self.report.violation("daemon", f"it ended with {code}")
            self.read_log()
        for disk in self.disks:
            disk.close()

    # Training

    def advance(self) -> None:
        """Each trainer writes a bit of its save, and some begin one."""
        now = time.monotonic()
        share = self.plan.pace / self.plan.runs
        for run in self.runs:
            if run.state != "training":
                continue
            if run.saving is None:
                run.saved_since = run.saved_since or now - run.chance.random() / share
                if now - run.saved_since >= run.chance.uniform(0.7, 1.3) / share:
                    run.saved_since = now
                    self.begin_save(run)
            elif now >= run.saved_since:
                self.continue_save(run)
                # A writer that pauses longer than the daemon waits for it to settle.
                pause = run.chance.uniform(2 * SETTLE, 6 * SETTLE) if run.chance.random() < 0.1 else 0.0
                run.saved_since = now + pause

    def begin_save(self, run: Run) -> None:
        """The next save, and before it the user's own log."""
        run.step += 10
        if run.sick_left:
            run.sick_left -= 1
        elif run.chance.random() < 0.06:
            run.sick_left = run.chance.randint(1, 3)
        sick = run.sick_left > 0
        name = run.trainer.name(run.step)
        run.saved_as = name
        run.steps[name] = run.step
        run.saves[name] = Save(run.step, "writing sick" if sick else "writing")
        if sick:
            run.spoilt.add(name)
        run.wrote_at = time.monotonic()
        run.saving = run.trainer.save(run.files, run.step, run.chance.getrandbits(32), sick=sick)
        self.report.actions["saves of NaN" if sick else "saves"] += 1

    def continue_save(self, run: Run) -> None:
        """The next write."""
        assert run.saving is not None
        run.note_a_pause()
        save = run.saves[run.saved_as]
        before = run.disk.free() + self.releasable(run) if run.disk.small else 0
        try:
            next(run.saving)
        except StopIteration:
            run.saving = None
            save.state = SICK if save.state == "writing sick" else GOOD
            if save.state == GOOD:
                for name, of in run.files.below(run.saved_as).items():
                    run.healthy.add(of)
                    run.ever[name].add(of)
            self.rotate(run)
        except OSError as error:
            run.saving = None
            self.leave_half(run)
            self.save_failed(run, error, before)
        run.wrote_at = time.monotonic()

    def finish_save(self, run: Run) -> None:
        """Write what is left of a save."""
        while run.saving is not None:
            self.continue_save(run)

    def leave_half(self, run: Run) -> None:
        """A trainer died in a save. The one before is whole where the new one has another name until its end."""
        files = run.files.below(run.saved_as)
        whole = bool(files) and all(of in run.ever[name] for name, of in files.items())
        run.saves[run.saved_as].state = GOOD if whole else HALF if run.healthy else FIRST
        if not whole:
            run.spoilt.add(run.saved_as)
        if not files:
            del run.saves[run.saved_as]

    def rotate(self, run: Run) -> None:
        """Remove what is older than the newest saves."""
        if run.trainer.fixed:
            return
        for name, _ in sorted(run.saves.items(), key=lambda item: item[1].step)[: -run.trainer.keep]:
            del run.saves[name]
            run.files.remove(name)

    def save_failed(self, run: Run, error: OSError, before: int) -> None:
        """A save may fail where it would not fit without our copies."""
        self.report.actions["saves that failed"] += 1
        if error.errno != errno.ENOSPC:
            self.report.violation("save", f"{run}: {error}")
            return
        since = run.disk.full_since
        in_time = since is None or time.monotonic() - max(since, self.began_daemon) > 2 * INTERVAL + 2 * SETTLE
        if self.daemon is not None and in_time and before > run.trainer.size * 4 + (256 << 10):
            self.report.violation(
                "room", f"{run}: no space for a save, but {before >> 10} KiB with our copies released"
            )

    def releasable(self, run: Run) -> int:
        """Bytes that copies hold, but for one good save of each run."""
        runs = sum(other.disk is run.disk for other in self.runs)
        return max(0, run.disk.held_by_copies() - runs * run.trainer.size * 4)

    # What happens to runs

    def a_run(self, where: Callable[[Run], bool] = lambda run: True) -> Run | None:
        """A training run at random."""
        found = [run for run in self.runs if run.state == "training" and where(run)]
        return self.chance.choice(found) if found else None

    def remove_a_run(self) -> None:
        """`rm -rf` or `shutil.rmtree`, mostly while the daemon works on it: it must succeed, and be the end of it."""
        if (run := self.a_run()) is None:
            return
        if self.chance.random() < 0.7:
            self.finish_save(run)  # the daemon now looks at it
            time.sleep(self.chance.choice((0.0, 0.05, SETTLE, SETTLE + 0.1)))
        how = self.chance.choice(("rm", "rmtree"))
        self.report.actions[f"removed by {how}"] += 1
        self.read_log()
        try:
            if how == "rmtree":
                shutil.rmtree(run.folder)
            else:
                done = subprocess.run(["rm", "-rf", str(run.folder)], capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise OSError(done.stderr.strip())
        except OSError as error:
            left = sorted(str(path.relative_to(run.folder)) for path in below(run.folder))
            self.report.violation("removal", f"{run}: {how}: {error}; left: {', '.join(left)}")
        while run.folder.exists():
            shutil.rmtree(run.folder, ignore_errors=True)
        self.leave(run)
        run.state = "gone"
        run.saved_since = time.monotonic() + self.chance.uniform(3 * INTERVAL, 6 * INTERVAL)

    def move_a_run(self) -> None:
        """To another name in the fleet, or out of it; later it comes back."""
        if (run := self.a_run()) is None:
            return
        self.finish_save(run)
        old, out = run.folder, self.chance.random() < 0.5
        run_where = run.disk.parked if out else run.disk.runs
        self.names += 1
        name = f"run-{self.names}"
        self.report.actions["moved out" if out else "moved in the fleet"] += 1
        self.read_log()
        try:
            old.rename(run_where / name)
        except OSError as error:
            self.report.violation("move", f"{run}: {error}")
            return
        self.leave(run)
        run.where, run.name = run_where, name
        run.files.root = run.folder
        if out:
            run.state = "parked"
            run.saved_since = time.monotonic() + self.chance.uniform(3 * INTERVAL, 6 * INTERVAL)

    def leave(self, run: Run) -> None:
        """A run's path is now nobody's: nothing may be made there, and nothing said of it."""
        run.saving = None
        self.gone[str(run.folder)] = (time.monotonic(), False)
        self.judged_good = {(folder, id) for folder, id in self.judged_good if folder != str(run.folder)}

    def look_at_the_gone(self) -> None:
        """What was removed or moved away stays away, until the driver makes it again."""
        now = time.monotonic()
        for folder, (since, _) in list(self.gone.items()):
            if os.path.lexists(folder):
                inside = sorted(str(path.relative_to(folder)) for path in below(Path(folder)))[:5]
                self.report.violation("made again", f"{folder} after {now - since:.1f} s: {inside}")
                shutil.rmtree(folder, ignore_errors=True)
        for run in self.runs:
            if run.state == "gone" and now >= run.saved_since and run.disk.full_since is None:
                self.gone.pop(str(run.folder), None)
                run.begin()
                self.report.actions["started again"] += 1
        self.bring_back(lambda run: run.state == "parked" and now >= run.saved_since)

    def bring_back(self, which: Callable[[Run], bool]) -> None:
        """Move runs back that were moved out of the fleet."""
        for run in filter(which, self.runs):
            self.check_files(run)
            old = run.folder
            run.where = run.disk.runs
            self.gone.pop(str(run.folder), None)
            old.rename(run.folder)
            run.files.root = run.folder
            run.state, run.saved_since = "training", time.monotonic()
            self.report.actions["moved back"] += 1

    def damage_a_save(self) -> None:
        """Flip a bit behind the back of the times, or cut a file."""
        run = self.a_run(lambda run: run.saving is None and any(s.state == GOOD for s in run.saves.values()))
        if run is None or run.trainer.fixed:
            return
        name = self.chance.choice([n for n, save in run.saves.items() if save.state == GOOD])
        files = [n for n in run.files.below(name) if n.endswith((".pt", ".safetensors"))]
        path, cut = run.folder / self.chance.choice(files), self.chance.random() < 0.5
        data, info = bytearray(path.read_bytes()), path.stat()
        data[-len(data) // 3] ^= 4
        with path.open("r+b") as file:
            if cut:
                file.truncate(len(data) // 2)
                data = data[: len(data) // 2]
            else:
                file.write(data)
        if not cut:
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        run.files.digests[str(path.relative_to(run.folder))] = digest(bytes(data))
        run.saves[name].state = CUT if cut else ROTTEN
        run.spoilt.add(name)
        self.report.actions["files cut" if cut else "bits flipped"] += 1

    def kill_a_trainer(self) -> None:
        """In the middle of a save; it goes on with the next one."""
        if run := self.a_run(lambda run: run.saving is not None):
            run.saving = None
            self.leave_half(run)
            self.report.actions["trainers killed in a save"] += 1

    def fill_a_disk(self) -> None:
        """Leave room for less than one save, or for a few; or make room again."""
        if not (small := self.disks[1:]):
            return
        disk = self.chance.choice(small)
        if disk.full_since is None:
            disk.fill(int(LARGE * 4 * self.chance.choice((0.0, 0.5, 1.2, 2.0, 3.0))))
            self.report.actions["disks filled"] += 1
        else:
            disk.empty()
            self.report.actions["disks emptied"] += 1

    # The daemon

    def start_daemon(self) -> None:
        """Over the whole fleet."""
        quick = {"CKPTGUARD_SETTLE": str(SETTLE), "CKPTGUARD_SCAN_INTERVAL": str(INTERVAL)}
        arguments = ("--fleet", str(self.fleet), "--log-format", "json")
        self.daemon = DaemonProcess(self.plan.folder, arguments=arguments, **quick, **self.environment)
        self.log_at, self.began_daemon = 0, time.monotonic()
        self.socket = self.daemon.address
        self.report.actions["daemons started"] += 1

    def kill_the_daemon(self) -> None:
        """kill -9, and start it again soon. The last part of a soak belongs to one daemon, for its memory."""
        if self.daemon is None or time.monotonic() > self.kills_until:
            return
        children = _family(self.daemon.process.pid)[1:]
        self.spent += sum(_cpu(pid) for pid in [self.daemon.process.pid, *children])
        orphans = [(pid, _started(pid)) for pid in children]
        self.daemon.kill()
        self.read_log()
        self.report.actions["daemons killed"] += 1
        self.daemon = None
        self.samples.clear()
        self.down_until = time.monotonic() + self.chance.uniform(0, 5)
        with contextlib.suppress(AssertionError):
            until(lambda: all(_started(pid) != at for pid, at in orphans), "the end of its processes", 30)
            return
        self.report.violation("orphan", f"processes of a killed daemon live on: {orphans}")

    def read_log(self) -> None:
        """What it said since the last time."""
        if self.daemon is None:
            return
        with self.daemon.log_path.open("rb") as file:
            file.seek(self.log_at)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self.log_at += len(data)
        if self.daemon.process.poll() not in (None, 0, -9):
            self.report.violation("daemon", f"it ended with {self.daemon.process.returncode}")
        for text in data.decode().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                self.report.violation("traceback", text)
                continue
            self.report.logged[f"{line['level']} {line['event']}"] += 1
            self.judge_line(line, text)

    def judge_line(self, line: dict[str, Any], text: str) -> None:
        """No traceback, no error that is not a full disk's, no alarm for what is fine or gone."""
        folder = str(line.get("run", ""))
        run = next((run for run in self.runs if str(run.folder) == folder and run.state != "gone"), None)
        if "Traceback" in text:
            self.report.violation("traceback", text)
        elif folder in self.gone and line["level"] != "info" and line["event"] != "verified":
            since, noted = self.gone[folder]
            if not noted:
                self.gone[folder] = (since, True)
                self.report.violation("alarm", f"for a run that is gone: {text}")
        elif line["level"] == "error" and not (run and run.disk.trouble_until > time.monotonic()):
            self.report.violation("error", text)
        elif run is not None and line["event"] == "verified":
            run.note_a_pause()
            if line["outcome"] == "good":
                self.judged_good.add((folder, line["path"]))
            elif line["outcome"] == "incomplete" and line["path"] in run.paused:
                # Nothing held it open for twice `settle`: so it is judged as it is, and again when it is whole.
                self.report.actions["verdicts on a save that paused"] += 1
            elif line["path"] not in run.spoilt:
                self.report.violation("false alarm", f"{run}: {text}")
        elif run is not None and line["event"] == "lost":
            for path in {name for at, name in self.judged_good if at == folder}:
                if path in line["reason"] and path not in run.spoilt and not run.trainer.fixed:
                    self.report.violation("false alarm", f"{run}: it had its verdict: {text}")

    def ask(self, run: Run, what: str) -> tuple[int, Any]:
        """What the daemon answers about a run."""
        assert self.daemon is not None
        try:
            return request(self.socket, "GET", _url(run, what))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return 0, str(error)

    # What must hold

    def look_at_the_next(self) -> None:
        """The files of one run after the other."""
        self.runs.append(self.runs.pop(0))
        self.check_files(self.runs[-1])

    def check_files(self, run: Run) -> None:
        """Everything of a user's is what it wrote, and nothing else is there."""
        if run.state == "gone":
            return
        found = {name: digest_of(run.folder / name) for name in _names(run.folder)}
        for name in sorted(found.keys() | run.files.digests.keys()):
            was, now = run.files.digests.get(name), found.get(name)
            if was == now:
                continue
            kind = "lost" if now is None else "changed" if was is not None else "made"
            self.report.violation(f"user's file {kind}", f"{run}: {name}")
        run.files.digests = found
        self.report.actions["files compared"] += len(found)

    def rest_a_run(self) -> None:
        """Its trainer pauses after a save, until all verdicts are there."""
        if run := self.a_run(lambda run: run.saving is None and bool(run.saves)):
            run.state, run.saved_since = "resting", time.monotonic()

    def look_at_the_resting(self) -> None:
        """Each verdict is what the driver knows; then training goes on, after a rollback where it went wrong."""
        if self.daemon is None:
            return
        now = time.monotonic()
        for run in [run for run in self.runs if run.state in ("resting", "last rest")]:
            quiet = now - max(run.saved_since, self.began_daemon)
            if run.disk.full_since is not None:  # nothing can be recorded there
                run.saved_since = now
            if quiet < 2 * SETTLE:
                continue
            reason = self.wrong_verdicts(run)
            if reason and quiet < PATIENCE:
                continue
            if reason:
                self.report.violation("verdict", f"{run}: after {quiet:.0f} s of rest: {reason}")
            self.report.actions["runs whose verdicts were compared"] += 1
            if run.state == "last rest":
                run.state = "ended"
                continue
            newest = max(run.saves.values(), key=lambda save: save.step, default=None)
            if newest is not None and newest.state == SICK and not reason and self.chance.random() < 0.5:
                self.roll_back(run)
            run.state, run.saved_since = "training", time.monotonic()

    def wrong_verdicts(self, run: Run) -> str:
        """What the daemon says otherwise of a resting run, or nothing."""
        status, answer = self.ask(run, "checkpoints")
        if status == 404 and not run.saves:
            return ""  # a folder without a checkpoint is no run
        if status != 200:
            return f"it answers {status}: {answer}"
        found = [c for c in answer["checkpoints"] if c["in_place"]]
        outcomes = {c["path"]: "pending" if c["changed"] else c["outcome"] for c in found}
        for name, save in run.saves.items():
            outcome = outcomes.get(name)
            if save.state in (ROTTEN, FIRST):
                continue
            if outcome == "good" if save.state not in EXPECTED else outcome not in EXPECTED[save.state]:
                return f"{name} is {save.state}, and for the daemon {outcome}"
        status, answer = self.ask(run, "known-good")
        if status != 200:
            return f"there is no known-good: {answer}" if any(s.state == GOOD for s in run.saves.values()) else ""
        path = Path(answer["path"])
        name = os.path.relpath(path, run.folder)
        if name in run.saves:
            state = run.saves[name].state
            return "" if state in (GOOD, ROTTEN, FIRST) else f"known-good is {name}, which is {state}"
        files = [path] if path.is_file() else [p for p in below(path) if p.is_file()]
        wrong = [str(p) for p in files if digest(p.read_bytes()) not in run.healthy]
        return "" if files and not wrong else f"known-good {path} holds other bytes than were saved: {wrong}"

    def roll_back(self, run: Run) -> None:
        """By the command. It may move saves to quarantine, put a good one back, and point a pointer at it; no more."""
        self.check_files(run)
        environment = os.environ | self.environment | {"CKPTGUARD_SETTLE": str(SETTLE)}
        program = [sys.executable, "-m", "ckptguard", "rollback", "--json", str(run.folder)]
        has_good = self.ask(run, "known-good")[0] == 200
        half = any(save.state in (HALF, FIRST) for save in run.saves.values())
        done = subprocess.run(
            program, capture_output=True, text=True, check=False, cwd=self.plan.folder, env=environment
        )
        self.report.actions[f"rollbacks that ended with {done.returncode}"] += 1
        if "Traceback" in done.stderr:
            self.report.violation("traceback", done.stderr)
        if done.returncode != 0 and has_good and not half and run.disk.full_since is None:
            self.report.violation("rollback", f"{run}: ended with {done.returncode}: {done.stderr}")
        before, found = run.files.digests, {name: digest_of(run.folder / name) for name in _names(run.folder)}
        quarantine = run.folder / "_ckptguard" / "quarantine"
        moved = {digest_of(path) for path in below(quarantine) if path.is_file()} if quarantine.exists() else set()
        pointers = run.trainer.pointers()
        for name in sorted(found.keys() | before.keys()):
            was, now = before.get(name), found.get(name)
            if was == now or name in pointers:
                continue
            if was is not None and was not in moved and name not in pointers:
                self.report.violation("rollback", f"{run}: {name} is not in quarantine")
            if now is not None and now not in run.ever[name]:
                self.report.violation("rollback", f"{run}: {name} has bytes that no good save had")
            if not any(name == save or name.startswith(f"{save}/") for save in run.steps):
                self.report.violation("user's file changed", f"{run}: a rollback touched {name}")
        run.files.digests = found
        for name in run.steps.keys() - run.saves.keys():  # rotated away long ago, and put back from a copy
            if run.files.below(name):
                run.saves[name] = Save(run.steps[name], HALF)
        for name, save in list(run.saves.items()):
            files = run.files.below(name)
            if not files:
                del run.saves[name]
            elif all(of in run.ever[file] for file, of in files.items()):
                save.state = GOOD
        for name in pointers:
            path = run.folder / name
            target = os.readlink(path) if path.is_symlink() else path.read_text() if path.exists() else None
            if done.returncode == 0 and target is not None and target not in run.saves:
                self.report.violation("rollback", f"{run}: {name} points to {target}, which is not there")
        newest = max(run.saves.values(), key=lambda save: save.step, default=None)
        if done.returncode == 0 and newest is not None and newest.state == SICK:
            self.report.violation("rollback", f"{run}: the newest is sick")
        run.step = max((save.step for save in run.saves.values()), default=0)
        run.sick_left = 0

    # What it costs

    def sample(self) -> None:
        """Memory, open files, threads and watches of the daemon now."""
        if self.daemon is None or self.daemon.process.poll() is not None:
            return
        pid = self.daemon.process.pid
        with contextlib.suppress(OSError):
            self.samples.append(
                {
                    "memory": float(_status(pid, "VmRSS")),
                    "memory of its processes": float(sum(_status(one, "VmRSS") for one in _family(pid))),
                    "threads": float(_status(pid, "Threads")),
                    "open files": float(len(os.listdir(f"/proc/{pid}/fd"))),
                    "watches": float(_watches(pid)),
                }
            )

    def measure(self) -> None:
        """Compare the first third of the last daemon's life, after a fifth to warm up, with the last third."""
        assert self.daemon is not None
        family = _family(self.daemon.process.pid)
        seconds = time.monotonic() - self.report.began
        self.report.figures["cores of the daemon"] = round((self.spent + sum(map(_cpu, family))) / seconds, 3)
        self.report.figures["cores of the driver"] = round(time.process_time() / seconds, 3)
        records = {str(run): _records(run.folder) / max(1, run.step // 10) for run in self.runs if run.state == "ended"}
        if records:
            worst = max(records, key=lambda name: records[name])
            self.report.figures["largest records of a save, KiB"] = round(records[worst] / 1024, 1)
            if records[worst] > 128 << 10:
                self.report.violation("records", f"{worst}: {records[worst] / 1024:.0f} KiB for each save")
        later = self.samples[len(self.samples) // 5 :]
        third = len(later) // 3
        if third < 20:
            self.report.figures["memory"] = "too short to say"
            return
        for name in later[0]:
            first, last = (statistics.median(s[name] for s in part) for part in (later[:third], later[-third:]))
            self.report.figures[name] = {"first third": first, "last third": last, "ratio": round(last / first, 4)}
            slack = 0 if "memory" in name else 16  # a few files come and go with the work
            if last > first * 1.05 + slack:
                self.report.violation("memory" if "memory" in name else "leak", f"{name}: {first:g}, then {last:g}")


def _names(folder: Path) -> Iterator[str]:
    """All files and links of a run that are not our records."""
    for root, folders, files in os.walk(folder):
        if Path(root) == folder and "_ckptguard" in folders:
            folders.remove("_ckptguard")
        for name in files + [one for one in folders if os.path.islink(os.path.join(root, one))]:
            yield os.path.relpath(os.path.join(root, name), folder)


def _records(folder: Path) -> int:
    """Bytes of a run's records, without the bytes of checkpoints."""
    total = 0
    for root, folders, files in os.walk(folder / "_ckptguard"):
        if Path(root).parent == folder:
            folders[:] = [one for one in folders if one not in ("kept", "quarantine", "trash")]
        total += sum(os.lstat(os.path.join(root, name)).st_size for name in files)
    return total


def _url(run: Run, what: str) -> str:
    from ckptguard.storage import normalise_url
    from ckptguard.values.ids import run_id_of

    return f"/v1/runs/{run_id_of(normalise_url(run.folder))}/{what}"


def _status(pid: int, key: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{key}:")), 0)


def _family(pid: int) -> list[int]:
    """A process and all of its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    found += _family(int(child))
    return found


def _started(pid: int) -> str:
    """When a process began, as the kernel counts; nothing if it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]


def _cpu(pid: int) -> float:
    """Processor seconds of a process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12]) + int(words[13]) + int(words[14])) / _TICKS


def _watches(pid: int) -> int:
    """Its inotify watches."""
    count = 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            count += path.read_text().count("inotify wd:")
    return count


def soak(plan: Plan) -> Report:
    """Run one soak in an empty folder."""
    return Soak(plan).go()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--disks", type=int, default=3)
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="where to put everything; a temporary folder if not given")
    told = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cg-soak-", dir=told.folder))  # short, for the daemon's socket
    report = soak(Plan(folder, told.minutes, told.runs, told.seed, told.disks, told.pace))
    print(json.dumps(report.summary(), indent=2))
    if not report.wrong:
        shutil.rmtree(folder)
    else:
        print(f"everything is in {folder}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
